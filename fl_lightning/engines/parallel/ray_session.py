"""The files and processes of a local Ray cluster, which lives as long as its sweep.

Ray leaves its folder behind, and trials of a killed driver live on for seconds and hold the locks of their runs. So a
session keeps a list of its processes, each with its time of birth, and the next sweep ends what is left of it:
processes on the list that this user has started. Ray opens its folder to all users of the machine, so it lies below
ours, which is closed: a list that others could write would let them end any process of this user.
"""

import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from fl_lightning.system import processes
from fl_lightning.system.program import check_temporary

# A socket's path may have 107 characters, so Ray's own files go to a short path.
PREFIX = "fl-ray-"
OWNER = "owner.lock"
PROCESSES = "processes"
RAY = "r"
REMOVAL_SECONDS = 10.0
# A folder without a lock that is older than this was left by a driver that was killed.
MAKING_SECONDS = 60.0
# Where the command of a Ray server names its cluster.
GCS_ADDRESS = re.compile(rb"--gcs-address=([^\s\0]+)")
# Tells the processes of a session where its list is; they inherit it.
VARIABLE = "FL_LIGHTNING_SESSION"


@contextmanager
def session() -> Iterator[Path]:
    """A folder for one local cluster, Ray's files in `RAY` below it; at the end nothing is left of it."""
    check_temporary()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = filelock.FileLock(folder / OWNER)
    try:
        lock.acquire()  # until this process ends, however it ends
        os.environ[VARIABLE] = str(folder)
        yield folder
    finally:
        enrol(*started_for(folder))
        os.environ.pop(VARIABLE, None)
        end_processes(folder)  # usually none: Ray has shut down
        lock.release()
        remove(folder)


def started_for(folder: Path) -> Iterator[int]:
    """Ray's servers and workers of this session, and their children, whether or not they have got onto the list.

    They name the folder in their command and carry it in their environment, also when who has started them is gone.
    """
    mark = f"{VARIABLE}={folder}".encode()
    for number in processes.numbers():
        with suppress(OSError):  # it has just ended, or is somebody else's
            named, given = (Path(f"/proc/{number}/{file}").read_bytes() for file in ("cmdline", "environ"))
            if str(folder).encode() in named and mark in given.split(b"\0"):
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


def private_addresses() -> set[str]:
    """The clusters of all sessions on this machine, of whatever user: their servers name a folder like ours."""
    found: set[str] = set()
    for number in processes.numbers():
        with suppress(OSError):  # it has just ended
            command = Path(f"/proc/{number}/cmdline").read_bytes()
            if f"/{PREFIX}".encode() in command:
                found.update(address.decode(errors="replace") for address in GCS_ADDRESS.findall(command))
    return found


def sweep_up() -> None:
    """Remove what killed drivers of this user have left of their clusters."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(filelock.Timeout, OSError, NotImplementedError):  # its driver lives, or it cannot be read
            look = folder.lstat()
            if not stat.S_ISDIR(look.st_mode) or look.st_uid != os.getuid() or look.st_mode & 0o022:
                continue  # another user's, or open to others, who may have written what is in it
            if not (folder / OWNER).exists() and time.time() - look.st_mtime < MAKING_SECONDS:
                continue  # another driver is just making it
            with filelock.FileLock(folder / OWNER, timeout=0):
                end_processes(folder)
            remove(folder)


def end_processes(folder: Path) -> None:
    """End the processes on the list of a session; lines that are damaged name nobody."""
    with suppress(OSError):
        for line in (folder / PROCESSES).read_text(encoding="ascii", errors="replace").splitlines():
            number, _, born = line.partition(" ")
            if number.isdecimal():
                processes.end(int(number), born)


def remove(folder: Path) -> None:
    """Remove the folder of a session that has ended, and the last of its processes, which would write it again.

    Ray may just have been starting some; killed ones take a moment to be gone.
    """
    deadline = time.monotonic() + REMOVAL_SECONDS
    while True:
        late = list(started_for(folder))
        for number in late:
            processes.end(number, processes.birth(number) or "")
        shutil.rmtree(folder, ignore_errors=True)
        if not late and not folder.exists():
            return
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
