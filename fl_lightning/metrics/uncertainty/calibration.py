"""Calibration of probabilities: sums over blocks of a test set, which combine to those of the whole.

    NLL   = mean of -ln p_y
    Brier = mean of sum_k (p_k - 1[y = k])^2, from 0 to 2
    ECE   = sum_b (n_b / n) |accuracy_b - confidence_b|, over bins (lo, hi] of the largest probability (Naeini 2015)
    adaptive ECE: the same with bins of equally many samples (Nguyen and O'Connor 2015)
    class-wise ECE: mean over classes k of the same for p_k against 1[y = k] (Kull et al. 2019)

All in float64. Published numbers differ in the number of bins (15 here, 100 and 10 elsewhere) and in the bin that has
the
edges: torchmetrics 1.9 has [lo, hi) and puts a confidence of exactly 1, common in float32, into a 16th bin of its own.

Whether uncertainty separates errors from hits (risk and coverage), and out-of-distribution inputs from others.

    AURC  = mean over k = 1 .. n of the error among the k most confident (Geifman and El-Yaniv 2017)
    E-AURC = AURC minus that of an oracle which is least confident where it is wrong
    AUROC = P(score of an outlier > score of an inlier) + 1/2 P(equal), by ranks
    AUPR  = sum over thresholds of (recall - recall before) precision, outliers being what is looked for
    FPR95 = share of inliers that pass for outliers at the threshold that finds 95 % of these
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from fl_lightning.params import numbers

BINS = 15
# Of the outliers that FPR95 finds.
RECALL = 0.95


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
        classes: Bins of every class's probability, classes x bins; None where it is not asked for.
    """

    samples: int
    correct: Tensor
    nll: Tensor
    brier: Tensor
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
        squares = (p.square().sum(1) - own.square() + (1 - own).square()).sum()
        return cls(
            samples=len(labels),
            correct=(guess == labels).sum().double(),
            nll=-logs.gather(1, labels[:, None]).sum(),
            brier=squares,
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
        correct, nll, brier = numbers((self.correct, self.nll, self.brier))
        found = {
            "accuracy": correct / self.samples,
            "NLL": nll / self.samples,
            "Brier": brier / self.samples,
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
    # On the host, where sums have an order: one copy for all of them.
    confidence, hits = torch.stack([confidence.double(), hits.double()]).cpu()
    place = torch.bucketize(confidence, torch.arange(1, bins, dtype=torch.float64) / bins)
    return Bins(*(torch.bincount(place, one, bins) for one in (torch.ones_like(confidence), confidence, hits)))


def binned_evenly(confidence: Tensor, hits: Tensor, bins: int = BINS) -> Bins:
    """Sums over bins of equally many samples, give or take one, in the order of the confidence."""
    order = confidence.double().argsort(stable=True)
    parts = torch.tensor_split(torch.stack([torch.ones_like(order), confidence[order], hits[order]]).double(), bins, 1)
    return Bins(*torch.stack([part.sum(1) for part in parts], 1))


def _by_class(p: Tensor, labels: Tensor, bins: int) -> Bins:
    columns = [binned(p[:, k], labels == k, bins) for k in range(p.shape[1])]
    return Bins(*(torch.stack(sums) for sums in zip(*columns, strict=True)))


def risk_coverage(confidence: Tensor, hits: Tensor) -> Tensor:
    """The error among the k most confident samples, for every k from 1 to n.

    Among equally confident samples no order is better than another: each counts with their mean error.
    """
    order = confidence.double().argsort(descending=True, stable=True)
    errors = 1 - hits.double()[order]
    _, group = torch.unique_consecutive(confidence[order], return_inverse=True)
    size = torch.bincount(group).double()
    errors = (torch.bincount(group, errors) / size)[group]
    return errors.cumsum(0) / torch.arange(1, len(errors) + 1, dtype=torch.float64, device=errors.device)


def selective(confidence: Tensor, hits: Tensor) -> dict[str, float]:
    """AURC and E-AURC."""
    area = float(risk_coverage(confidence, hits).mean())
    return {"AURC": area, "E_AURC": area - float(risk_coverage(hits, hits).mean())}


def detection(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """How well a score separates out-of-distribution inputs, for which it should be large, from others.

    >>> detection(torch.tensor([0.0, 1.5]), torch.arange(1.0, 21))["FPR95"]  # 19 of 20 are 95 %
    0.0
    """
    score = torch.cat([inside, outside]).double()
    strange = torch.cat([torch.zeros_like(inside), torch.ones_like(outside)]).double()
    # Thresholds from high to low; equal scores are passed at once.
    order = score.argsort(descending=True, stable=True)
    _, counts = torch.unique_consecutive(score[order], return_counts=True)
    last = counts.cumsum(0) - 1
    found, false = strange[order].cumsum(0)[last], (1 - strange[order]).cumsum(0)[last]
    recall, alarm = found / len(outside), false / len(inside)
    found_before = torch.cat([found.new_zeros(1), found[:-1]])
    false_before = torch.cat([false.new_zeros(1), false[:-1]])
    return {
        # Counts, which are exact, until the last division.
        "AUROC": float(((false - false_before) * (found + found_before)).sum()) / (2 * len(inside) * len(outside)),
        "AUPR": float(((found - found_before) * found / (found + false)).sum()) / len(outside),
        "FPR95": float(alarm[recall >= RECALL][0]),
    }
