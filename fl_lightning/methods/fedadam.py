"""FedAdam: FedAvg whose server steps with Adam.

    Delta = sum_n p_n (y_n - x)        m <- beta_1 m + (1 - beta_1) Delta
    v <- beta_2 v + (1 - beta_2) Delta^2        x <- x + eta_s m / (sqrt(v) + tau)

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021.

A named setting of `fedopt`, which says where published codes differ.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.fedopt import FedOpt


@dataclass(frozen=True)
class FedAdam(FedOpt):
    """FedAvg whose server steps with Adam: a step size for every parameter."""

    optimiser: Literal["adam"] = "adam"
