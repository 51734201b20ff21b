"""Gaussians with diagonal precision: one number per parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from fl_lightning.gaussian.form import Gaussian
from fl_lightning.params import Params, cast_like, flatten, weighted_sum, zip_map


@dataclass(frozen=True)
class Diagonal(Gaussian):
    """A diagonal Gaussian.

    Attributes:
        mean: mu.
        precision: The diagonal of Lambda = Sigma^-1, shaped like the mean.
    """

    mean: Params
    precision: Params

    def apply(self, vector: Params) -> Params:
        return zip_map(lambda v, a: v * a.to(v.dtype), vector, self.precision)

    def solve(self, vector: Params) -> Params:
        return zip_map(lambda v, a: v.double() / a.double(), vector, self.precision)

    def log_determinant(self) -> Tensor:
        return flatten(self.precision).double().log().sum()

    def damped(self, damping: float) -> Self:
        return type(self)(self.mean, zip_map(lambda a: a + damping, self.precision))

    @classmethod
    def product(cls, experts: Sequence[Self], weights: Sequence[float], damping: float = 0.0) -> Self:
        """Element by element; where no expert has any precision, the mean is the weighted average."""
        like = experts[0]
        mean, precision = {}, {}
        for name in like.mean:
            total = torch.zeros_like(like.mean[name], dtype=torch.float64)
            moment = torch.zeros_like(total)
            for expert, weight in zip(experts, weights, strict=True):  # one at a time: no stack of float64 copies
                share = expert.precision[name].double().add(damping).mul_(weight)
                total += share
                moment += share.mul_(expert.mean[name])
            improper = total == 0
            if bool(improper.any()):
                moment = torch.where(improper, weighted_sum((e.mean for e in experts), weights)[name], moment)
                mean[name] = moment / torch.where(improper, 1.0, total)
            else:
                mean[name] = moment.div_(total)
            precision[name] = total
        return cls(cast_like(mean, like.mean), cast_like(precision, like.precision))
