"""The files and processes of a local Ray cluster, which lives as long as its sweep.

Ray leaves its folder behind, and trials of a killed driver live on for seconds and hold the locks of their runs. So a
session keeps a list of its processes, each with its time of birth, and whoever sweeps next ends what is left of it:
processes on the list, started by this user, and nobody else.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from fl_lightning.system import processes

# A socket's path may have 107 characters, so Ray's own files go to a short path.
PREFIX = "fl-ray-"
OWNER = "owner.lock"
PROCESSES = "processes"
ADDRESS = "address"
# Tells the processes of a session where its list is; they inherit it.
VARIABLE = "FL_LIGHTNING_SESSION"


@contextmanager
def session() -> Iterator[Path]:
    """A folder for one local cluster; at the end nothing is left of it, and later sweeps know whose it was."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = filelock.FileLock(folder / OWNER)
    lock.acquire()  # until this process ends, however it ends
    os.environ[VARIABLE] = str(folder)
    try:
        yield folder
    finally:
        enrol(*started_for(folder))
        os.environ.pop(VARIABLE, None)
        end_processes(folder)  # usually none: Ray has shut down
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def started_for(folder: Path) -> Iterator[int]:
    """Ray's servers in this folder, and their children: an interrupted start has not put them on the list."""
    for number in processes.descendants(os.getpid()):
        with suppress(OSError):  # it has just ended
            if str(folder).encode() in Path(f"/proc/{number}/cmdline").read_bytes():
                yield number
                yield from processes.descendants(number)


def enrol(*numbers: int) -> None:
    """Put processes on the list of the session that they belong to, if there is one."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return
    lines = [f"{number} {born}\n" for number in numbers if (born := processes.birth(number))]
    with suppress(OSError), open(Path(folder, PROCESSES), "a", encoding="ascii") as file:  # the session has ended
        file.write("".join(lines))


def note_address(folder: Path, address: str) -> None:
    """Let everybody know which cluster is that of a session, and cannot be joined."""
    (folder / ADDRESS).write_text(address, encoding="ascii")


def private_addresses() -> set[str]:
    """The clusters of all sessions there are."""
    found = set()
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{ADDRESS}"):
        with suppress(OSError, UnicodeDecodeError):  # it has just ended, or is somebody else's
            found.add(file.read_text(encoding="ascii").strip())
    return found


def sweep_up() -> None:
    """Remove what killed drivers of this user have left of their clusters."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(filelock.Timeout, OSError, NotImplementedError):  # its driver lives, or it cannot be read
            look = folder.lstat()
            if not stat.S_ISDIR(look.st_mode) or look.st_uid != os.getuid():
                continue  # somebody else's
            if not (folder / OWNER).exists():
                continue  # another driver is just making it
            with filelock.FileLock(folder / OWNER, timeout=0):
                end_processes(folder)
            shutil.rmtree(folder, ignore_errors=True)


def end_processes(folder: Path) -> None:
    """End the processes on the list of a session; lines that are damaged name nobody."""
    with suppress(OSError):
        for line in (folder / PROCESSES).read_text(encoding="ascii", errors="replace").splitlines():
            number, _, born = line.partition(" ")
            if number.isdecimal():
                processes.end(int(number), born)
