"""Trees of tensors that are kept in memory while they fit, and in a file when they do not.

A kept tree is a value: where it is may change, what it is never does.
"""

import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fl_lightning.system import memory
from fl_lightning.system.appended import AppendedFile, Piece

# Of the memory that would be free without them, kept trees may take this share.
SHARE = 0.5
# Tensors begin at multiples of this many bytes in a file: the size of the largest number that they hold.
ALIGNMENT = 16


class Kept:
    """One tree of tensors, in memory or in a file or both.

    Args:
        tree: The tensors, or None if they are in the file.
        like: A tree of the same structure, shapes, types and device.
        piece: Where in a file they are, if they are in one.
    """

    __slots__ = ("__weakref__", "_like", "_tree", "piece")

    def __init__(self, tree: Any, like: Any, piece: Piece | None = None) -> None:
        self._tree, self._like, self.piece = tree, like, piece
        if tree is not None:
            _in_memory.add(self)

    def get(self) -> Any:
        """The tree."""
        if self._tree is not None:
            return self._tree
        assert self.piece is not None
        return decoded(self.piece.read(), self._like)

    def content(self) -> bytes | bytearray:
        """The tree as a file has it."""
        if self._tree is not None:
            return encoded(self._tree)
        assert self.piece is not None
        return self.piece.read()

    def release(self, file: AppendedFile) -> None:
        """Have it in a file alone: where it is already, or else in this one."""
        if self.piece is None:
            content = encoded(self._tree)
            self.piece = Piece(file, file.append([content]), len(content), zlib.crc32(content))
        self._tree = None

    @property
    def device(self) -> torch.device:
        device: torch.device = pytree.tree_leaves(self._like)[0].device
        return device

    def __len__(self) -> int:
        """Bytes that the tree takes."""
        return size(self._like)


class InMemory:
    """Who is in memory, oldest first; lets go of the oldest when they take too much of it."""

    def __init__(self) -> None:
        self._held: dict[torch.device, dict[int, weakref.ref[Kept]]] = {}
        self._bytes: dict[torch.device, int] = {}

    def add(self, kept: Kept) -> None:
        device, number, taken = kept.device, id(kept), len(kept)
        held = self._held.setdefault(device, {})

        def forget(_: object) -> None:
            self._forget(device, number, taken)

        held[number] = weakref.ref(kept, forget)
        self._bytes[device] = self._bytes.get(device, 0) + taken

    def limit(self, device: torch.device) -> float:
        """Bytes that may be held on a device."""
        free = memory.available(device)
        return float("inf") if free is None else SHARE * (free + self._bytes.get(device, 0))

    def make_room(self) -> None:
        """Put the oldest trees into files until the others take at most what they may."""
        for device, held in self._held.items():
            limit = self.limit(device)
            if self._bytes[device] <= limit:
                continue
            # Somewhat more than needed, so that a temporary file holds many: it goes when the last of them does.
            file = AppendedFile.temporary()
            while held and self._bytes[device] > 0.875 * limit:
                number, reference = next(iter(held.items()))
                if (kept := reference()) is not None:
                    kept.release(file)
                    self._forget(device, number, len(kept))

    def _forget(self, device: torch.device, number: int, taken: int) -> None:
        if self._held[device].pop(number, None) is not None:
            self._bytes[device] -= taken


_in_memory = InMemory()
make_room = _in_memory.make_room


def size(tree: Any) -> int:
    """Bytes that the tensors of a tree take in a file."""
    return sum(_padded(leaf.nbytes) for leaf in pytree.tree_leaves(tree))


def encoded(tree: Any) -> bytes:
    """The tensors of a tree, one after the other."""
    return b"".join(_parts(tree))


def decoded(content: bytearray, like: Any) -> Any:
    """The tree again, on the device of the other one."""
    leaves, structure = pytree.tree_flatten(like)
    offset, found = 0, []
    for leaf in leaves:
        if leaf.numel():
            flat = torch.frombuffer(content, dtype=leaf.dtype, count=leaf.numel(), offset=offset)
            found.append(flat.view(leaf.shape).to(leaf.device))
        else:
            found.append(torch.empty_like(leaf))
        offset += _padded(leaf.nbytes)
    return pytree.tree_unflatten(found, structure)


def _parts(tree: Any) -> Iterator[bytes]:
    for leaf in pytree.tree_leaves(tree):
        plain: Tensor = leaf.detach().cpu().contiguous().reshape(-1)
        yield plain.view(torch.uint8).numpy().tobytes()
        yield bytes(_padded(leaf.nbytes) - leaf.nbytes)


def _padded(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
