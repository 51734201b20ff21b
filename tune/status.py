"""How far a sweep is, as its trials report it and its progress line shows it."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Status(NamedTuple):
    """How far a sweep is.

    Attributes:
        finished: Runs that have ended, those of earlier sweeps included.
        total: All runs.
        best: The largest value of the metric at the end of a run.
        rounds: Rounds that are known of the runs of this sweep; they show progress where runs last for hours.
    """

    finished: int
    total: int
    best: float
    rounds: int = 0


Watch = Callable[[Status], None]


class Crash(NamedTuple):
    """A trial whose process has died.

    Attributes:
        trial: What it was given.
        reason: Why, in words.
    """

    trial: dict[str, Any]
    reason: str
