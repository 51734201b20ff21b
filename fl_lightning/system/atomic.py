"""Files that are there as a whole or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fl_lightning.errors import DiskFull, UserError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk, or a folder that cannot be written to, is one line."""
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else UserError
        raise kind(f"cannot write {path}: {error.strerror}; earlier rounds are safe") from error


def write_atomically(path: Path, content: bytes, keep: Path | None = None) -> None:
    """Replace a file as a whole, or not at all; optionally keep what it was."""
    temporary = path.with_name(path.name + ".part")
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if keep is not None and path.exists():
                os.replace(path, keep)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):  # half a file would take room on a full disk
                temporary.unlink(missing_ok=True)
            raise
