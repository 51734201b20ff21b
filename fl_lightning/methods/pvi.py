"""PVI, partitioned variational inference: expectation propagation whose clients train Gaussians by IVON.

    q_n = argmin (m_n / T) E_q[L_n] + KL(q || cavity)

Ashman, Bui, Nguyen, Markou, Weller, Swaroop, Turner: Partitioned Variational Inference, 2022.

A named setting of `ep`, which says where published codes differ.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.ep import EP


@dataclass(frozen=True)
class PVI(EP):
    """Partitioned variational inference: every client trains a Gaussian against all others' by IVON."""

    inference: Literal["vi"] = "vi"
    temperature: float = 0.1
