"""What a method adds to the local loss: L(theta) + P(theta).

Methods touch local training only through P. It is an object with a value and a closed-form gradient rather than a
function to differentiate: automatic differentiation of a quadratic over 545,810 parameters costs more than the whole
training step of the network, the closed form about a tenth of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.params import Params, lerp_all, zip_map


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

        The caller may write into the gradient. It is valid until the next call, which uses its memory again.
        """

        def value_and_grad(params: Params) -> tuple[Tensor, Params]:
            value, gradient = self.value_and_grad(params)
            return value, zip_map(torch.clone, gradient)

        return value_and_grad

    def descent(self, lr: float) -> Callable[[Params], None]:
        """A function that does theta <- theta - lr * grad P(theta) in place: plain SGD's share of the penalty."""

        def descend(params: Params) -> None:
            for value, gradient in zip(params.values(), self.grad(params).values(), strict=True):
                value.sub_(gradient, alpha=lr)

        return descend


@dataclass(frozen=True)
class Quadratic(Penalty):
    """P(theta) = 1/2 sum_j a_j (theta_j - c_j)^2, a quadratic with centre c and weights a.

    FedProx has one stiffness for all parameters, FOLA one for each.

    Attributes:
        centre: c, one value per parameter.
        stiffness: a, one value per parameter or one for all; a tensor with one number is one for all, too.
    """

    centre: Params
    stiffness: Params | float

    def __post_init__(self) -> None:
        stiffness: Any = self.stiffness
        if isinstance(stiffness, Tensor) and stiffness.ndim == 0:  # may be a client's own, of which vmap has many
            spread = zip_map(lambda c: stiffness.to(c).expand_as(c), self.centre)
            object.__setattr__(self, "stiffness", spread)
        elif not isinstance(stiffness, dict | float | int):
            given = f"a tensor of shape {tuple(stiffness.shape)}" if isinstance(stiffness, Tensor) else repr(stiffness)
            raise TypeError(f"the stiffness of Quadratic must be a number or a dict like its centre, got {given:.80}")

    def value(self, params: Params) -> Tensor:
        return self.value_and_grad(params)[0]

    def grad(self, params: Params) -> Params:
        return self._gradient(zip_map(torch.sub, params, self.centre))

    def value_and_grad(self, params: Params) -> tuple[Tensor, Params]:
        offset = zip_map(torch.sub, params, self.centre)
        grad = self._gradient(offset)
        return 0.5 * _dot(grad, offset), grad

    def along_path(self) -> Callable[[Params], tuple[Tensor, Params]]:
        # Memory that every step fills again: to allocate it anew would double the time of a step.
        offset: Params = {}
        gradient: Params = {}

        def value_and_grad(params: Params) -> tuple[Tensor, Params]:
            if not offset:
                offset.update(zip_map(torch.empty_like, params))
                gradient.update(zip_map(torch.empty_like, params))
            for name, theta in params.items():
                stiffness = self.stiffness[name] if isinstance(self.stiffness, dict) else self.stiffness
                torch.sub(theta, self.centre[name], out=offset[name])
                torch.mul(offset[name], stiffness, out=gradient[name])
            return 0.5 * _dot(gradient, offset), gradient

        return value_and_grad

    def _gradient(self, offset: Params) -> Params:
        if isinstance(self.stiffness, float | int):
            return zip_map(lambda o: o * self.stiffness, offset)
        return zip_map(torch.mul, self.stiffness, offset)

    def descent(self, lr: float) -> Callable[[Params], None]:
        # theta - lr * a * (theta - c) is a linear interpolation from theta to c: one pass over memory instead of three.
        names, centre = list(self.centre), list(self.centre.values())
        stiffness = self.stiffness
        shares: Any = [stiffness[name] * lr for name in names] if isinstance(stiffness, dict) else stiffness * lr

        def descend(params: Params) -> None:
            lerp_all([params[name] for name in names], centre, shares)

        return descend


@dataclass(frozen=True)
class Linear(Penalty):
    """P(theta) = <gradient, theta>: adds a constant to the gradient, as SCAFFOLD's correction does."""

    gradient: Params

    def value(self, params: Params) -> Tensor:
        return _dot(self.gradient, params)

    def grad(self, params: Params) -> Params:
        return dict(self.gradient)


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
        (value, gradient), (other, more) = self.first.value_and_grad(params), self.second.value_and_grad(params)
        return value + other, zip_map(torch.add, gradient, more)

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


# What makes a penalty's step shorter, for `Traits.overshoot_advice`.
SOFTER = "lower training.lr or method.strength"


def overshoot_warning(advice: str, metrics: Mapping[str, float]) -> str:
    """Says that SGD cannot follow a penalty, and what to do: its step is the learning rate times the curvature.

    >>> overshoot_warning(SOFTER, {"prior_stability": 0.3})
    ''
    """
    stability = metrics.get("prior_stability", 0.0)
    if stability <= 1 or not advice:
        return ""
    return (
        f"prior_stability, the learning rate times the penalty's largest curvature, is {stability:.2g}; above 1 its "
        f"step overshoots, above 2 it diverges: {advice}"
    )


def _dot(a: Params, b: Params) -> Tensor:
    return torch.stack([torch.dot(a[name].reshape(-1), b[name].reshape(-1)) for name in a]).sum()
