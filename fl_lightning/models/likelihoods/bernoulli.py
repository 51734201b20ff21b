"""Yes or no, once or for each of L labels: independent Bernoulli likelihoods of logits.

-ln p(y | f) = sum_l ln(1 + e^f_l) - y_l f_l,   H = diag p (1 - p),   p = 1 / (1 + e^-f)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fl_lightning.errors import require
from fl_lightning.models.likelihoods.base import Likelihood, diagonal_product, diagonal_roots


@dataclass(frozen=True)
class MultiLabel(Likelihood):
    """Any of several labels; the metric is the share of labels that are right, and F1 (over all labels) is logged.

    The loss of a sample is the sum over its labels, where torch's loss of that name takes the mean.
    """

    task: ClassVar[str] = "multilabel"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        wanted = targets.reshape(outputs.shape).to(outputs.dtype)
        return binary_cross_entropy_with_logits(outputs, wanted, reduction="none").flatten(1).sum(1)

    def check_targets(self, part: str, targets: Tensor, number: int) -> None:
        require(
            targets.dim() == 2 and targets.shape[1] == number,
            f"{part}_y must hold 0 or 1 for each of {number} labels, (samples, {number}), got {targets.dtype} of shape "
            f"{tuple(targets.shape)}; correct num_classes, which is the number of labels, or y",
        )
        require_zero_or_one(part, targets)

    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor:
        said, true = outputs > 0, targets.reshape(outputs.shape).bool()
        return torch.stack([(said == true).sum(), (said & true).sum(), (said != true).sum()]).double()

    def metrics(self, tally: Tensor, targets: Tensor) -> Mapping[str, float]:
        hits, both, wrong = tally.tolist()
        named = 2 * both + wrong
        return {self.metric: hits / targets.numel(), "F1": 2 * both / named if named else 1.0}

    def as_classes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        yes = outputs.reshape(-1)
        return torch.stack([torch.zeros_like(yes), yes], 1), targets.reshape(-1).long()

    def strata(self, targets: Tensor) -> Tensor:
        """The first label that a sample has; one more for those that have none."""
        none = torch.ones_like(targets[:, :1], dtype=torch.bool)
        return torch.cat([targets.bool(), none], 1).int().argmax(1)

    def product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        return diagonal_product(_variance(outputs), vectors)

    def roots(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        return diagonal_roots(_variance(outputs))

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Tensor) -> Tensor:
        p = outputs.sigmoid()
        return p - (draws.to(p.device).reshape(p.shape) < p.double()).to(p.dtype)


@dataclass(frozen=True)
class Binary(MultiLabel):
    """Yes or no, by a single logit; the metric is the accuracy."""

    task: ClassVar[str] = "binary"

    def check_targets(self, part: str, targets: Tensor, number: int) -> None:
        require(
            targets.dim() == 1 and number == 1,
            f"{part}_y must hold one 0 or 1 for each sample, with num_classes 1 (a single logit), got shape "
            f"{tuple(targets.shape)} and num_classes {number}; use y[:, 0], or MultiLabel() for several labels",
        )
        require_zero_or_one(part, targets)

    def metrics(self, tally: Tensor, targets: Tensor) -> Mapping[str, float]:
        return {self.metric: float(tally[0]) / len(targets)}

    def strata(self, targets: Tensor) -> Tensor:
        return targets.long()


def require_zero_or_one(part: str, targets: Tensor) -> None:
    """Refuse anything else."""
    odd = targets[(targets != 0) & (targets != 1)]
    require(odd.numel() == 0, f"{part}_y must hold nothing but 0 and 1, got {float(odd[:1].sum()):g}; correct it")


def _variance(outputs: Tensor) -> Tensor:
    p = outputs.sigmoid()
    return p * (1 - p)
