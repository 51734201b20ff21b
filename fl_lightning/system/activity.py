"""What is being computed right now, for whoever shows progress: a factorisation may take minutes.

Nobody listens by default, and what is said changes no number.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tqdm import tqdm

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
_waiting: ContextVar[Callable[[str], None] | None] = ContextVar("waiting", default=None)
_notes: ContextVar[bool] = ContextVar("notes", default=True)


def say(text: str) -> None:
    """Tell the listener, if there is one, what is being done.

    >>> heard = []
    >>> with heard_by(heard.append):
    ...     say("block 3 of 45")
    >>> say("nobody hears this")
    >>> heard
    ['block 3 of 45']
    """
    if (listener := _listener.get()) is not None:
        listener(text)


def wait(text: str) -> None:
    """Tell what is waited for before anything is computed, such as the start of Ray: no part of anybody's pace."""
    if (listener := _waiting.get()) is not None:
        listener(text)


def note(text: str) -> None:
    """Tell the user, if somebody listens, what is worth a line that stays; not a warning."""
    if _listener.get() is not None and _notes.get():
        warn(text)


def warn(text: str) -> None:
    """Tell the user, on the error stream, what must not be missed; a progress bar stays whole."""
    tqdm.write(f"fl-lightning: {text}", file=sys.stderr)


@contextmanager
def heard_by(
    listener: Callable[[str], None], notes: bool = True, waiting: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Let this function hear what is said in the block; notes go to the error stream, unless they are not wanted.

    Args:
        listener: Hears what is being computed.
        notes: Whether notes are wanted.
        waiting: Hears what is waited for before that; by default the listener does.
    """
    token, other, mode = _listener.set(listener), _waiting.set(waiting or listener), _notes.set(notes)
    try:
        yield
    finally:
        _listener.reset(token)
        _waiting.reset(other)
        _notes.reset(mode)
