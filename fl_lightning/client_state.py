"""What outlives a round: the server, and what clients remember: one row each, but only for those that ever took part.

The sum of the rows is kept up to date by what a cohort changes, so that no round adds up all rows:

    T <- T + sum_n (new_n - old_n)         over the clients of a round; T = sum_n row_n over all that ever took part

A sum of changes drifts away from the sum of the rows where every step rounds. So what rounding takes away is kept
beside the sum, without any loss (Knuth's two-sum), and goes into it at the next step:

    s = T + x,   b = s - T,   (T + x) - s = (T - (s - b)) + (x - b)       exactly, in floating point

Knuth: The Art of Computer Programming 2, 4.2.2, theorem B.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fl_lightning.params import Params
from fl_lightning.system import memory, trees

Row = TypeVar("Row")


class Snapshot(NamedTuple):
    """The server after a round: all that is needed to go on."""

    round: int
    state: Any
    buffers: Params


class ClientMemory(Generic[Row]):
    """A row for every client, a tree of tensors; all have the same one until they get their own.

    A value, as a tensor is one for a hook: nothing changes it, `replaced` makes a new memory that shares the other rows
    with the old one. It costs the memory of the clients that have taken part, however many there are.

    >>> memory = ClientMemory.blank({"w": torch.zeros(2)})
    >>> later = memory.replaced({7: {"w": torch.ones(2)}})
    >>> later[7], later[8], later.seen, memory.seen
    ({'w': tensor([1., 1.])}, {'w': tensor([0., 0.])}, (7,), ())
    >>> later.stacked([7, 8])
    {'w': tensor([[1., 1.],
            [0., 0.]])}
    """

    __slots__ = ("_own", "default", "saved", "unsaved")

    def __init__(self, default: Row, own: Mapping[int, Row]) -> None:
        self.default, self._own = default, own
        # Bookkeeping of `runs.client_rows`: the state of the two copies, and the rows that each of them lacks, that of
        # the next checkpoint first; None is all of them. No part of the value.
        self.saved: Any = None
        self.unsaved: tuple[Mapping[int, Row] | None, Mapping[int, Row] | None] = (None, None)

    @classmethod
    def blank(cls, row: Row) -> "ClientMemory[Row]":
        """The memory in which every client has this row."""
        if not all(isinstance(leaf, Tensor) for leaf in trees.leaves(row)):
            raise TypeError(f"expected a tree of tensors as a client's row, got {row!r}")
        return cls(row, {})

    @property
    def seen(self) -> tuple[int, ...]:
        """The clients that have a row of their own, increasing."""
        return tuple(sorted(self._own))

    def __contains__(self, client: int) -> bool:
        """Whether a client has a row of its own."""
        return client in self._own

    def __getitem__(self, client: int) -> Row:
        """The row of a client."""
        return self._own.get(client, self.default)

    def stacked(self, members: Iterable[int]) -> Row:
        """The rows of some clients, stacked in this order, as `Context.own` takes them."""
        rows = [self[n] for n in members]
        stacked: Row = trees.map_leaves(lambda *leaves: torch.stack(leaves), *rows)
        return stacked

    def replaced(self, rows: Mapping[int, Row]) -> "ClientMemory[Row]":
        """The memory in which some clients have new rows."""
        expected = _shapes(self.default)
        for n, row in rows.items():
            if (found := _shapes(row)) != expected:
                raise ValueError(f"expected a row with the tensors {expected} for client {n}, got {found}")
        _require_room(rows)
        fresh = {n: _alone(row) for n, row in rows.items()}
        later = ClientMemory(self.default, {**self._own, **fresh})
        first, second = (None if rows is None else {**rows, **fresh} for rows in self.unsaved)
        later.saved, later.unsaved = self.saved, (first, second)
        return later

    @property
    def own(self) -> Mapping[int, Row]:
        """The rows of the clients that have one of their own."""
        return self._own

    def __repr__(self) -> str:
        return f"ClientMemory({self.default!r}, with rows of the clients {self.seen})"

    def __reduce__(self) -> Any:
        children, seen = _flatten(self)
        return _unflatten, (children, seen)


def _require_room(rows: Mapping[int, Any]) -> None:
    """Refuse rows that leave no memory for as many more."""
    leaves = trees.leaves(list(rows.values()))
    if leaves:
        needed = sum(leaf.nbytes for leaf in leaves)
        remedy = "take fewer clients or a smaller model, or a machine with more; the same command goes on"
        memory.require_room(f"what {len(rows)} more clients remember", needed, leaves[0].device, remedy)


def _shapes(row: Any) -> dict[str, str]:
    """What a row must have in common with the others, leaf by leaf."""
    leaves, _ = trees.flatten_with_path(row)
    return {trees.path_text(path): f"{leaf.dtype} {list(leaf.shape)}" for path, leaf in leaves}


def _alone(row: Row) -> Row:
    """A row that keeps nothing else in memory: a view of a whole cohort's tensor would."""

    def alone(leaf: Tensor) -> Tensor:
        return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf

    separate: Row = trees.map_leaves(alone, row)
    return separate


