"""What a method adds to the local loss: L(theta) + P(theta).

Methods touch local training only through P. It is an object with a value and a closed-form gradient rather than a
function to differentiate: automatic differentiation of a quadratic over 545,810 parameters costs more than the whole
training step of the network, the closed form about a tenth of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.params import Params, zip_map
from fl_lightning.pieces import alike, can_be_cut, pieces


class Penalty(ABC):
    """P(theta), with its gradient. Pure; holds the tensors of one client."""

    @abstractmethod
    def value(self, params: Params) -> Tensor:
        """P(theta), a scalar."""

    @abstractmethod
    def grad(self, params: Params) -> Params:
        """The gradient of P at theta."""

    def value_and_grad(self, params: Params) -> tuple[Tensor, Params]:
        """Both at once, for penalties where one is a step towards the other."""
        return self.value(params), self.grad(params)

    def along_path(self) -> Callable[[Params], tuple[Tensor, Params]]:
        """`value_and_grad` for step after step of a client.

        The gradient is the caller's, who may write into it, until the call after the next: its memory is used again.
        """

        def value_and_grad(params: Params) -> tuple[Tensor, Params]:
            value, slope = self.value_and_grad(params)
            return value, zip_map(torch.clone, slope)

        return value_and_grad

    def descent(self, lr: float) -> Callable[[Params], None]:
        """A function that does theta <- theta - lr * grad P(theta) in place: plain SGD's share of the penalty."""

        def descend(params: Params) -> None:
            for value, slope in zip(params.values(), self.grad(params).values(), strict=True):
                value.sub_(slope, alpha=lr)

        return descend


# Pieces of theta, centre, stiffness (or one for all), and memory for theta - centre and for the gradient.
_Cut = list[tuple[Tensor, Tensor, Tensor | float, Tensor, Tensor]]


@dataclass(frozen=True)
class Quadratic(Penalty):
    """P(theta) = 1/2 sum_j a_j (theta_j - c_j)^2, a pull towards a centre c with stiffness a.

    FedProx has one stiffness for all parameters, FOLA one for each.

    Attributes:
        centre: c, one value per parameter.
        stiffness: a, one value per parameter or one for all.
    """

    centre: Params
    stiffness: Params | float

    def value(self, params: Params) -> Tensor:
        return self.value_and_grad(params)[0]

    def grad(self, params: Params) -> Params:
        return self._slope(zip_map(torch.sub, params, self.centre))

    def value_and_grad(self, params: Params) -> tuple[Tensor, Params]:
        offset = zip_map(torch.sub, params, self.centre)
        slope = self._slope(offset)
        return 0.5 * _dot(slope, offset), slope

    def along_path(self) -> Callable[[Params], tuple[Tensor, Params]]:
        anyhow = super().along_path()
        known: Params | None = None
        turns: list[tuple[Params, _Cut]] = []

        def value_and_grad(params: Params) -> tuple[Tensor, Params]:
            nonlocal known
            if params is not known:  # those of a client are the same in all steps
                known, turns[:] = params, self._turns(params) if can_be_cut(params) else ()
            if not turns:
                return anyhow(params)
            turns.reverse()
            slope, cut = turns[0]
            parts = []
            for theta, centre, stiffness, offset, pull in cut:
                torch.sub(theta, centre, out=offset)
                torch.mul(offset, stiffness, out=pull)
                parts.append(torch.dot(pull, offset))
            return 0.5 * torch.stack(parts).sum(), dict(slope)

        return value_and_grad

    def _turns(self, params: Params) -> list[tuple[Params, "_Cut"]]:
        """Twice the memory of a gradient, and all that it is made of, in pieces.

        The offsets of all pieces have the same memory, which never leaves the cache.
        """
        places, centre, stiffness = pieces(params), pieces(zip_map(alike, self.centre, params)), self.stiffness
        a = pieces(zip_map(alike, stiffness, params)) if isinstance(stiffness, dict) else [stiffness] * len(places)
        scratch = places[0].new_empty(max(map(len, places)))
        offsets = [scratch[: len(place)] for place in places]
        slopes = [zip_map(torch.empty_like, params) for _ in range(2)]
        return [(slope, list(zip(places, centre, a, offsets, pieces(slope), strict=True))) for slope in slopes]

    def _slope(self, offset: Params) -> Params:
        if isinstance(self.stiffness, float | int):
            return zip_map(lambda o: o * self.stiffness, offset)
        return zip_map(torch.mul, self.stiffness, offset)

    def descent(self, lr: float) -> Callable[[Params], None]:
        # theta - lr * a * (theta - c) is a linear interpolation from theta to c: one pass over memory instead of three.
        names, centre = list(self.centre), list(self.centre.values())
        stiffness = self.stiffness
        shares: Any = [stiffness[name] * lr for name in names] if isinstance(stiffness, dict) else stiffness * lr

        def descend(params: Params) -> None:
            torch._foreach_lerp_([params[name] for name in names], centre, shares)

        return descend


