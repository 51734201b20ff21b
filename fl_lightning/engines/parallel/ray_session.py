"""The files and processes of a local Ray cluster, which lives as long as its sweep.

Ray leaves its folder behind, and trials of a killed driver live on for seconds and hold the locks of their runs. So a
session keeps a list of its processes, each with its time of birth, and the next sweep ends what is left of it:
processes on the list that this user has started. Ray opens its folder to all users of the machine, so it lies below
ours, which is closed: a list that others could write would let them end any process of this user. The time of
birth distinguishes processes: a number alone is given to another process as soon as its owner has ended.
"""

import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from fl_lightning.system.program import check_temporary

PROC = Path("/proc")
# Fields of /proc/PID/stat after the name in brackets, which may hold blanks and brackets itself.
PARENT, START = 1, 19


def birth(number: int) -> str | None:
    """When a process was started: the boot of the machine and the clock ticks since; None if there is no such one.

    >>> birth(os.getpid()) == birth(os.getpid()), birth(2**30)
    (True, None)
    """
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{_stat(number)[START]}"
    except (OSError, IndexError):
        return None


def all_processes() -> list[int]:
    """Of all processes there are.

    >>> os.getpid() in all_processes()
    True
    """
    return [int(folder.name) for folder in PROC.glob("[0-9]*")]


def descendants(number: int) -> Iterator[int]:
    """The living children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for each in all_processes():
        with suppress(OSError, IndexError):  # it has just ended
            children.setdefault(int(_stat(each)[PARENT]), []).append(each)
    waiting = list(children.get(number, ()))
    while waiting:
        child = waiting.pop()
        yield child
        waiting += children.get(child, ())


def end_process(number: int, born: str) -> bool:
    """Kill the process of this number and birth, if it is this user's and not ourselves; say whether there was one."""
    if number in (0, 1, os.getpid()):
        return False
    try:
        process = os.pidfd_open(number)  # from here on the number means this very process
    except (OSError, AttributeError, OverflowError):  # it has ended, or the system is not Linux
        return False
    try:
        if birth(number) != born or (PROC / str(number)).stat().st_uid != os.getuid():
            return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(process)


def _stat(number: int) -> list[str]:
    return (PROC / str(number) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


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
# Names the list of a session to its processes, which inherit it.
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

    They name the folder in their command and carry it in their environment, also after the process that started them.
    """
    mark = f"{VARIABLE}={folder}".encode()
    for number in all_processes():
        with suppress(OSError):  # it has just ended, or belongs to another user
            named, given = (Path(f"/proc/{number}/{file}").read_bytes() for file in ("cmdline", "environ"))
            if str(folder).encode() in named and mark in given.split(b"\0"):
                yield number
                yield from descendants(number)


def enrol(*numbers: int) -> None:
    """Put processes on the list of the session that they belong to, if there is one."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return
    lines = [f"{number} {born}\n" for number in numbers if (born := birth(number))]
    with suppress(OSError), open(Path(folder, PROCESSES), "a", encoding="ascii") as file:  # the session has ended
        file.write("".join(lines))


def private_addresses() -> set[str]:
    """The clusters of all sessions on this machine, of whatever user: their servers name a folder like ours."""
    found: set[str] = set()
    for number in all_processes():
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
                continue  # another user's, or writable by others
            if not (folder / OWNER).exists() and time.time() - look.st_mtime < MAKING_SECONDS:
                continue  # another driver is just making it
            with filelock.FileLock(folder / OWNER, timeout=0):
                end_processes(folder)
            remove(folder)


def end_processes(folder: Path) -> None:
    """End the processes on the list of a session; damaged lines name none."""
    with suppress(OSError):
        for line in (folder / PROCESSES).read_text(encoding="ascii", errors="replace").splitlines():
            number, _, born = line.partition(" ")
            if number.isdecimal():
                end_process(int(number), born)


def remove(folder: Path) -> None:
    """Remove the folder of a session that has ended, and the last of its processes, which would write it again.

    Ray may just have been starting some; killed ones take a moment to be gone.
    """
    deadline = time.monotonic() + REMOVAL_SECONDS
    while True:
        late = list(started_for(folder))
        for number in late:
            end_process(number, birth(number) or "")
        shutil.rmtree(folder, ignore_errors=True)
        if not late and not folder.exists():
            return
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
