"""A diagonal Gaussian with one of its factors taken out: EP's cavity.

A factor is a Gaussian function of the parameters up to a constant, of offsets from a common point x_0:
t(theta) = exp(<v, theta - x_0> - 1/2 (theta - x_0)^T V (theta - x_0)). V may be negative: a factor is not always a
density.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.params import Params, cast_like, numbers, zeros, zip_map


class Factor(NamedTuple):
    """A Gaussian factor: v and the diagonal V, named like the parameters."""

    moment: Params
    precision: Params

    @classmethod
    def flat(cls, params: Params) -> "Factor":
        """The factor 1, which says nothing."""
        return cls(zeros(params), zeros(params))

    def gradient(self, params: Params, origin: Params) -> Params:
        """V (theta - x_0) - v: the gradient of -log t at theta."""

        def one(v: Tensor, a: Tensor, p: Tensor, o: Tensor) -> Tensor:
            return (a.double() * (p.double() - o.double()) - v.double()).to(p.dtype)

        return zip_map(one, self.moment, self.precision, params, origin)

    def moved(self, change: "Factor", rate: float) -> "Factor":
        """The factor after a step, t * change^rate, rounded once."""

        def one(old: Tensor, step: Tensor) -> Tensor:
            return old.double().add(step.double(), alpha=rate).to(old.dtype)

        return Factor(
            zip_map(one, self.moment, change.moment),
            zip_map(one, self.precision, change.precision),
        )


def change(posterior: Diagonal, before: Diagonal, origin: Params) -> Factor:
    """The factor q / q_S by which one Gaussian differs from another, in float64.

    P (y - x_0) - S (mu - x_0) is written as P (y - mu) + (P - S) (mu - x_0): equal Gaussians differ by nothing,
    exactly.
    """
    precision = zip_map(lambda p, s: p.double() - s.double(), posterior.precision, before.precision)

    def moment(p: Tensor, y: Tensor, m: Tensor, d: Tensor, o: Tensor) -> Tensor:
        return p.double() * (y.double() - m.double()) + d * (m.double() - o.double())

    return Factor(zip_map(moment, posterior.precision, posterior.mean, before.mean, precision, origin), precision)


def quotient(whole: Diagonal, gradient: Params, precision: Params, floor: float) -> Diagonal:
    """The Gaussian q / t: precision C = S - V, mean mu + (V (mu - x_0) - v) / C.

    Args:
        whole: q, with mean mu and precision S.
        gradient: V (mu - x_0) - v, of the factor that is taken out.
        precision: V.
        floor: What C is at least: a factor may be as precise as the whole, up to rounding or beyond.
    """
    left = zip_map(lambda s, v: (s.double() - v.double()).clamp(min=floor), whole.precision, precision)
    centre = zip_map(lambda m, g, c: m.double() + torch.where(c > 0, g.double() / c, 0.0), whole.mean, gradient, left)
    return Diagonal(cast_like(centre, whole.mean), cast_like(left, whole.precision))


def clips(whole: Params, precision: Params, floor: float) -> int:
    """Where S - V lies below the floor by more than rounding: there the quotient is not a density."""

    def beyond(s: Tensor, v: Tensor) -> Tensor:
        rounding = 8 * torch.finfo(s.dtype).eps * s.double().abs()
        return (s.double() - v.double() < floor - rounding).sum()

    return int(sum(numbers(zip_map(beyond, whole, precision).values())))


def below(precision: Params, floor: float) -> int:
    """Where a float64 precision lies below the floor by more than rounding: there it is clipped."""
    found = ((s < floor - 8 * torch.finfo(s.dtype).eps * abs(floor)).sum() for s in precision.values())
    return int(sum(numbers(found)))