@dataclass(frozen=True)
class Linear(Penalty):
    """P(theta) = <slope, theta>: adds a constant to the gradient, as SCAFFOLD's correction does."""

    slope: Params

    def value(self, params: Params) -> Tensor:
        return _dot(self.slope, params)

    def grad(self, params: Params) -> Params:
        return dict(self.slope)


@dataclass(frozen=True)
class Sum(Penalty):
    """P(theta) = P_1(theta) + P_2(theta)."""

    first: Penalty
    second: Penalty

    def value(self, params: Params) -> Tensor:
        return self.first.value(params) + self.second.value(params)

    def grad(self, params: Params) -> Params:
        return zip_map(torch.add, self.first.grad(params), self.second.grad(params))

    def value_and_grad(self, params: Params) -> tuple[Tensor, Params]:
        (value, slope), (other, more) = self.first.value_and_grad(params), self.second.value_and_grad(params)
        return value + other, zip_map(torch.add, slope, more)

    def along_path(self) -> Callable[[Params], tuple[Tensor, Params]]:
        return self.value_and_grad  # of memory of its own


@dataclass(frozen=True)
class Detached(Penalty):
    """A penalty with a value but no gradient: what results from building the prior loss out of detached tensors."""

    inner: Penalty

    def value(self, params: Params) -> Tensor:
        return self.inner.value(params)

    def grad(self, params: Params) -> Params:
        return zip_map(torch.zeros_like, params)

    def descent(self, lr: float) -> Callable[[Params], None]:
        return lambda params: None


class Apart:
    """Keeps a penalty's gradient out of backward passes, for whoever adds it afterwards, in one pass over memory.

    Attributes:
        active: Whether a pass is on the way of which it is to be kept out.
        factor: What the pass would have multiplied it by: 1, unless the loss was scaled; None if it met no penalty.
    """

    active: bool = False
    factor: Tensor | None = None

    @contextmanager
    def during(self) -> Iterator[None]:
        """Keep it out of the passes of this block."""
        self.active, self.factor = True, None
        try:
            yield
        finally:
            self.active = False


class _Attached(torch.autograd.Function):
    """Gives a value an autograd node with a gradient that is known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slopes: tuple[Tensor, ...], apart: Apart, *params: Tensor) -> Tensor:
        ctx.slopes, ctx.apart = slopes, apart
        return value

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        if ctx.apart.active:
            ctx.apart.factor = outer[0]
            return (None,) * (3 + len(ctx.slopes))
        return (None, None, None, *(outer[0] * slope for slope in ctx.slopes))


def attached(value: Tensor, grad: Params, params: Params, apart: Apart) -> Tensor:
    """The value of a penalty as a loss that can be added to the task's loss and differentiated.

    Args:
        value: P(theta).
        grad: Its gradient.
        params: Live parameters.
        apart: Keeps the gradient out of backward passes.
    """
    loss: Tensor = _Attached.apply(value, tuple(grad.values()), apart, *params.values())  # type: ignore[no-untyped-call]
    return loss


def prior_loss(penalty: Penalty, params: Params) -> tuple[Tensor, Params]:
    """P(theta) as a loss that can be added to the task's loss and differentiated, and its gradient."""
    value, grad = penalty.value_and_grad(zip_map(torch.detach, params))
    return attached(value, grad, params, Apart()), grad


def overshoot_advice(metrics: Mapping[str, float]) -> str:
    """What to do if SGD cannot follow a penalty: its step is the learning rate times the penalty's curvature.

    >>> overshoot_advice({"prior_stability": 0.3})
    ''
    """
    stability = metrics.get("prior_stability", 0.0)
    if stability <= 1:
        return ""
    return (
        f"prior_stability, the learning rate times the penalty's largest curvature, is {stability:.2g}; above 1 its "
        "step overshoots, above 2 it diverges: lower training.lr or method.strength"
    )


def _dot(a: Params, b: Params) -> Tensor:
    return torch.stack([torch.dot(a[name].reshape(-1), b[name].reshape(-1)) for name in a]).sum()
