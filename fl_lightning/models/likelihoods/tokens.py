"""A class at every position of a sequence (next token, tag per token): categorical, with padding left out.

    -ln p(y | f) = (1/T) sum_t -ln softmax(f_t)_{y_t},   H = (1/T) (diag p_t - p_t p_t^T) for every position t

T is the number of positions of the sample without padding: every sample counts the same, whatever its length.
Where all have one length, the loss is torch's cross-entropy over all positions. A mean over positions is a likelihood
to the power 1/T: H is the curvature of the loss, which is T times the mean square of a sample's gradients at the true
model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fl_lightning.errors import require
from fl_lightning.models.likelihoods.base import Likelihood
from fl_lightning.models.likelihoods.classification import centred, drawn, require_range, variance

# The target of positions that do not count, as in torch.
PADDING = -100


@dataclass(frozen=True)
class Tokens(Likelihood):
    """A class for every token; the metric is the share of tokens that are right."""

    task: ClassVar[str] = "tokens"

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=PADDING)
        return (each.view(targets.shape) * _weights(targets, each.dtype)).sum(1)

    def check_targets(self, part: str, targets: Tensor, number: int) -> None:
        require(
            targets.dim() == 2 and targets.dtype == torch.long,
            f"{part}_y must hold a label of type torch.long for each position, (samples, positions), got "
            f"{targets.dtype} of shape {tuple(targets.shape)}; use .long(), or {PADDING} where there is none",
        )
        known = targets[targets != PADDING]
        require(known.numel() > 0, f"{part}_y must hold a label at some position, got nothing but padding ({PADDING})")
        require_range(part, known, number)

    def output_shape(self, number: int, targets: Tensor) -> tuple[int, ...]:
        return (targets.shape[1], number)

    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor:
        counts = targets != PADDING
        return torch.stack([((outputs.argmax(2) == targets) & counts).sum(), counts.sum()]).double()

    def metrics(self, tally: Tensor, targets: Tensor) -> Mapping[str, float]:
        return {self.metric: float(tally[0] / tally[1])}

    def as_classes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counts = targets != PADDING
        return outputs[counts], targets[counts]

    def product(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        weights = _weights(targets, outputs.dtype)
        weights = weights.reshape(*weights.shape, *[1] * (vectors.dim() - weights.dim()))
        return weights * centred(outputs.softmax(2), vectors, dim=2)

    def roots(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """One for every position and class: those of two positions must not mix."""
        p, weights = outputs.softmax(2), _weights(targets, outputs.dtype)
        for t in range(p.shape[1]):
            for k in range(p.shape[2]):
                root = torch.zeros_like(p)
                root[:, t] = -p[:, t]
                root[:, t, k] += 1
                yield root * (weights[:, t] * p[:, t, k]).sqrt()[:, None, None]

    def sampled(self, outputs: Tensor, targets: Tensor, draws: Tensor) -> Tensor:
        p = outputs.softmax(2)
        return (p - one_hot(drawn(p, draws), p.shape[2])) * _weights(targets, outputs.dtype).sqrt()[:, :, None]

    def num_draws(self, outputs: Tensor) -> int:
        return outputs.shape[1]

    def quadratic(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        return (_weights(targets, torch.float64) * variance(outputs, vectors)).sum()


def _weights(targets: Tensor, dtype: torch.dtype) -> Tensor:
    """1/T at the positions that count, 0 at the others."""
    counts = (targets != PADDING).to(dtype)
    return counts / counts.sum(1, keepdim=True).clamp(min=1)
