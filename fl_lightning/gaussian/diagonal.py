"""Gaussians with diagonal precision: one number per parameter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.damping import Merging
from fl_lightning.params import Params, blocks, cast_like, count, flatten, numbers, weighted_sum, zip_map
from fl_lightning.penalty import Penalty, Quadratic


@dataclass(frozen=True)
class Diagonal(Gaussian, stored_as="fl_lightning.gaussian.diagonal.Diagonal"):
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
    def product(cls, posteriors: Sequence[Self], weights: Sequence[float], damping: float = 0.0) -> Self:
        """Element by element; where no posterior has any precision, the mean is the weighted average."""
        like = posteriors[0]
        mean, totals = {}, {}
        for name in like.mean:
            total = torch.zeros_like(like.mean[name], dtype=torch.float64)
            moment = torch.zeros_like(total)
            for posterior, weight in zip(posteriors, weights, strict=True):  # one at a time: no stack of float64 copies
                share = posterior.precision[name].double().add(damping).mul_(weight)
                total += share
                moment += share.mul_(posterior.mean[name])
            mean[name], totals[name] = moment, total
        gaps = numbers((total == 0).any() for total in totals.values())
        for (name, total), has_gaps in zip(totals.items(), gaps, strict=True):
            if has_gaps:
                improper, plain = total == 0, weighted_sum(({name: e.mean[name]} for e in posteriors), weights)[name]
                mean[name] = torch.where(improper, plain, mean[name]) / torch.where(improper, 1.0, total)
            else:
                mean[name].div_(total)
        return cls(cast_like(mean, like.mean), cast_like(totals, like.precision))

    @classmethod
    def merged(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> Self:
        like = posteriors[0]
        precision, gamma = _sum_and_damping(posteriors, weights, merging)
        mean = cls.product(posteriors, weights, gamma if merging.everywhere else 0.0).mean
        if not merging.everywhere:
            mean = zip_map(lambda m, a: (m * _ratio(a, a + gamma)).to(m.dtype), mean, precision)
        return cls(mean, cast_like(precision, like.precision))

    @classmethod
    def common_damping(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> float:
        return _sum_and_damping(posteriors, weights, merging)[1]

    @classmethod
    def weight_shift(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> float:
        """Mean over parameters of the l1 distance of the effective weights w_n Lambda_n / sum from w_n.

        It fades like 1/r if all posteriors share the term of earlier rounds: most of the product's effect is in the
        first rounds.
        """
        precision, gamma = _sum_and_damping(posteriors, weights, merging)
        gamma = gamma if merging.everywhere else 0.0
        parts_of_shift, shares = [], []
        for total, *parts in zip(
            blocks(precision), *(blocks(posterior.precision) for posterior in posteriors), strict=True
        ):
            scale = _ratio(torch.ones_like(total), total + gamma)
            for part, weight in zip(parts, weights, strict=True):  # (part + gamma) / (total + gamma) - 1
                parts_of_shift.append(torch.dot(torch.sub(part, total).abs_(), scale))
                shares.append(weight)
        moved = zip(shares, numbers(parts_of_shift), strict=True)
        return sum(weight * distance for weight, distance in moved) / count(precision)

    def diagonal(self) -> Params:
        return self.precision

    def largest_eigenvalue(self) -> float:
        return max(numbers(value.max() for value in self.precision.values()))

    def parts(self) -> Params:
        return self.precision

    def with_parts(self, parts: Params) -> Self:
        return replace(self, precision=parts)

    def prior_loss(self, strength: float, damping: float = 0.0) -> Penalty:
        return Quadratic(self.mean, zip_map(lambda a: (a + damping) * strength, self.precision))


def _sum_and_damping(
    posteriors: Sequence[Diagonal], weights: Sequence[float], merging: Merging
) -> tuple[Params, float]:
    """The sum of w_n Lambda_n in float64, and gamma, which may be relative to it."""
    precision = weighted_sum((posterior.precision for posterior in posteriors), weights)
    total = sum(numbers(value.sum() for value in precision.values()))
    return precision, merging.gamma(total, count(precision))


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """The quotient part / whole, and 1 where both are zero: without any precision a client counts as in an average."""
    return torch.where(whole > 0, part / whole, 1.0)
