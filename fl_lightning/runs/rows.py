"""What clients remember, beside a checkpoint: in files that only grow, so that a round writes the rows it has changed.

A checkpoint names files, how much of each counts, and its checksum. Read in order they tell which rows there are: each
record is a row of a client, or says that a memory begins anew. What a checkpoint has named is never written to again;
a file that neither the current nor the previous checkpoint names is removed. When more than half of it is out of date,
all that is left is written into a new file.
"""

import struct
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.client_memory import ClientMemory
from fl_lightning.kept import Kept, size
from fl_lightning.system.appended import AppendedFile, Piece

NAME = "rows-{}.bin"
# Kind, which of the state's memories, the client, and bytes that follow.
RECORD = struct.Struct("<4sIqQ")
ROW, ANEW = b"row ", b"anew"
# Out-of-date rows of so many bytes do not matter.
TOLERATED = 2**25


class Extent(NamedTuple):
    """A file of a checkpoint's rows: its name, and length and checksum of what counts."""

    name: str
    length: int
    checksum: int


class Files:
    """The files of a run, as the process knows them that writes its checkpoints.

    Attributes:
        folder: Of the run.
        closed: Those to which nothing is added, because another process has begun them.
        number: Of checkpoints that this process has written.
    """

    def __init__(self, folder: Path, closed: Sequence[Extent] = ()) -> None:
        self.folder, self.closed = folder, tuple(closed)
        self.number = 0
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


class Mark(NamedTuple):
    """On a memory: these files had all its rows when they had been written to so many times."""

    files: Files
    number: int

    @property
    def is_latest(self) -> bool:
        return self.files.number == self.number


def write(folder: Path, memories: Sequence[ClientMemory[Any]]) -> list[Extent]:
    """Write the rows that are not in the folder yet; returns what the checkpoint has to name."""
    files = _files(folder, memories)
    for index, memory in enumerate(memories):
        mark: Mark | None = memory.saved
        known = mark is not None and mark.files is files and mark.is_latest
        if not known:
            files.file.append([RECORD.pack(ANEW, index, 0, 0)])
        for n, kept in sorted((memory.unsaved if known else memory.kept()).items()):
            content = kept.content()
            start = files.file.append([RECORD.pack(ROW, index, n, len(content)), content])
            kept.piece = Piece(files.file, start + RECORD.size, len(content), zlib.crc32(content))
    if memories:
        files.file.sync()
    files.number += 1
    for memory in memories:
        memory.saved, memory.unsaved = Mark(files, files.number), {}
    return files.extents


def read(folder: Path, extents: Sequence[Extent], templates: Sequence[ClientMemory[Any]]) -> list[ClientMemory[Any]]:
    """The memories that a checkpoint has named; every byte is read once, the rows stay in their files.

    Args:
        folder: Of the run.
        extents: What the checkpoint names.
        templates: Memories without clients, with the row that a client has until it has its own.

    Raises:
        OSError, EOFError, ValueError: If something else is in the files now.
    """
    found: list[dict[int, Kept]] = [{} for _ in templates]
    expected = [size(template.default) for template in templates]
    for name, length, checksum in extents:
        file = AppendedFile.open(folder / name)
        while file.length < length:
            kind, index, client, bytes_of_row = RECORD.unpack(file.take(RECORD.size))
            if kind == ROW and index < len(found) and bytes_of_row == expected[index]:
                start, content = file.length, file.take(bytes_of_row)
                piece = Piece(file, start, bytes_of_row, zlib.crc32(content))
                found[index][client] = Kept(None, templates[index].default, piece)
            elif kind == ANEW and index < len(found):
                found[index] = {}
            else:
                raise ValueError(f"{name} holds something else than expected")
        if (file.length, file.checksum) != (length, checksum):
            raise ValueError(f"the checksum of {name} does not match")
    files = Files(folder, extents)
    memories = [ClientMemory(template.default, rows) for template, rows in zip(templates, found, strict=True)]
    for memory in memories:
        memory.saved = Mark(files, files.number)
    return memories


def remove_others(folder: Path, needed: Collection[str]) -> None:
    """Remove the files of rows that no checkpoint names."""
    for path in folder.glob(NAME.format("*")):
        if path.name not in needed:
            path.unlink(missing_ok=True)


def _files(folder: Path, memories: Sequence[ClientMemory[Any]]) -> Files:
    """The files to go on with: those that know most of the rows already, or new ones."""
    marks: list[Mark] = [memory.saved for memory in memories if memory.saved is not None]
    known = next((mark.files for mark in marks if mark.files.folder == folder and mark.is_latest), None)
    if known is None:
        return Files(folder)
    in_use = sum(len(memory.kept()) * (RECORD.size + size(memory.default)) for memory in memories)
    written = sum(extent.length for extent in known.extents)
    return Files(folder) if written > 2 * in_use + TOLERATED else known
