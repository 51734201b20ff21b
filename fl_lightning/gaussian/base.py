"""What a Gaussian over parameters can do, whatever the form of its precision; and the prior loss that it gives."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fl_lightning.gaussian.damping import Merging
from fl_lightning.gaussian.similarity import cosines
from fl_lightning.params import Params, cast_like, count, flatten, numbers, weighted_sum, zip_map
from fl_lightning.penalty import Penalty
from fl_lightning.system import trees


class Gaussian(ABC):
    """N(mu, Lambda^-1) over named parameters. Lambda is an operator: some forms never hold it as a matrix.

    A form is a frozen dataclass whose fields are tensors, dicts of tensors, other Gaussians and numbers. For torch it
    is a tree of tensors, so that checkpoints, traffic and engines take it as they take any state. A Gaussian that is
    sent beside its mean has an empty one.

    Attributes:
        mean: mu.
    """

    mean: Params
    # Fields that say how a form is built, and are the same in every round: no leaves of the tree.
    static: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, stored_as: str = "", **options: Any) -> None:
        """Register the form as a tree of tensors; `stored_as` names it in checkpoints, wherever the class moves."""
        super().__init_subclass__(**options)
        _register(cls, stored_as or f"{cls.__module__}.{cls.__qualname__}")

    # What a form must have.

    @abstractmethod
    def apply(self, vector: Params) -> Params:
        """Lambda v, in the floating point type of v."""

    @abstractmethod
    def solve(self, vector: Params) -> Params:
        """Lambda^-1 v, in float64."""

    @abstractmethod
    def log_determinant(self) -> Tensor:
        """The logarithm of det Lambda, in float64."""

    @abstractmethod
    def damped(self, damping: float) -> Self:
        """The Gaussian with the precision Lambda + damping I."""

    @classmethod
    @abstractmethod
    def product(cls, posteriors: Sequence[Self], weights: Sequence[float], damping: float = 0.0) -> Self:
        """The Gaussian proportional to prod_n q_n^w_n, after damping every posterior; see `product.product`."""

    @abstractmethod
    def diagonal(self) -> Params:
        """The diagonal of Lambda, shaped like the mean."""

    @abstractmethod
    def largest_eigenvalue(self) -> float:
        """Of Lambda, possibly from below."""

    @abstractmethod
    def parts(self) -> Params:
        """The tensors that Lambda is made of, by names of the form's own."""

    @abstractmethod
    def with_parts(self, parts: Params) -> Self:
        """The Gaussian with the same mean and a precision made of other tensors: the inverse of `parts`."""

    # What follows from that; a form that knows better overrides it.

    @classmethod
    def merged(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> Self:
        """Mean of the product of the damped posteriors, with their mean precision without damping.

        Args:
            posteriors: The clients' posteriors.
            weights: p_n; they sum to 1.
            merging: How much damping, and how it is computed.
        """
        gamma = cls.common_damping(posteriors, weights, merging)
        combined = cls.product(posteriors, weights, gamma)
        return cls.summed(posteriors, weights, merging).with_mean(combined.mean)

    @classmethod
    def damped_posteriors(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> list[Self]:
        """The posteriors as they enter the product."""
        gamma = cls.common_damping(posteriors, weights, merging) if merging.everywhere else 0.0
        return [posterior.damped(gamma) for posterior in posteriors]

    @classmethod
    def common_damping(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> float:
        """The damping gamma of the product of these posteriors, whose traces are enough to know it."""
        gammas = (merging.gamma(posterior.trace(), posterior.size) for posterior in posteriors)
        return sum(weight * gamma for weight, gamma in zip(weights, gammas, strict=True))

    @classmethod
    def summed(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> Self:
        """The precision sum_n w_n Lambda_n in the form, with the mean of the first posterior."""
        parts = [posterior.parts() for posterior in posteriors]
        return posteriors[0].with_parts(cast_like(weighted_sum(parts, weights), parts[0]))

    @classmethod
    def weight_shift(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> float | None:
        """How far the effective weights of the posteriors are from w_n, for forms that have such weights."""
        return None

    @classmethod
    def alikeness(cls, posteriors: Sequence[Self]) -> dict[str, float]:
        """How alike the posteriors' precisions are; see `similarity.cosines`."""
        names = ("precision_cosine", "precision_cosine_minmax")
        return dict(zip(names, cosines([posterior.parts() for posterior in posteriors]), strict=True))

    def over_rounds(self, share: float, earlier: Self, earlier_share: float) -> Self:
        """The precision share * Lambda + earlier_share * Lambda', with the own mean. The Gaussian itself is used up."""
        return self.with_parts(zip_map(lambda f, a: f * share + a * earlier_share, self.parts(), earlier.parts()))

    def prior(self, exact: bool) -> "Gaussian":
        """The Gaussian of which a prior loss is made: this one, or a cheaper one if it need not be exact."""
        return self

    def prior_loss(self, strength: float, damping: float = 0.0) -> Penalty:
        """The prior loss (strength / 2) (theta - mu)^T (Lambda + damping I) (theta - mu)."""
        return PriorLoss(self.damped(damping), strength)

    def notes(self) -> dict[str, float]:
        """Numbers worth logging of the product that made this Gaussian."""
        return {}

    def numbers_sent(self) -> int:
        """How many numbers it takes to send it."""
        return count(self.mean) + count(self.parts())

    def with_mean(self, mean: Params) -> Self:
        return replace(self, mean=mean)  # type: ignore[type-var] # every form is a dataclass

    @property
    def size(self) -> int:
        """d, the number of parameters."""
        return count(self.mean)

    def trace(self) -> float:
        """The sum of the diagonal of Lambda."""
        return sum(numbers(value.double().sum() for value in self.diagonal().values()))

    def quadratic(self, vector: Params) -> Tensor:
        """v^T Lambda v, in float64."""
        doubles = zip_map(lambda v: v.double(), vector)
        return torch.dot(flatten(doubles), flatten(self.apply(doubles)))

    def distance(self, params: Params) -> Tensor:
        """D(theta) = 1/2 (theta - mu)^T Lambda (theta - mu): the negative log-density without its constant."""
        return 0.5 * self.quadratic(zip_map(lambda p, m: p.double() - m.double(), params, self.mean))


@dataclass(frozen=True)
class PriorLoss(Penalty):
    """P(theta) = (strength / 2) (theta - mu)^T Lambda (theta - mu); its gradient is strength * Lambda (theta - mu).

    Attributes:
        gaussian: mu and Lambda.
        strength: Its weight in the loss.
    """

    gaussian: Gaussian
    strength: float

    def value(self, params: Params) -> Tensor:
        return self.value_and_grad(params)[0]

    def grad(self, params: Params) -> Params:
        return self.value_and_grad(params)[1]

    def value_and_grad(self, params: Params) -> tuple[Tensor, Params]:
        offset = zip_map(lambda p, m: p - m, params, self.gaussian.mean)
        gradient = zip_map(lambda s: s * self.strength, self.gaussian.apply(offset))
        return 0.5 * torch.dot(flatten(gradient), flatten(offset)), gradient


def _register(cls: type[Gaussian], stored_as: str) -> None:
    """Make a form a node of torch's trees, whose fields are its children."""

    def names() -> list[str]:
        return [field.name for field in fields(cls) if field.name not in cls.static]  # type: ignore[arg-type]

    def flatten(gaussian: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(gaussian, name) for name in names()], tuple(getattr(gaussian, name) for name in cls.static)

    def with_keys(gaussian: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, context = flatten(gaussian)
        return [(trees.Attribute(name), child) for name, child in zip(names(), children, strict=True)], context

    def unflatten(children: Any, context: Any) -> Gaussian:
        return cls(**dict(zip(names(), children, strict=True)), **dict(zip(cls.static, context, strict=True)))

    trees.register(
        cls,
        flatten,
        unflatten,
        serialized_type_name=stored_as,
        to_dumpable_context=_plain,
        from_dumpable_context=_frozen,
        flatten_with_keys_fn=with_keys,
    )


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
