"""FedLPA: one-shot merging with layer-wise posteriors, empirical Kronecker factors with the same absolute damping.

    M_S <- [sum_n p_n G_n]^-1 [sum_n p_n G_n M_n A_n] [sum_n p_n A_n]^-1

Liu, Liu, Ye, Shen, Li, Jiang, Li: FedLPA: One-shot Federated Learning with Layer-Wise Posterior Aggregation,
NeurIPS 2024.

A named setting of `fola`, both factors damped by sqrt(0.001), without prior loss and memory; `solver cg` solves
exactly instead of factor by factor. The published code reports the larger of two aggregators' test accuracies, of
which the second takes 10,000 gradient steps and has not converged, and builds the prior of later rounds from detached
tensors, without gradient.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.fola import Fola


@dataclass(frozen=True)
class FedLPA(Fola):
    """One-shot merging: layer-wise posteriors of empirical Kronecker factors, each damped by the same number."""

    curvature: Literal["offline"] = "offline"
    curvature_form: Literal["kron"] = "kron"
    strength: float = 0.0
    slopes: Literal["empirical"] = "empirical"
    solver: Literal["cg", "factored"] = "factored"
    damping: float = 0.0316
    damping_slopes: float | None = 0.0316
    damping_mode: Literal["absolute"] = "absolute"
