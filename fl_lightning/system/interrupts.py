"""Ctrl-C and SIGTERM, heard once and for all.

Python drops a KeyboardInterrupt that arrives inside a garbage-collection callback; Ray replaces the handler of SIGTERM;
and a batch system or `timeout` that sends SIGTERM means what Ctrl-C means: stop now, and keep what is finished.
"""

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_pending = threading.Event()
_installed = False
_heard: int = signal.SIGINT


def install() -> None:
    """From now on both signals raise KeyboardInterrupt, and are remembered besides."""
    global _installed
    if threading.current_thread() is threading.main_thread():
        _installed = True
        for number in SIGNALS:
            signal.signal(number, _remember)


def restore() -> None:
    """Take the signals back from a library that has put its own handlers in place of ours."""
    if _installed:
        install()


def check() -> None:
    """Raise KeyboardInterrupt if one was requested and has not been heard."""
    if _pending.is_set():
        _pending.clear()
        raise KeyboardInterrupt


def exit_code() -> int:
    """What the shell expects of a process that was stopped: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + _heard


def _remember(number: int, frame: FrameType | None) -> None:
    global _heard
    _heard = number
    _pending.set()
    raise KeyboardInterrupt
