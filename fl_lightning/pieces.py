"""Parameters in pieces that fit into a core's cache, so that several operations on each cost one way to memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fl_lightning.params import Params

# Numbers in a piece. A call takes a few microseconds, a piece several times as long, and four of them fit into a cache.
SIZE = 2**16


def pieces(params: Params) -> list[Tensor]:
    """Views of all numbers, in the order in which they lie in memory.

    >>> [len(piece) for piece in pieces({"w": torch.zeros(300, 300), "b": torch.zeros(300)})]
    [65536, 24464, 300]
    """
    flat = (value.as_strided((value.numel(),), (1,)) for value in params.values())
    return [piece for value in flat for piece in torch.split(value, SIZE)]


def blocks(params: Params) -> Iterator[Tensor]:
    """All numbers in the order of names and places, in parts that are to be read only."""
    for value in params.values():
        yield from torch.split(value.reshape(-1), SIZE)


def alike(value: Tensor, other: Tensor) -> Tensor:
    """A tensor whose numbers lie in memory in the same order as those of another one: itself, or a copy."""
    return value if value.stride() == other.stride() else torch.empty_like(other).copy_(value)


def can_be_cut(params: Params) -> bool:
    """Whether all have one type, and no gaps between their numbers."""
    # Of a tensor without gaps `empty_like` keeps the order of numbers.
    dense = (torch.empty_like(value, device="meta").stride() == value.stride() for value in params.values())
    return len({value.dtype for value in params.values()}) == 1 and all(dense)
