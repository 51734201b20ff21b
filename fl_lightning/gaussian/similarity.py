"""How alike precisions are: the mean cosine over all pairs, as they are and after the paper's normalisation."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fl_lightning.params import Params

# Numbers that are converted to float64 at once: few enough to stay in the cache.
BLOCK = 2**16


def cosines(precisions: Sequence[Params]) -> tuple[float, float]:
    """The mean over all pairs of clients of the cosine between their precisions, raw and min-max.

    Min-max, as in the paper's figure, subtracts the smallest entry of each precision (dividing by the largest changes
    no cosine). For full matrices it decides the answer: the shift turns millions of entries near zero into a common
    positive constant, so that matrices with nothing in common look alike. For diagonals it hardly matters.

    With unit vectors u_n, the mean over pairs is (|sum_n u_n|^2 - N) / (N (N - 1)): one pass, whatever N. Entries that
    are all the same have no direction after the shift; they count as orthogonal to all others.
    """
    lows = [min(float(value.min()) for value in precision.values()) for precision in precisions]
    return _mean_cosine(precisions, [0.0] * len(precisions)), _mean_cosine(precisions, lows)


def _mean_cosine(precisions: Sequence[Params], shifts: Sequence[float]) -> float:
    number = len(precisions)
    norms = []
    for precision, shift in zip(precisions, shifts, strict=True):
        squares = (float((block.double() - shift).square().sum()) for block in _blocks(precision))
        norms.append(math.sqrt(sum(squares)))
    counted = sum(norm > 0 for norm in norms)
    total = 0.0
    for parts in zip(*(_blocks(precision) for precision in precisions), strict=True):
        resultant = torch.zeros_like(parts[0], dtype=torch.float64)
        for part, shift, norm in zip(parts, shifts, norms, strict=True):
            if norm > 0:
                resultant.add_(part.double() - shift, alpha=1 / norm)
        total += float(resultant.square().sum())
    return (total - counted) / (number * (number - 1))


def _blocks(precision: Params) -> Iterator[Tensor]:
    for value in precision.values():
        yield from torch.split(value.reshape(-1), BLOCK)
