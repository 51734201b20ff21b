"""FedYogi: FedAvg whose server steps with Yogi.

    Delta = sum_n p_n (y_n - x)        m <- beta_1 m + (1 - beta_1) Delta
    v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)        x <- x + eta_s m / (sqrt(v) + tau)

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021.

A named setting of `fedopt`. Unlike Adam's, the mean square changes by at most (1 - beta_2) Delta^2 in a round, so that
small updates after large ones do not raise the step size at once.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.fedopt import FedOpt


@dataclass(frozen=True)
class FedYogi(FedOpt):
    """FedAvg whose server steps with Yogi: as Adam, with step sizes that grow slowly."""

    optimiser: Literal["yogi"] = "yogi"
