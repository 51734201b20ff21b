"""What clients remember, beside a checkpoint: in files that only grow, so that a round writes the rows it has changed.

There are two copies, in files of their own, and checkpoints take turns: each adds to its copy what has changed since
the last but one. So the current and the previous checkpoint share no file, and either is whole without the other.

A checkpoint names files, how much of each counts, and its checksum. Read in order they give all rows: each
record is a row of a client, or says that a memory begins anew. What a checkpoint has named is never written to again;
a file that neither the current nor the previous checkpoint names is removed. When more than half of a copy is out of
date, all that is left is written into a new file. What was written once stays where it is, and is read only if its
checksum matches.
"""

import io
import os
import struct
import weakref
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.client_state import ClientMemory
from fl_lightning.system import trees
from fl_lightning.system.atomic import writing


class AppendedFile:
    """An open file to which pieces are appended.

    What lies beyond `length` does not count: a process that was killed may have left half a piece there.

    Attributes:
        path: Of the file.
        length: Bytes that count.
        checksum: Of all of them.
    """

    def __init__(self, path: Path, file: io.RawIOBase | io.BufferedIOBase) -> None:
        self.path, self._file = path, file
        self.length, self.checksum = 0, 0
        weakref.finalize(self, file.close)

    @classmethod
    def create(cls, path: Path) -> "AppendedFile":
        """A new file."""
        with writing(path):
            return cls(path, open(path, "xb", buffering=0))

    @classmethod
    def open(cls, path: Path) -> "AppendedFile":
        """A file that is there, of which nothing counts yet: see `take`."""
        return cls(path, open(path, "rb"))

    def append(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write at the end; on disk after the next `sync`."""
        with writing(self.path):
            self._file.seek(self.length)
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[self._file.write(rest) :]
        for part in parts:
            self.checksum = zlib.crc32(part, self.checksum)
            self.length += len(part)

    def take(self, length: int) -> bytearray:
        """The next bytes of a file that was opened; from now on they count.

        Raises:
            EOFError: If there are not so many.
        """
        content = bytearray(length)
        if (found := self._file.readinto(content)) != length:
            raise EOFError(f"ends after {self.length + (found or 0)} bytes")
        self.checksum = zlib.crc32(content, self.checksum)
        self.length += length
        return content

    def sync(self) -> None:
        """Wait until all that was appended is on disk."""
        with writing(self.path):
            os.fsync(self._file.fileno())


NAME = "rows-{}.bin"
# Kind, which of the state's memories, the client, and bytes that follow.
RECORD = struct.Struct("<4sIqQ")
ROW, ANEW = b"row ", b"anew"
# Tensors begin at multiples of this many bytes: the size of the largest number that they hold.
ALIGNMENT = 16
# Out-of-date rows of so many bytes do not matter.
TOLERATED = 2**25


class Extent(NamedTuple):
    """A file of a checkpoint's rows: its name, and length and checksum of what counts."""

    name: str
    length: int
    checksum: int


class Copy:
    """One copy of all rows, as the process knows it that writes its checkpoints.

    Attributes:
        folder: Of the run.
        closed: Files to which nothing is added, because another process has begun them.
    """

    def __init__(self, folder: Path, closed: Sequence[Extent] = ()) -> None:
        self.folder, self.closed = folder, tuple(closed)
        self._open: AppendedFile | None = None

    @property
    def extents(self) -> list[Extent]:
        """What a checkpoint that is written now has to name."""
        now = self._open
        return [*self.closed, *([Extent(now.path.name, now.length, now.checksum)] if now else [])]

    @property
    def file(self) -> AppendedFile:
        """The file to which rows are added."""
        if self._open is None:
            taken = [int(path.stem.rpartition("-")[2]) for path in self.folder.glob(NAME.format("*"))]
            self._open = AppendedFile.create(self.folder / NAME.format(1 + max(taken, default=0)))
        return self._open


class Copies:
    """The two copies of a run's rows: that of the latest checkpoint, and that to which the following one adds."""

    def __init__(self, latest: Copy, following: Copy) -> None:
        self.latest, self.following = latest, following
        self.number = 0  # of checkpoints that this process has written

    def go_on(self, written: Copy) -> None:
        """From now on this copy is that of the latest checkpoint."""
        self.latest, self.following = written, self.latest
        self.number += 1


class Mark(NamedTuple):
    """On a memory: its `unsaved` says what these copies lack after so many checkpoints."""

    copies: Copies
    number: int

    @property
    def is_latest(self) -> bool:
        return self.copies.number == self.number


def write(folder: Path, memories: Sequence[ClientMemory[Any]]) -> list[Extent]:
    """Write the rows that the copy in turn lacks; returns what the checkpoint has to name."""
    copies = _copies(folder, memories)
    lacking = [memory.unsaved if memory.saved == Mark(copies, copies.number) else (None, None) for memory in memories]
    copy = copies.following
    if _is_outdated(copy, memories):
        copy, lacking = Copy(folder), [(None, later) for _, later in lacking]
    file = copy.file
    for index, (memory, (lacks, _)) in enumerate(zip(memories, lacking, strict=True)):
        if lacks is None:
            file.append([RECORD.pack(ANEW, index, 0, 0)])
        for n, row in sorted((memory.own if lacks is None else lacks).items()):
            content = encoded(row)
            file.append([RECORD.pack(ROW, index, n, len(content)), content])
    file.sync()
    copies.go_on(copy)
    for memory, (_, later) in zip(memories, lacking, strict=True):
        memory.saved, memory.unsaved = Mark(copies, copies.number), (later, {})
    return copy.extents


def read(folder: Path, extents: Sequence[Extent], templates: Sequence[ClientMemory[Any]]) -> list[ClientMemory[Any]]:
    """The memories that a checkpoint has named; every byte is read once.

    Args:
        folder: Of the run.
        extents: What the checkpoint names.
        templates: Memories without clients, with the row that a client has until it has its own.

    Raises:
        OSError, EOFError, ValueError: If something else is in the files now.
    """
    found: list[dict[int, Any]] = [{} for _ in templates]
    expected = [size(template.default) for template in templates]
    for name, length, checksum in extents:
        file = AppendedFile.open(folder / name)
        while file.length < length:
            kind, index, client, bytes_of_row = RECORD.unpack(file.take(RECORD.size))
            if kind == ROW and index < len(found) and bytes_of_row == expected[index]:
                found[index][client] = decoded(file.take(bytes_of_row), templates[index].default)
            elif kind == ANEW and index < len(found):
                found[index] = {}
            else:
                raise ValueError(f"{name} holds something else than expected")
        if (file.length, file.checksum) != (length, checksum):
            raise ValueError(f"the checksum of {name} does not match")
    copies = Copies(Copy(folder, extents), Copy(folder))
    memories = [ClientMemory(template.default, rows) for template, rows in zip(templates, found, strict=True)]
    for memory in memories:
        memory.saved, memory.unsaved = Mark(copies, copies.number), (None, {})
    return memories


def remove_others(folder: Path, needed: Collection[str]) -> None:
    """Remove the files of rows that no checkpoint names."""
    for path in folder.glob(NAME.format("*")):
        if path.name not in needed:
            path.unlink(missing_ok=True)


def _copies(folder: Path, memories: Sequence[ClientMemory[Any]]) -> Copies:
    """The copies to go on with: those that know most of the rows already, or new ones."""
    marks: list[Mark] = [memory.saved for memory in memories if memory.saved is not None]
    known = (mark.copies for mark in marks if mark.copies.latest.folder == folder and mark.is_latest)
    return next(known, None) or Copies(Copy(folder), Copy(folder))


def _is_outdated(copy: Copy, memories: Sequence[ClientMemory[Any]]) -> bool:
    in_use = sum(len(memory.own) * (RECORD.size + size(memory.default)) for memory in memories)
    return sum(extent.length for extent in copy.extents) > 2 * in_use + TOLERATED


def size(tree: Any) -> int:
    """Bytes that the tensors of a row take in a file."""
    return sum(_padded(leaf.nbytes) for leaf in trees.leaves(tree))


def encoded(tree: Any) -> bytes:
    """The tensors of a row, one after the other."""
    return b"".join(_parts(tree))


def decoded(content: bytearray, like: Any) -> Any:
    """The row again, like another one, on its device."""
    leaves, structure = trees.flatten(like)
    offset, found = 0, []
    for leaf in leaves:
        if leaf.numel():
            flat = torch.frombuffer(content, dtype=leaf.dtype, count=leaf.numel(), offset=offset)
            found.append(flat.view(leaf.shape).to(leaf.device, copy=True))  # in memory as torch aligns it
        else:
            found.append(torch.empty_like(leaf))
        offset += _padded(leaf.nbytes)
    return trees.unflatten(found, structure)


def _parts(tree: Any) -> Iterator[bytes]:
    for leaf in trees.leaves(tree):
        plain: Tensor = leaf.detach().cpu().contiguous().reshape(-1)
        yield plain.view(torch.uint8).numpy().tobytes()
        yield bytes(_padded(leaf.nbytes) - leaf.nbytes)


def _padded(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT
