"""FedAvgM: FedAvg with momentum at the server.

    u <- beta_1 u + sum_n p_n (x - y_n)        x <- x - eta_s u        y_n = SGD on L_n from x

Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.

A named setting of `fedopt`. In the long run the server steps 1 / (1 - beta_1) times as far as FedAvg, 10 times at 0.9.
FedExP's code compares with a FedAvgM(ExP) that has no momentum: a misspelt name skips the branch.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.fedopt import FedOpt


@dataclass(frozen=True)
class FedAvgM(FedOpt):
    """FedAvg with momentum at the server.

    Attributes:
        server_lr: Step size of the server (eta_s); with momentum 0, 1 takes the mean of the models.
    """

    optimiser: Literal["sgd"] = "sgd"
    server_lr: float = 1.0
