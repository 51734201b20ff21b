"""Real numbers: the Gaussian likelihood with a standard deviation s that is known.

-ln p(y | f) = sum_d (y_d - f_d)^2 / (2 s^2) + ln s + ln(2 pi) / 2,   H = I / s^2
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.models.likelihoods.base import Likelihood, diagonal_product, diagonal_roots

# Ranges of the first target by which data are divided among clients, equally many samples in each.
RANGES = 10


@dataclass(frozen=True)
class Regression(Likelihood):
    """Real numbers with Gaussian noise; the metric is R2, the share of the variance explained, and RMSE is logged.

    R2 = 1 - sum_i (y_i - f_i)^2 / sum_i (y_i - mean y)^2, averaged over targets; below 0, the mean does better.

    Attributes:
        noise: s, the standard deviation of the targets around the model: 1 makes the loss half the squared error.
    """

    task: ClassVar[str] = "regression"
    metric: ClassVar[str] = "R2"

    noise: float = 1.0

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.noise) and self.noise > 0,
            f"the noise of a regression must be a standard deviation > 0, got {self.noise:g}; 1 is the usual choice",
        )

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = (outputs - _like(targets, outputs)) / self.noise
        constant = math.log(self.noise) + math.log(2 * math.pi) / 2
        return (errors.square() / 2 + constant).flatten(1).sum(1)

    def check_targets(self, part: str, targets: Tensor, number: int) -> None:
        require(
            targets.is_floating_point() and targets.dim() in (1, 2),
            f"{part}_y must hold floating point numbers, one per sample or (samples, targets), got {targets.dtype} of "
            f"shape {tuple(targets.shape)}; use .float()",
        )
        found = 1 if targets.dim() == 1 else targets.shape[1]
        require(
            found == number,
            f"num_classes must be the number of targets of a regression, {found} in {part}_y, got {number}",
        )
        finite = targets.reshape(len(targets), -1).isfinite().all(1)
        place = int(finite.logical_not().int().argmax())
        require(bool(finite.all()), f"{part}_y must hold finite numbers, but sample {place} does not; correct it")

    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.double() - _like(targets.double(), outputs)).square().flatten(1).sum(0)

    def metrics(self, tally: Tensor, targets: Tensor) -> Mapping[str, float]:
        y = targets.double().reshape(len(targets), -1)
        spread = (y - y.mean(0)).square().sum(0)
        explained = torch.where(spread > 0, 1 - tally / spread, (tally == 0).double())  # as scikit-learn has it
        return {self.metric: float(explained.mean()), "RMSE": math.sqrt(float(tally.sum()) / y.numel())}

    def strata(self, targets: Tensor) -> Tensor:
        """The tenth of all samples that a sample belongs to by its first target; of few samples, parts of four."""
        first = targets.reshape(len(targets), -1)[:, 0].double()
        ranks = first.argsort(stable=True).argsort(stable=True)
        return ranks * min(RANGES, max(1, len(first) // 4)) // len(first)

    def product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        return diagonal_product(self._precision(outputs), vectors)

    def roots(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        return diagonal_roots(self._precision(outputs))

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Tensor) -> Tensor:
        tiny = torch.finfo(draws.dtype).tiny
        normal: Tensor = torch.special.ndtri(draws.clamp(min=tiny))
        return normal.to(outputs.device, outputs.dtype).reshape(outputs.shape) / self.noise

    def _precision(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, self.noise**-2)


def _like(targets: Tensor, outputs: Tensor) -> Tensor:
    return targets.reshape(outputs.shape)
