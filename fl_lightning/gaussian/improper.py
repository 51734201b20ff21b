"""Gaussians without any precision: what they multiply to is the average of their means."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fl_lightning.gaussian.base import Gaussian
from fl_lightning.params import Params, cast_like, weighted_sum, zip_map


@dataclass(frozen=True)
class Flat(Gaussian, stored_as="fl_lightning.gaussian.flat.Flat"):
    """An improper Gaussian with precision damping * I; nothing but its mean is sent.

    Attributes:
        mean: mu.
        damping: All the precision that it has.
    """

    mean: Params
    damping: float = 0.0

    def apply(self, vector: Params) -> Params:
        return zip_map(lambda v: v * self.damping, vector)

    def solve(self, vector: Params) -> Params:
        return zip_map(lambda v: v.double() / self.damping, vector)

    def log_determinant(self) -> Tensor:
        return self.size * torch.tensor(self.damping, dtype=torch.float64).log()

    def damped(self, damping: float) -> Self:
        return replace(self, damping=self.damping + damping)

    @classmethod
    def product(cls, posteriors: Sequence[Self], weights: Sequence[float], damping: float = 0.0) -> Self:
        total = damping + sum(weight * posterior.damping for posterior, weight in zip(posteriors, weights, strict=True))
        shares: Sequence[float] = weights
        if total > 0:
            shares = [w * (e.damping + damping) / total for e, w in zip(posteriors, weights, strict=True)]
        mean = weighted_sum((posterior.mean for posterior in posteriors), shares)
        return cls(cast_like(mean, posteriors[0].mean), total)

    def diagonal(self) -> Params:
        return zip_map(lambda m: torch.full_like(m, self.damping), self.mean)

    def largest_eigenvalue(self) -> float:
        return self.damping

    def parts(self) -> Params:
        return {}

    def with_parts(self, parts: Params) -> Self:
        return self
