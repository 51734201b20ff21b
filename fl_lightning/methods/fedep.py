"""FedEP: expectation propagation whose clients have one curvature for all parameters.

    H_n = scale m_n I

Guo, Greengard, Wang, Gelman, Kim, Xing: Federated Learning as Variational Inference: A Scalable Expectation
Propagation Approach, ICLR 2023.

A named setting of `ep`, which says where published codes differ.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.ep import EP


@dataclass(frozen=True)
class FedEP(EP):
    """Expectation propagation with one curvature for all parameters of a client."""

    inference: Literal["identity"] = "identity"
