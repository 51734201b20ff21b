"""Ctrl-C and SIGTERM, handled once for all.

Python drops a KeyboardInterrupt that arrives inside a garbage-collection callback or beside a fork; Ray replaces the
handler of SIGTERM; and a batch system or `timeout` that sends SIGTERM means what Ctrl-C means: stop now, and keep what
is finished.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN_SECONDS = 0.2

_pending = threading.Event()
_installed = False
_insisting = False
_heard: int = signal.SIGINT


def install() -> None:
    """From now on both signals raise KeyboardInterrupt, and are remembered besides."""
    global _installed
    if threading.current_thread() is threading.main_thread():
        _installed = True
        for number in SIGNALS:
            signal.signal(number, _remember)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """In this block both signals end the program: nothing is computed yet, and modules are half imported.

    An exception would be swallowed by some of them, and printed as a page of text by the others.
    """
    end_at_once()
    yield
    install()


def end_at_once() -> None:
    """From now on both signals end the program with a line: all that it has computed is saved and logged."""
    for number in SIGNALS:
        signal.signal(number, _end)


def ignore() -> None:
    """From now on both signals do nothing: the program is ending, and its code is known."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def restore() -> None:
    """Take the signals back from a library that has put its own handlers in place of ours."""
    if _installed:
        install()


def check() -> None:
    """Raise KeyboardInterrupt if one was requested and has not been raised yet."""
    if _pending.is_set():
        _pending.clear()
        raise KeyboardInterrupt


def requested() -> bool:
    """Whether there was a signal; an error that comes after one is its echo in a library."""
    return _pending.is_set()


@contextmanager
def insistent() -> Iterator[None]:
    """Raise an interrupt in this block again and again until it is left: Ray, while it starts, may swallow one."""
    global _insisting
    if not _installed:
        yield
        return
    numbers: list[int] = []
    handler, hook = signal.signal(signal.SIGALRM, _raise), sys.unraisablehook
    _insisting, sys.unraisablehook = True, _without_interrupts
    try:
        with _overheard(numbers):
            yield
    except SystemExit as end:  # by Ray's handler, which it has put in place of ours
        if end.code != signal.SIGTERM:
            raise
    finally:
        _insisting, sys.unraisablehook = False, hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        restore()
        for number in numbers:
            _hear(number)
    check()


def leave(code: int) -> None:
    """End the stopped program here: what libraries would do at its end waits for threads that are gone, or crashes."""
    ignore()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or never open
            stream.flush()
    os._exit(code)


def exit_code() -> int:
    """What the shell expects of a process that was stopped: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + _heard


@contextmanager
def _overheard(numbers: list[int]) -> Iterator[None]:
    """Append the signals that arrive in this block at its end, in addition to their own handlers."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        with suppress(BlockingIOError):  # nothing came
            numbers.extend(number for number in os.read(reader, 1024) if number in SIGNALS)
        os.close(reader)
        os.close(writer)


def _hear(number: int) -> None:
    global _heard
    _heard = number
    _pending.set()


def _remember(number: int, frame: FrameType | None) -> None:
    _hear(number)
    if _insisting:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS, AGAIN_SECONDS)
    raise KeyboardInterrupt


def _raise(number: int, frame: FrameType | None) -> None:
    if _insisting:
        raise KeyboardInterrupt


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"\nfl-lightning: stopped\n")
    os._exit(128 + number)


def _without_interrupts(lost: Any) -> None:
    if not issubclass(lost.exc_type, (KeyboardInterrupt, SystemExit)):
        sys.__unraisablehook__(lost)
