"""How alike precisions are: the mean cosine over all pairs, as they are and after the paper's normalisation."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fl_lightning.params import Params, blocks, numbers


def cosines(precisions: Sequence[Params]) -> tuple[float, float]:
    """The mean over all pairs of clients of the cosine between their precisions, raw and min-max.

    Min-max, as in the paper's figure, subtracts the smallest entry of each precision (dividing by the largest changes
    no cosine). For full matrices it decides the answer: the shift turns millions of entries near zero into a common
    positive constant, so that matrices with nothing in common look alike. For diagonals it hardly matters.

    With unit vectors u_n, the mean over pairs is (|sum_n u_n|^2 - N) / (N (N - 1)): one pass, whatever N. Entries that
    are all the same have no direction after the shift; they count as orthogonal to all others.
    """
    lows = _lowest(precisions)
    norms = _norms(precisions, lows)
    lengths = []  # of the two resultants, squared, block by block
    for parts in zip(*map(blocks, precisions), strict=True):
        resultants = [torch.zeros_like(parts[0], dtype=torch.float64) for _ in range(2)]
        for part, low, own in zip(parts, lows, norms, strict=True):
            for resultant, moved, norm in zip(resultants, _raw_and_moved(part, low), own, strict=True):
                if norm > 0:
                    resultant.add_(moved, alpha=1 / norm)
        lengths += [torch.dot(resultant, resultant) for resultant in resultants]
    number, squares = len(precisions), numbers(lengths)
    counted = (sum(norm > 0 for norm in of_all) for of_all in zip(*norms, strict=True))
    raw, minmax = (
        (sum(of_blocks) - n) / (number * (number - 1))
        for of_blocks, n in zip((squares[::2], squares[1::2]), counted, strict=True)
    )
    return raw, minmax


def _lowest(precisions: Sequence[Params]) -> list[float]:
    """The smallest entry of each precision."""
    found = numbers(value.min() for precision in precisions for value in precision.values())
    width = len(found) // len(precisions)
    return [min(found[first : first + width]) for first in range(0, len(found), width)]


def _norms(precisions: Sequence[Params], lows: Sequence[float]) -> list[tuple[float, float]]:
    """Of each precision: that of its entries, and of what they are above the smallest one."""
    squares = numbers(
        torch.dot(moved, moved)
        for precision, low in zip(precisions, lows, strict=True)
        for block in blocks(precision)
        for moved in _raw_and_moved(block, low)
    )
    width = len(squares) // len(precisions)
    of_each = (squares[first : first + width] for first in range(0, len(squares), width))
    return [(math.sqrt(sum(one[::2])), math.sqrt(sum(one[1::2]))) for one in of_each]


def _raw_and_moved(block: Tensor, low: float) -> Iterator[Tensor]:
    """A block in float64, and then, in the same memory, what it is above the smallest entry."""
    wide = block.to(torch.float64, copy=True)
    yield wide
    yield wide.sub_(low)
