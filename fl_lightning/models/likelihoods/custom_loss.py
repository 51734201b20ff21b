"""A loss function of the user's own, with what is known of it: nothing but its values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_lightning.models.likelihoods.base import Likelihood
from fl_lightning.models.likelihoods.classification import Classification


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
