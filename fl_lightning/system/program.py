"""What a program needs of its surroundings: safe streams, a home, memory, room for files."""

import atexit
import errno
import io
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from fl_lightning.errors import UserError, require

# What the logs of a local Ray cluster and the trial of a run take.
LEAST_ROOM = 20_000_000

MEMORY_WORDS = (
    "cannot allocate memory",
    "can't allocate memory",
    "out of memory",
    "can't start new thread",
    "failed to map segment",
)


def repair_streams() -> None:
    """Give the program the streams that its caller has closed, and let none of them stop it.

    A closed descriptor would be given to the next file that is opened, a database for instance, and what a library
    prints would be written into it. A closed progress line does not stop the program, and a letter that
    the terminal does not have is shown as a question mark.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - to the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper) and not isinstance(sys.stderr, _Forgiving):
        letters = sys.stderr.encoding
        sys.stderr = _Forgiving(sys.stderr.detach(), encoding=letters, errors="replace", line_buffering=True)


def repair_home() -> None:
    """Give libraries a home folder where the user has none, as in containers, and Matplotlib a writable one.

    MLflow asks for the home folder when it is imported. Matplotlib would make its own temporary folder, and say so.
    """
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor an entry among the users
        home = Path(os.environ.setdefault("HOME", "/"))
    if "MPLCONFIGDIR" not in os.environ and not os.access(home, os.W_OK | os.X_OK):
        with suppress(OSError):  # no temporary folder either: Matplotlib says what it lacks
            folder = os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="fl_lightning-matplotlib-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)


def check_temporary() -> None:
    """Refuse a full folder for temporary files, which would else be taken for a full folder of runs.

    Raises:
        UserError: If it is full, or there is none.
    """
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        raise UserError(f"no folder for temporary files ({error}); set TMPDIR to a folder with room") from None
    check_room(folder, "temporary files", "make room there, or set TMPDIR to another folder")


def check_room(folder: str | Path, what: str, advice: str) -> None:
    """Refuse a folder on a disk that is full.

    Raises:
        UserError: If there are less than `LEAST_ROOM` bytes.
    """
    free = shutil.disk_usage(folder).free
    require(
        free >= LEAST_ROOM,
        f"expected {LEAST_ROOM / 1e6:.0f} MB for {what} in {folder}, got {free / 1e6:.1f} MB; {advice}",
    )


def in_words(error: BaseException) -> str | None:
    """A lack of memory or disk in one line; None for every other error."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's; to import it takes seconds
        return (
            "the device has not as much memory as this process needs; give it a larger part (--resources.gpu), or "
            "choose a smaller model, batch or engine.chunk; finished rounds are saved"
        )
    if _is_lack_of_memory(error):
        return (
            "this process cannot have as much memory as it needs; give it more (ulimit -v, the job's limit), or choose "
            "a smaller model, batch or engine.chunk; finished rounds are saved"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror} ({error.filename or 'where the output goes'}); make room; finished rounds are saved"
    return None


def _is_lack_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, in whatever words of whatever library."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return isinstance(error, OSError | RuntimeError | ImportError) and any(
        words in str(error).lower() for words in MEMORY_WORDS
    )


class _Forgiving(io.TextIOWrapper):
    """Passes text on, and drops it once the reader has gone."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()
