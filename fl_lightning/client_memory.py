"""What the clients of a method remember between rounds: one row each, but only for those that ever took part."""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fl_lightning import kept
from fl_lightning.kept import Kept

Row = TypeVar("Row")


class ClientMemory(Generic[Row]):
    """A row for every client, a tree of tensors; all have the same one until they get their own.

    A value, as a tensor is one for a hook: nothing changes it, `replaced` makes a new memory that shares the other rows
    with the old one. It costs what the clients cost that have taken part, however many there are, and where these rows
    take too much memory, they are in files until somebody asks for them.

    >>> memory = ClientMemory.blank({"w": torch.zeros(2)})
    >>> later = memory.replaced({7: {"w": torch.ones(2)}})
    >>> later[7], later[8], later.seen, memory.seen
    ({'w': tensor([1., 1.])}, {'w': tensor([0., 0.])}, (7,), ())
    >>> later.stacked([7, 8])
    {'w': tensor([[1., 1.],
            [0., 0.]])}
    """

    __slots__ = ("_own", "default", "saved", "unsaved")

    def __init__(self, default: Row, own: Mapping[int, Kept]) -> None:
        self.default, self._own = default, own
        # What `fl_lightning.runs.rows` knows of it: the state of the files that have all rows but those that are
        # unsaved. No part of the value.
        self.saved: Any = None
        self.unsaved: Mapping[int, Kept] = {}

    @classmethod
    def blank(cls, row: Row) -> "ClientMemory[Row]":
        """The memory in which every client has this row."""
        if not all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(row)):
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
        own = self._own.get(client)
        return self.default if own is None else own.get()

    def stacked(self, members: Iterable[int]) -> Row:
        """The rows of some clients, stacked in this order: what `Context.own` wants."""
        rows = [self[n] for n in members]
        stacked: Row = pytree.tree_map(lambda *leaves: torch.stack(leaves), *rows)
        return stacked

    def replaced(self, rows: Mapping[int, Row]) -> "ClientMemory[Row]":
        """The memory in which some clients have new rows."""
        expected = _shapes(self.default)
        for n, row in rows.items():
            if (found := _shapes(row)) != expected:
                raise ValueError(f"expected a row with the tensors {expected} for client {n}, got {found}")
        fresh = {n: Kept(_alone(row), self.default) for n, row in rows.items()}
        kept.make_room()
        memory = ClientMemory(self.default, {**self._own, **fresh})
        if self.saved is not None:
            memory.saved, memory.unsaved = self.saved, {**self.unsaved, **fresh}
        return memory

    def kept(self) -> Mapping[int, Kept]:
        """The rows of the clients that have one of their own, wherever they are."""
        return self._own

    def __repr__(self) -> str:
        return f"ClientMemory({self.default!r}, with rows of the clients {self.seen})"

    def __reduce__(self) -> Any:
        children, seen = _flatten(self)
        return _unflatten, (children, seen)


def _shapes(row: Any) -> dict[str, str]:
    """What a row must have in common with the others, leaf by leaf."""
    leaves, _ = pytree.tree_flatten_with_path(row)
    return {pytree.keystr(path): f"{leaf.dtype} {list(leaf.shape)}" for path, leaf in leaves}


def _alone(row: Row) -> Row:
    """A row that keeps nothing else in memory: a view of a whole cohort's tensor would."""

    def alone(leaf: Tensor) -> Tensor:
        return leaf.clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf

    separate: Row = pytree.tree_map(alone, row)
    return separate


def _flatten(memory: ClientMemory[Any]) -> tuple[list[Any], tuple[int, ...]]:
    return [memory.default, *(memory[n] for n in memory.seen)], memory.seen


def _flatten_with_keys(memory: ClientMemory[Any]) -> tuple[list[tuple[Any, Any]], tuple[int, ...]]:
    children, seen = _flatten(memory)
    keys = [pytree.GetAttrKey("default"), *map(pytree.SequenceKey, seen)]
    return list(zip(keys, children, strict=True)), seen


def _unflatten(children: Iterable[Any], seen: tuple[int, ...]) -> ClientMemory[Any]:
    default, *rows = children
    return ClientMemory(default, {n: Kept(row, default) for n, row in zip(seen, rows, strict=True)})


# To whatever walks through trees (copies, comparisons, checkpoints) a memory is a container of its rows.
pytree.register_pytree_node(
    ClientMemory,
    _flatten,
    _unflatten,
    serialized_type_name="fl_lightning.client_memory.ClientMemory",
    flatten_with_keys_fn=_flatten_with_keys,
)
