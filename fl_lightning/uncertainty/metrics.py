"""How far probabilities can be trusted: sums over blocks of a test set, which combine to those of the whole.

    NLL   = mean of -ln p_y
    Brier = mean of sum_k (p_k - 1[y = k])^2, from 0 to 2
    ECE   = sum_b (n_b / n) |accuracy_b - confidence_b|, over bins (lo, hi] of the largest probability (Naeini 2015)
    adaptive ECE: the same with bins of equally many samples (Nguyen and O'Connor 2015)
    class-wise ECE: mean over classes k of the same for p_k against 1[y = k] (Kull et al. 2019)

All in float64. Published numbers differ in the number of bins (15 here, 100 and 10 elsewhere) and in who owns the
edges: torchmetrics 1.9 has [lo, hi) and puts a confidence of exactly 1, common in float32, into a 16th bin of its own.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

BINS = 15


class Bins(NamedTuple):
    """Sums over the samples of every bin.

    Attributes:
        samples: How many.
        confidence: Sum of what was predicted.
        hits: Sum of what came true.
    """

    samples: Tensor
    confidence: Tensor
    hits: Tensor

    def error(self) -> Tensor:
        """sum_b |hits_b - confidence_b| / n over the last dimension: the expected calibration error."""
        return (self.hits - self.confidence).abs().sum(-1) / self.samples.sum(-1).clamp(min=1)

    def plus(self, other: Self) -> Self:
        """Of both sets of samples."""
        return type(self)(*(one + two for one, two in zip(self, other, strict=True)))


class Calibration(NamedTuple):
    """Sums of a test set, or of a block of it.

    Attributes:
        samples: How many.
        correct: Those whose likeliest class is the true one.
        nll: Sum of -ln p_y.
        brier: Sum of the Brier scores.
        top: Bins of the largest probability.
        classes: Bins of every class's probability, classes x bins; None where nobody asked for it.
    """

    samples: int
    correct: float
    nll: float
    brier: float
    top: Bins
    classes: Bins | None = None

    @classmethod
    def of(cls, log_probabilities: Tensor, labels: Tensor, bins: int = BINS, by_class: bool = False) -> Self:
        """Of a block of samples.

        Args:
            log_probabilities: Samples x classes; unnormalised ones, such as logits, are normalised.
            labels: The true classes.
            bins: Of equal width.
            by_class: Whether the class-wise error is wanted.
        """
        logs = log_probabilities.double().log_softmax(1)
        p = logs.exp()
        confidence, guess = p.max(1)
        own = p.gather(1, labels[:, None]).squeeze(1)
        return cls(
            samples=len(labels),
            correct=float((guess == labels).sum()),
            nll=-float(logs.gather(1, labels[:, None]).sum()),
            brier=float((p.square().sum(1) - own.square() + (1 - own).square()).sum()),
            top=binned(confidence, guess == labels, bins),
            classes=_by_class(p, labels, bins) if by_class else None,
        )

    def plus(self, other: Self) -> Self:
        """Of both sets of samples."""
        both = self.classes is not None and other.classes is not None
        return type(self)(
            self.samples + other.samples,
            self.correct + other.correct,
            self.nll + other.nll,
            self.brier + other.brier,
            self.top.plus(other.top),
            self.classes.plus(other.classes) if both else None,  # type: ignore[union-attr, arg-type]
        )

    def metrics(self) -> dict[str, float]:
        """The numbers by name."""
        found = {
            "accuracy": self.correct / self.samples,
            "NLL": self.nll / self.samples,
            "Brier": self.brier / self.samples,
            "ECE": float(self.top.error()),
        }
        if self.classes is not None:
            found["classwise_ECE"] = float(self.classes.error().mean())
        return found


def binned(confidence: Tensor, hits: Tensor, bins: int = BINS) -> Bins:
    """Sums over bins (lo, hi] of equal width; a confidence of 0 belongs to the first.

    >>> binned(torch.tensor([0.1, 0.5, 0.9]), torch.tensor([False, True, True]), 2).samples
    tensor([2., 1.], dtype=torch.float64)
    """
    edges = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
    place = torch.bucketize(confidence.double().contiguous(), edges)
    ones = torch.ones_like(confidence, dtype=torch.float64)
    return Bins(*(torch.bincount(place, weights, bins) for weights in (ones, confidence.double(), hits.double())))


def binned_evenly(confidence: Tensor, hits: Tensor, bins: int = BINS) -> Bins:
    """Sums over bins of equally many samples, give or take one, in the order of the confidence."""
    order = confidence.double().argsort(stable=True)
    parts = torch.tensor_split(torch.stack([torch.ones_like(order), confidence[order], hits[order]]).double(), bins, 1)
    return Bins(*torch.stack([part.sum(1) for part in parts], 1))


def _by_class(p: Tensor, labels: Tensor, bins: int) -> Bins:
    columns = [binned(p[:, k], labels == k, bins) for k in range(p.shape[1])]
    return Bins(*(torch.stack(sums) for sums in zip(*columns, strict=True)))
