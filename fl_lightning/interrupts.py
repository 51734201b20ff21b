"""Ctrl-C that cannot get lost: Python drops a KeyboardInterrupt that arrives inside a garbage-collection callback."""

import signal
import threading
from types import FrameType

_pending = threading.Event()


def install() -> None:
    """From now on remember that Ctrl-C was pressed, beside raising KeyboardInterrupt as usual."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _remember)


def check() -> None:
    """Raise KeyboardInterrupt if one was requested and has not been heard."""
    if _pending.is_set():
        _pending.clear()
        raise KeyboardInterrupt


def _remember(number: int, frame: FrameType | None) -> None:
    _pending.set()
    raise KeyboardInterrupt
