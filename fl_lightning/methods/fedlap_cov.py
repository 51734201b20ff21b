"""FedLap-Cov: expectation propagation with the Laplace approximation at the end of training.

    H_n = sum_i g_i^2 at y_n        over the client's samples

Swaroop, Khan, Doshi-Velez: Connecting Federated ADMM to Bayes, ICLR 2025.

A named setting of `ep`, which says where published codes differ.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.ep import EP


@dataclass(frozen=True)
class FedLapCov(EP):
    """Expectation propagation with the Laplace approximation where a client's training ends."""

    inference: Literal["laplace"] = "laplace"
    curvature: Literal["end"] = "end"
