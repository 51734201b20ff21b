"""Fisher merging: models are averaged parameter by parameter, weighted by how well the clients' data determine them.

    F_n  = (1/m_n) sum_i g_i^2                                      g_i: gradient of the loss of sample i at y_n
    mu_S <- sum_n p_n (F_n + gamma) y_n / sum_n p_n (F_n + gamma)        y_n = SGD on L_n from mu_S

Matena, Raffel: Merging Models with Fisher-Weighted Averaging, NeurIPS 2022.

A named setting of `fola`: the product of Gaussians whose precision is the diagonal Fisher of the client's own samples
at the end of training, without prior loss and without memory of earlier rounds. It is a one-shot method; more rounds
are the same again.

Where the original and codes of rivals differ:
- the original weighs models by hand-tuned coefficients in place of p_n, and has a floor of 1e-6 for the Fisher in place
  of gamma, which here is relative to its mean;
- the labels of g_i are those of the data (empirical Fisher); the original draws them from the model's predictions, or
  takes the expectation over them;
- FedFisher's code compares with it outside the loop over rounds, with one partition for all seeds.
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.fola import Fola


@dataclass(frozen=True)
class FisherMerging(Fola):
    """One-shot merging: parameters weighted by the clients' diagonal Fisher at the end of training."""

    curvature: Literal["offline"] = "offline"
    fisher: Literal["per_sample"] = "per_sample"
    strength: float = 0.0
