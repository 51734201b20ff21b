"""Files that only grow: what was written once stays where it is, and is believed only if its checksum matches."""

import os
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fl_lightning.errors import UserError


class Piece(NamedTuple):
    """Some bytes of a file, and what they must add up to."""

    file: "AppendedFile"
    offset: int
    length: int
    checksum: int

    def read(self) -> bytearray:
        """The bytes as they were written."""
        content = self.file.read(self.offset, self.length)
        if zlib.crc32(content) != self.checksum:
            raise UserError(
                f"{self.file.path} is damaged (the checksum of a client's row does not match); the same command "
                "goes on from the last whole checkpoint"
            )
        return content


class AppendedFile:
    """An open file to which pieces are appended.

    What lies beyond `length` does not count: a process that was killed may have left half a piece there.

    Attributes:
        path: Of the file; of a temporary one it says only where it was.
        length: Bytes that count.
        checksum: Of all of them.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        self.length, self.checksum = 0, 0
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, path: Path) -> "AppendedFile":
        """A new file."""
        try:
            return cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; earlier rounds are safe") from error

    @classmethod
    def open(cls, path: Path) -> "AppendedFile":
        """A file that is there, of which nothing counts yet: see `take`."""
        return cls(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    @classmethod
    def temporary(cls) -> "AppendedFile":
        """A new file without a name, which is gone when nobody needs it any more."""
        descriptor, name = tempfile.mkstemp(prefix="fl_lightning-")
        os.unlink(name)
        return cls(Path(name), descriptor)

    def append(self, parts: Sequence[bytes | bytearray | memoryview]) -> int:
        """Write at the end; on disk after the next `sync`. Returns where the first part begins."""
        start = end = self.length
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    written = os.pwrite(self._descriptor, rest, end)
                    rest, end = rest[written:], end + written
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; earlier rounds are safe") from error
        for part in parts:
            self.checksum = zlib.crc32(part, self.checksum)
        self.length = end
        return start

    def take(self, length: int) -> bytearray:
        """The next bytes of a file that was opened; from now on they count.

        Raises:
            EOFError: If there are not so many.
        """
        content = self.read(self.length, length)
        if len(content) < length:
            raise EOFError(f"ends after {self.length + len(content)} bytes")
        self.checksum = zlib.crc32(content, self.checksum)
        self.length += length
        return content

    def read(self, offset: int, length: int) -> bytearray:
        """Bytes at a place of the file, fewer where it ends."""
        content = bytearray(length)
        view, done = memoryview(content), 0
        while done < length and (got := os.preadv(self._descriptor, [view[done:]], offset + done)):
            done += got
        view.release()
        del content[done:]
        return content

    def sync(self) -> None:
        """Wait until all that was appended is on disk."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; earlier rounds are safe") from error
