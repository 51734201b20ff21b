"""How far a long piece of work is, and how long the rest will take."""

import time
from collections.abc import Sequence

from fl_lightning.system import activity

# Of less than this nobody wants to know how long it takes.
SHORTEST = 2.0


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
        activity.say(f"0 of {len(work)} {what}")

    def done(self, *places: int) -> None:
        """These are done, too."""
        self._number += len(places)
        self._worked += sum(self._work[place] for place in places)
        activity.say(f"{self._number} of {len(self._work)} {self._what}{self._left()}")

    def _left(self) -> str:
        seconds = time.monotonic() - self._start
        if not self._worked or self._number == len(self._work):
            return ""
        left = seconds * (self._total - self._worked) / self._worked
        return f", {left:.0f} s left" if left > SHORTEST else ""
