"""One of K classes: the categorical likelihood of logits, -ln softmax(f)_y, which is the cross-entropy.

H = diag p - p p^T = sum_k p_k (e_k - p)(e_k - p)^T,  p = softmax(f)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fl_lightning.errors import require
from fl_lightning.models.likelihoods.base import Likelihood


@dataclass(frozen=True)
class Classification(Likelihood):
    """One of several classes; the metric is the accuracy."""

    task: ClassVar[str] = "classification"
    has_classes: ClassVar[bool] = True

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return cross_entropy(outputs, targets, reduction=reduction)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, reduction="none")

    def check_targets(self, part: str, targets: Tensor, number: int) -> None:
        require(
            targets.dim() == 1 and targets.dtype == torch.long,
            f"{part}_y must hold one label per sample of type torch.long, got {targets.dtype} of shape "
            f"{tuple(targets.shape)}; use .long() on labels, or name the likelihood of other targets: Dataset(..., "
            "likelihood=Regression())",
        )
        require_range(part, targets, number)

    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) == targets).sum().double()[None]

    def metrics(self, tally: Tensor, targets: Tensor) -> Mapping[str, float]:
        return {self.metric: float(tally[0]) / len(targets)}

    def as_classes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs, targets

    def strata(self, targets: Tensor) -> Tensor:
        return targets

    def product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        return centred(outputs.softmax(1), vectors, dim=1)

    def roots(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        p = outputs.softmax(1)
        for k in range(p.shape[1]):
            unit = torch.zeros_like(p)
            unit[:, k] = 1
            yield p[:, k : k + 1].sqrt() * (unit - p)

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Tensor) -> Tensor:
        p = outputs.softmax(1)
        return p - one_hot(drawn(p, draws[:, 0]), p.shape[1])

    def num_draws(self, outputs: Tensor) -> int:
        return 1

    def quadratic(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        return variance(outputs, vectors).sum()


def centred(p: Tensor, vectors: Tensor, dim: int) -> Tensor:
    """(diag p - p p^T) v over this dimension; the vectors may have more dimensions after those of p."""
    p = p.reshape(*p.shape, *[1] * (vectors.dim() - p.dim()))
    return p * (vectors - (p * vectors).sum(dim, keepdim=True))


def variance(outputs: Tensor, vectors: Tensor) -> Tensor:
    """v^T (diag p - p p^T) v = Var_p(v) over the last dimension, in float64."""
    p, v = outputs.double().softmax(-1), vectors.double()
    shifted = v - (p * v).sum(-1, keepdim=True)  # rather than a difference of squares: never negative
    return (p * shifted.square()).sum(-1)


def drawn(p: Tensor, draws: Tensor) -> Tensor:
    """Classes with these probabilities (over the last dimension), from uniform numbers."""
    reached = p.double().cumsum(-1) > draws.to(p.device)[..., None]
    reached[..., -1] = True  # rounding may leave the sum below 1
    return reached.int().argmax(-1)


def require_range(part: str, labels: Tensor, number: int) -> None:
    """Refuse labels other than 0 .. number - 1."""
    low, high = int(labels.min()), int(labels.max())
    require(
        0 <= low <= high < number,
        f"{part}_y must hold labels 0 to {number - 1}, got {low} to {high}; correct num_classes or y",
    )


@dataclass(frozen=True)
class Plain(Classification):
    """Any function `loss(outputs, labels, reduction=...)`; the metric is the accuracy, the curvature unknown.

    Attributes:
        function: The negative log-likelihood.
    """

    task: ClassVar[str] = "a loss function of your own"

    function: Callable[..., Tensor] = cross_entropy

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return self.function(outputs, targets, reduction=reduction)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.function(outputs, targets, reduction="none")

    def output_shape(self, number: int, targets: Tensor) -> tuple[int, ...] | None:
        return None

    @property
    def knows_curvature(self) -> bool:
        return False

    product = Likelihood.product
    roots = Likelihood.roots
    sampled = Likelihood.sampled
    quadratic = Likelihood.quadratic


def as_likelihood(given: "Likelihood | Callable[..., Tensor]") -> Likelihood:
    """The likelihood itself, that of torch's cross-entropy, or a wrapping of any other function."""
    if isinstance(given, Likelihood):
        return given
    return Classification() if given is cross_entropy else Plain(given)
