"""Files that would fill the memory are refused by what they say of themselves, before they are unpacked.

A few kilobytes of gzip or .npz can hold terabytes of zeros, and a header can claim anything.
"""

import io
from typing import Any

import torch

from fl_lightning.errors import UserError, require
from fl_lightning.system import memory


def require_memory(what: str, needed: int) -> None:
    """Refuse to hold so many bytes where the machine has fewer left."""
    free = memory.available(torch.device("cpu"))
    require(
        free is None or needed <= free,
        f"{what} would take {memory.in_words(needed)} of memory, and {memory.in_words(free or 0)} are free; use fewer "
        "or smaller samples, or a machine with more",
    )


def half_of_memory() -> int | None:
    """What text may unpack to, so that there is room left for the table that is made of it."""
    free = memory.available(torch.device("cpu"))
    return None if free is None else free // 2


class Bounded(io.BufferedIOBase):
    """A file that is being unpacked, refused as soon as it goes on beyond a limit.

    Args:
        file: Gives the unpacked bytes.
        limit: Of bytes; None for none.
        refusal: What to say.
    """

    def __init__(self, file: io.BufferedIOBase, limit: int | None, refusal: str) -> None:
        self._file, self._limit, self._refusal = file, limit, refusal

    def read(self, size: int | None = -1) -> bytes:
        """Never more at once than one byte beyond the limit."""
        if self._limit is None:
            return self._file.read(-1 if size is None else size)
        left = self._limit - self._file.tell()
        content = self._file.read(left + 1 if size is None or size < 0 else min(size, left + 1))
        if len(content) > left:
            raise UserError(self._refusal)
        return content

    def read1(self, size: int = -1) -> bytes:
        return self.read(io.DEFAULT_BUFFER_SIZE if size < 0 else size)

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_SET and self._limit is not None and place > self._limit:
            raise UserError(self._refusal)
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()
