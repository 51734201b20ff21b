"""The sum of what all clients remember, kept up to date by what a cohort changes, so that nobody adds up all rows.

    T <- T + sum_n (new_n - old_n)         over the clients of a round; T = sum_n row_n over all that ever took part

A sum of changes drifts away from the sum of the rows where every step rounds. So what rounding takes away is kept
beside the sum, without any loss (Knuth's two-sum), and goes into it at the next step:

    s = T + x,   b = s - T,   (T + x) - s = (T - (s - b)) + (x - b)       exactly, in floating point

Knuth: The Art of Computer Programming 2, 4.2.2, theorem B.
"""

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fl_lightning.client_memory import ClientMemory

Row = TypeVar("Row")


class RunningTotal(NamedTuple, Generic[Row]):
    """The sum over the rows that clients have of their own; part of a state, beside the memory that it belongs to.

    Attributes:
        sums: The sum, in float64.
        rest: What is lost by having it in 53 bits, with the precision of the rows.

    >>> memory = ClientMemory.blank({"w": torch.zeros(2)})
    >>> rows = {7: {"w": torch.ones(2)}, 9: {"w": torch.full((2,), 0.5)}}
    >>> total = RunningTotal.of_nobody(memory.default).changed(memory, rows)
    >>> total.rounded()
    {'w': tensor([1.5000, 1.5000])}
    >>> total.changed(memory.replaced(rows), {7: {"w": torch.zeros(2)}}).rounded()
    {'w': tensor([0.5000, 0.5000])}
    """

    sums: Row
    rest: Row

    @classmethod
    def of_nobody(cls, row: Row) -> "RunningTotal[Row]":
        """The sum before anybody has a row of its own, for rows like this one."""
        sums = pytree.tree_map(lambda leaf: torch.zeros_like(leaf, dtype=torch.float64), row)
        return cls(sums, pytree.tree_map(torch.zeros_like, row))

    def changed(self, memory: ClientMemory[Row], rows: Mapping[int, Row]) -> "RunningTotal[Row]":
        """The sum after some clients have got new rows.

        Args:
            memory: What this is the sum of: nobody's row is read but those of the clients that get new ones.
            rows: The new ones.
        """
        sums, structure = pytree.tree_flatten(self.sums)
        rest = pytree.tree_leaves(self.rest)
        dtypes = [leaf.dtype for leaf in rest]
        rest = [leaf.double() for leaf in rest]
        for n in sorted(rows):
            _add(sums, rest, rows[n], 1)
            if n in memory:
                _add(sums, rest, memory[n], -1)
        for position, (total, small) in enumerate(zip(sums, rest, strict=True)):
            sums[position], lost = _two_sum(total, small)
            rest[position] = lost.to(dtypes[position])
        return RunningTotal(pytree.tree_unflatten(sums, structure), pytree.tree_unflatten(rest, structure))

    def rounded(self) -> Row:
        """The sum in the precision of the rows: of a single client it is the row, exactly."""
        rounded: Row = pytree.tree_map(lambda total, like: total.to(like.dtype), self.sums, self.rest)
        return rounded


def _add(sums: list[Tensor], rest: list[Tensor], row: Row, sign: int) -> None:
    """Put sums in the place of others, and add to the rest what they lack; the tensors of `sums` stay as they are."""
    for position, leaf in enumerate(pytree.tree_leaves(row)):
        sums[position], lost = _two_sum(sums[position], leaf.double() * sign)
        rest[position] = rest[position] + lost


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum, and what is missing from it."""
    total = a + b
    back = total - a
    return total, (a - (total - back)).add_(b - back)
