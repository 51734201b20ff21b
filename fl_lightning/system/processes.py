"""Processes that are known for sure: a number alone is given to another process as soon as its owner has ended."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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


def numbers() -> list[int]:
    """Of all processes there are.

    >>> os.getpid() in numbers()
    True
    """
    return [int(folder.name) for folder in PROC.glob("[0-9]*")]


def descendants(number: int) -> Iterator[int]:
    """The living children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for each in numbers():
        with suppress(OSError, IndexError):  # it has just ended
            children.setdefault(int(_stat(each)[PARENT]), []).append(each)
    waiting = list(children.get(number, ()))
    while waiting:
        child = waiting.pop()
        yield child
        waiting += children.get(child, ())


def end(number: int, born: str) -> bool:
    """Kill the process of this number and birth, if it is this user's and not ourselves; say whether there was one."""
    if number in (0, 1, os.getpid()):
        return False
    try:
        process = os.pidfd_open(number)  # from here on the number means this very process
    except (OSError, AttributeError, OverflowError):  # it has ended, or this is no Linux
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
