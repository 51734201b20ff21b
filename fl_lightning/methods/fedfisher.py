"""FedFisher: one-shot merging with Kronecker-factored Fisher information.

    M_S <- argmin_M sum_n p_n <M - M_n, G_n (M - M_n) A_n>

Jhunjhunwala, Wang, Joshi: FedFisher: Leveraging Fisher Information for One-Shot Federated Learning, AISTATS 2024.

A named setting of `fola`: Kronecker factors G_n of slopes and A_n of inputs at the end of training, without prior
loss and memory; the diagonal variant of the paper is `fisher_merging`. Solved exactly by conjugate gradients; the
published code takes 2,000 steps of an Adam-like iteration and chooses among them by accuracy on 500 pooled training
samples. It also aggregates outside the loop over rounds, so that more rounds train again from the same model, and has
one partition for all seeds.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.fola import Fola


@dataclass(frozen=True)
class FedFisher(Fola):
    """One-shot merging: layers weighted by Kronecker factors of their Fisher information."""

    curvature: Literal["offline"] = "offline"
    curvature_form: Literal["kron"] = "kron"
    strength: float = 0.0
    damping: float = 0.1
