"""What is being computed right now, how far it is, and how long the rest will take: a factorisation may take minutes.

Messages go nowhere by default, and change no number.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

# What takes less seconds than this is not forecast.
SHORTEST = 2.0
_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
_waiting: ContextVar[Callable[[str], None] | None] = ContextVar("waiting", default=None)
_notes: ContextVar[bool] = ContextVar("notes", default=True)


def say(text: str) -> None:
    """Show what is being done, where messages are shown.

    >>> heard = []
    >>> with heard_by(heard.append):
    ...     say("block 3 of 45")
    >>> say("shown nowhere")
    >>> heard
    ['block 3 of 45']
    """
    if (listener := _listener.get()) is not None:
        listener(text)


def wait(text: str) -> None:
    """Show what the program waits for before it computes, such as the start of Ray; outside of estimated times."""
    if (listener := _waiting.get()) is not None:
        listener(text)


def note(text: str) -> None:
    """Show the user, where messages are shown, a line that stays; not a warning."""
    if _listener.get() is not None and _notes.get():
        warn(text)


def warn(text: str) -> None:
    """Print an important line on the error stream; a progress bar stays whole."""
    tqdm.write(f"fl-lightning: {text}", file=sys.stderr)


@contextmanager
def heard_by(
    listener: Callable[[str], None], notes: bool = True, waiting: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Send the messages of the block to this function; notes go to the error stream, unless they are switched off.

    Args:
        listener: Receives what is being computed.
        notes: Whether notes are wanted.
        waiting: Receives what is waited for before that; by default the listener does.
    """
    token, other, mode = _listener.set(listener), _waiting.set(waiting or listener), _notes.set(notes)
    try:
        yield
    finally:
        _listener.reset(token)
        _waiting.reset(other)
        _notes.reset(mode)


class Pace:
    """Says how many of several things are done, and how many seconds are left.

    Args:
        what: Is done with them.
        work: How long each takes, in any unit.
    """

    def __init__(self, what: str, work: Sequence[float]) -> None:
        self._what, self._work = what, work
        self._total, self._worked, self._number = sum(work), 0.0, 0
        self._start = time.monotonic()
        say(f"0 of {len(work)} {what}")

    def done(self, *places: int) -> None:
        """These are done, too."""
        self._number += len(places)
        self._worked += sum(self._work[place] for place in places)
        say(f"{self._number} of {len(self._work)} {self._what}{self._left()}")

    def _left(self) -> str:
        seconds = time.monotonic() - self._start
        if not self._worked or self._number == len(self._work):
            return ""
        left = seconds * (self._total - self._worked) / self._worked
        return f", {left:.0f} s left" if left > SHORTEST else ""
