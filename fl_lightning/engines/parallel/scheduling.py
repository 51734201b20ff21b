"""In which order, and how many at once, clients are handed out: longest first, so that nobody waits for one at the end.

Short ones go together, because every call costs about a millisecond; but never more of them than a worker may lose.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Parts into which each worker's share of the work is cut, at least.
PARTS = 8
# Seconds of work that are worth a call, and those that may be lost with a worker beside its present client.
LEAST, MOST = 0.02, 0.2


class Bundle(NamedTuple):
    """Groups of clients that are handed out together.

    Attributes:
        groups: Positions in the cohort.
        clients: The ids of all of them.
    """

    groups: tuple[range, ...]
    clients: tuple[int, ...]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.clients[:5])) + (" and others" if len(self.clients) > 5 else "")
        return f"client {shown}"


def bundles(
    groups: Sequence[range], clients: Sequence[int], work: Sequence[float], workers: int, seconds_per_work: float | None
) -> list[Bundle]:
    """What to hand out, the longest first.

    Args:
        groups: Clients that are trained at once, by position in the cohort.
        clients: The ids of all clients of the cohort.
        work: How long each client takes, in any unit.
        workers: How many there are.
        seconds_per_work: How long a unit takes, if that is known; otherwise each group goes by itself.

    >>> found = bundles([range(n, n + 1) for n in range(5)], [0, 3, 4, 7, 9], [1, 9, 1, 1, 4], 2, 0.01)
    >>> [bundle.clients for bundle in found]
    [(3,), (9,), (0, 4), (7,)]
    """

    def length(group: range) -> float:
        return sum(work[position] for position in group)

    longest_first = sorted(groups, key=length, reverse=True)
    room = 0.0
    if seconds_per_work:
        shortest, largest = LEAST / seconds_per_work, MOST / seconds_per_work
        room = min(max(sum(work) / (PARTS * workers), shortest), largest)
    packed: list[list[range]] = []
    filled = 0.0
    for group in longest_first:
        if packed and filled + length(group) <= room:
            packed[-1].append(group)
            filled += length(group)
        else:
            packed.append([group])
            filled = length(group)
    return [Bundle(tuple(one), tuple(clients[p] for group in one for p in group)) for one in packed]
