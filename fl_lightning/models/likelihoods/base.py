"""What a likelihood is: the loss of a task, its metric, and its curvature at the model's outputs.

    loss       (1/b) sum_i -ln p(y_i | f_i)                 f_i = f(x_i; theta), the outputs for sample i
    curvature  H_i = d^2 (-ln p(y_i | f_i)) / d f_i^2       G = (1/b) sum_i J_i^T H_i J_i,  J_i = d f_i / d theta

G is the Gauss-Newton matrix, and the Fisher information of the model's own predictions. All that curvature of any form
needs of a likelihood are products H_i v, roots r_ik with sum_k r_ik r_ik^T = H_i, and random gradients s_i with
E[s_i s_i^T] = H_i: what labels that are drawn from the predictions give.

The metric is a score of which 1 is perfect and more is better, whatever the task: GA and LA are made of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.errors import UserError, require


@dataclass(frozen=True)
class Likelihood(ABC):
    """One likelihood, called as a loss function of torch is; its fields are its settings."""

    # What a user calls the task.
    task: ClassVar[str]
    # What GA and LA are.
    metric: ClassVar[str] = "accuracy"
    # Whether the target of a sample is one class of several: methods that count or average classes ask for it.
    has_classes: ClassVar[bool] = False

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """-ln p(y | f): the mean over the samples, their sum, or `none`, one number for each of them."""
        losses = self.losses(outputs, targets)
        if reduction == "none":
            return losses
        return losses.mean() if reduction == "mean" else losses.sum()

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-ln p(y_i | f_i), one number for each sample."""

    @abstractmethod
    def check_targets(self, part: str, targets: Tensor, number: int) -> None:
        """Raise `UserError` unless these can be targets.

        Args:
            part: train or test.
            targets: Of all samples.
            number: Of classes, or of outputs where there are none: `Dataset.num_classes`.
        """

    def output_shape(self, number: int, targets: Tensor) -> tuple[int, ...] | None:
        """The shape of the outputs for one sample; None where any will do.

        Args:
            number: As in `check_targets`.
            targets: Of some samples.
        """
        return (number,)

    @abstractmethod
    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What the metrics are made of: a vector of sums over these samples, in float64. Those of blocks add up."""

    @abstractmethod
    def metrics(self, tally: Tensor, targets: Tensor) -> Mapping[str, float]:
        """The metrics by name, that of GA and LA first.

        Args:
            tally: Of all samples.
            targets: Of all samples.
        """

    def as_classes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """Logits (rows x classes) and labels of all that is predicted, for calibration; None without classes."""
        return None

    def strata(self, targets: Tensor) -> Tensor | None:
        """A whole number from 0 on for each sample, by which data are divided among clients; None if there is none."""
        return None

    @property
    def knows_curvature(self) -> bool:
        """Whether the next three are there."""
        return True

    def product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """H_i v_i for every sample; the vectors have the dimensions of the outputs, and possibly more after them."""
        raise self._unknown()

    def roots(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """r_1, r_2, ...: each of the shape of the outputs, with sum_k r_ik r_ik^T = H_i."""
        raise self._unknown()

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Tensor) -> Tensor:
        """Random gradients s_i with mean zero and E[s_i s_i^T] = H_i.

        Args:
            outputs: f.
            targets: Only which of them count matters.
            draws: Uniform random numbers in [0, 1), samples x `num_draws`.
        """
        raise self._unknown()

    def num_draws(self, outputs: Tensor) -> int:
        """How many random numbers `sampled` takes for each sample."""
        return outputs[0].numel()

    def quadratic(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        """sum_i v_i^T H_i v_i."""
        return (vectors * self.product(outputs, targets, vectors)).sum()

    def _unknown(self) -> UserError:
        return UserError(
            f"the curvature of the outputs is not known for {self.task}; use a likelihood of "
            "fl_lightning.models.likelihoods, or curvature made of gradients (diagonal, empirical gradients)"
        )


def require_curvature(likelihood: Likelihood) -> None:
    """Refuse a likelihood without curvature at the outputs."""
    if not likelihood.knows_curvature:
        raise likelihood._unknown()


def require_classes(who: str, likelihood: Likelihood) -> None:
    """Refuse a task without classes, where classes are counted or averaged."""
    require(
        likelihood.has_classes,
        f"{who} needs a task of classification, whose samples have one class each, got {likelihood.task}; use another "
        "method or data",
    )


def diagonal_product(diagonal: Tensor, vectors: Tensor) -> Tensor:
    """H v; the vectors may have more dimensions after those of the diagonal."""
    return diagonal.reshape(*diagonal.shape, *[1] * (vectors.dim() - diagonal.dim())) * vectors


def diagonal_roots(diagonal: Tensor) -> Iterator[Tensor]:
    """sqrt(h_l) e_l for every output l."""
    for place in range(diagonal[0].numel()):
        root = torch.zeros_like(diagonal)
        root.flatten(1)[:, place] = diagonal.flatten(1)[:, place].sqrt()
        yield root
