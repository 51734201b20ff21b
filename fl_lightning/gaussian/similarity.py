"""How alike precisions are: the mean cosine over all pairs, as they are and after the paper's normalisation."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fl_lightning.params import Params
from fl_lightning.pieces import blocks


def cosines(precisions: Sequence[Params]) -> tuple[float, float]:
    """The mean over all pairs of clients of the cosine between their precisions, raw and min-max.

    Min-max, as in the paper's figure, subtracts the smallest entry of each precision (dividing by the largest changes
    no cosine). For full matrices it decides the answer: the shift turns millions of entries near zero into a common
    positive constant, so that matrices with nothing in common look alike. For diagonals it hardly matters.

    With unit vectors u_n, the mean over pairs is (|sum_n u_n|^2 - N) / (N (N - 1)): one pass, whatever N. Entries that
    are all the same have no direction after the shift; they count as orthogonal to all others.
    """
    lows = [min(float(value.min()) for value in precision.values()) for precision in precisions]
    norms = [_norms(precision, low) for precision, low in zip(precisions, lows, strict=True)]
    lengths = [0.0, 0.0]  # of the two resultants, squared
    for parts in zip(*map(blocks, precisions), strict=True):
        resultants = [torch.zeros_like(parts[0], dtype=torch.float64) for _ in lengths]
        for part, low, own in zip(parts, lows, norms, strict=True):
            for resultant, moved, norm in zip(resultants, _raw_and_moved(part, low), own, strict=True):
                if norm > 0:
                    resultant.add_(moved, alpha=1 / norm)
        for which, resultant in enumerate(resultants):
            lengths[which] += float(torch.dot(resultant, resultant))
    number = len(precisions)
    counted = (sum(norm > 0 for norm in of_all) for of_all in zip(*norms, strict=True))
    raw, minmax = ((length - n) / (number * (number - 1)) for length, n in zip(lengths, counted, strict=True))
    return raw, minmax


def _norms(precision: Params, low: float) -> tuple[float, float]:
    """Of the entries, and of what they are above the smallest one."""
    squares = [[float(torch.dot(moved, moved)) for moved in _raw_and_moved(block, low)] for block in blocks(precision)]
    raw, minmax = (math.sqrt(sum(parts)) for parts in zip(*squares, strict=True))
    return raw, minmax


def _raw_and_moved(block: Tensor, low: float) -> Iterator[Tensor]:
    """A block in float64, and then, in the same memory, what it is above the smallest entry."""
    wide = block.to(torch.float64, copy=True)
    yield wide
    yield wide.sub_(low)
