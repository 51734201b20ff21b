"""FedAdagrad: FedAvg whose server steps with Adagrad.

    Delta = sum_n p_n (y_n - x)        v <- v + Delta^2        x <- x + eta_s Delta / (sqrt(v) + tau)

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021.

A named setting of `fedopt`: no momentum, and squares that only grow, so that steps shrink from round to round.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.fedopt import FedOpt


@dataclass(frozen=True)
class FedAdagrad(FedOpt):
    """FedAvg whose server steps with Adagrad: a step size for every parameter, which only shrinks."""

    optimiser: Literal["adagrad"] = "adagrad"
    server_momentum: float = 0.0