def _flatten(memory: ClientMemory[Any]) -> tuple[list[Any], tuple[int, ...]]:
    return [memory.default, *(memory[n] for n in memory.seen)], memory.seen


def _flatten_with_keys(memory: ClientMemory[Any]) -> tuple[list[tuple[Any, Any]], tuple[int, ...]]:
    children, seen = _flatten(memory)
    keys = [trees.Attribute("default"), *map(trees.Position, seen)]
    return list(zip(keys, children, strict=True)), seen


def _unflatten(children: Iterable[Any], seen: tuple[int, ...]) -> ClientMemory[Any]:
    default, *rows = children
    return ClientMemory(default, dict(zip(seen, rows, strict=True)))


# To whatever walks through trees (copies, comparisons, checkpoints) a memory is a container of its rows.
trees.register(
    ClientMemory,
    _flatten,
    _unflatten,
    serialized_type_name="fl_lightning.client_memory.ClientMemory",
    flatten_with_keys_fn=_flatten_with_keys,
)


class RunningTotal(NamedTuple, Generic[Row]):
    """The sum over the rows that clients have of their own; part of a state, beside the memory that it belongs to.

    Attributes:
        sums: The sum, in float64.
        rest: What is lost by having it in 53 bits, with the precision of the rows.

    >>> memory = ClientMemory.blank({"w": torch.zeros(2)})
    >>> rows = {7: {"w": torch.ones(2)}, 9: {"w": torch.full((2,), 0.5)}}
    >>> total = RunningTotal.without_rows(memory.default).changed(memory, rows)
    >>> total.rounded()
    {'w': tensor([1.5000, 1.5000])}
    >>> total.changed(memory.replaced(rows), {7: {"w": torch.zeros(2)}}).rounded()
    {'w': tensor([0.5000, 0.5000])}
    """

    sums: Row
    rest: Row

    @classmethod
    def without_rows(cls, row: Row) -> "RunningTotal[Row]":
        """The sum before any client has a row of its own, for rows like this one."""
        sums = trees.map_leaves(lambda leaf: torch.zeros_like(leaf, dtype=torch.float64), row)
        return cls(sums, trees.map_leaves(torch.zeros_like, row))

    def changed(self, memory: ClientMemory[Row], rows: Mapping[int, Row]) -> "RunningTotal[Row]":
        """The sum after some clients have got new rows.

        Args:
            memory: What this is the sum of; only rows of clients that get new ones are read.
            rows: The new ones.
        """
        sums, structure = trees.flatten(self.sums)
        rest = trees.leaves(self.rest)
        dtypes = [leaf.dtype for leaf in rest]
        rest = [leaf.double() for leaf in rest]
        for n in sorted(rows):
            _add(sums, rest, rows[n], 1)
            if n in memory:
                _add(sums, rest, memory[n], -1)
        for position, (total, small) in enumerate(zip(sums, rest, strict=True)):
            sums[position], lost = _two_sum(total, small)
            rest[position] = lost.to(dtypes[position])
        return RunningTotal(trees.unflatten(sums, structure), trees.unflatten(rest, structure))

    def rounded(self) -> Row:
        """The sum in the precision of the rows: of a single client it is the row, exactly."""
        rounded: Row = trees.map_leaves(lambda total, like: total.to(like.dtype), self.sums, self.rest)
        return rounded


def _add(sums: list[Tensor], rest: list[Tensor], row: Row, sign: int) -> None:
    """Put sums in the place of others, and add to the rest what they lack; the tensors of `sums` stay as they are."""
    for position, leaf in enumerate(trees.leaves(row)):
        sums[position], lost = _two_sum(sums[position], leaf.double() * sign)
        rest[position] = rest[position] + lost


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum, and what is missing from it."""
    total = a + b
    back = total - a
    return total, (a - (total - back)).add_(b - back)
