"""Contestants take turns, round by round; times are compared only with those of the same turn.

The clock is the CPU time of this process: other processes on the machine disturb it least.
"""

import gc
import time
from collections.abc import Iterator, Mapping
from statistics import median

Seconds = dict[str, list[float]]


def interleave(contestants: Mapping[str, Iterator[object]], turns: int, rotate: bool = True) -> Seconds:
    """One untimed turn, then `turns` timed ones, with a rotating order unless they depend on each other.

    Returns:
        CPU seconds of every turn, by contestant.
    """
    names = list(contestants)
    for name in names:
        next(contestants[name])
    gc.collect()
    gc.freeze()  # collections during the turns are then short, and the same for all
    seconds: Seconds = {name: [] for name in names}
    for turn in range(turns):
        first = turn % len(names) if rotate else 0
        for name in names[first:] + names[:first]:
            start = time.process_time()
            next(contestants[name])
            seconds[name].append(time.process_time() - start)
    gc.unfreeze()
    return seconds


def paired_ratio(seconds: Seconds, name: str, base: str) -> float:
    """Median over the turns of the time of one contestant divided by that of another."""
    return median(one / other for one, other in zip(seconds[name], seconds[base], strict=True))
