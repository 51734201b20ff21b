"""Files that only grow: what was written once stays where it is, and is believed only if its checksum matches."""

import os
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.errors import UserError


class AppendedFile:
    """An open file to which pieces are appended.

    What lies beyond `length` does not count: a process that was killed may have left half a piece there.

    Attributes:
        path: Of the file.
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

    def append(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write at the end; on disk after the next `sync`."""
        end = self.length
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

    def take(self, length: int) -> bytearray:
        """The next bytes of a file that was opened; from now on they count.

        Raises:
            EOFError: If there are not so many.
        """
        content = self._read(self.length, length)
        if len(content) < length:
            raise EOFError(f"ends after {self.length + len(content)} bytes")
        self.checksum = zlib.crc32(content, self.checksum)
        self.length += length
        return content

    def _read(self, offset: int, length: int) -> bytearray:
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
