"""FedSEP: expectation propagation without memory, every client taking its share out of the posterior.

    t_n = (q_S / prior)^pi_n

Guo, Greengard, Wang, Gelman, Kim, Xing: Federated Learning as Variational Inference: A Scalable Expectation
Propagation Approach, ICLR 2023.

A named setting of `ep`, which says where published codes differ.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.ep import EP


@dataclass(frozen=True)
class FedSEP(EP):
    """Stochastic expectation propagation: a share of the posterior stands for every client's factor."""

    memory: Literal["sep"] = "sep"
