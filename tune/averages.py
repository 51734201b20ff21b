"""Means over seeds, for every table of comparisons and sweeps."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from fl_lightning.record import Measurement

History = Sequence[Measurement]


def mean_and_deviation(values: Sequence[float], digits: str) -> str:
    """The mean with the standard deviation, if there is one.

    >>> mean_and_deviation([1, 2], ".1f"), mean_and_deviation([1], ".1f"), mean_and_deviation([], ".1f")
    ('1.5 ± 0.7', '1.0', '-')
    """
    if not values:
        return "-"
    return f"{fmean(values):{digits}}" + (f" ± {stdev(values):{digits}}" if len(values) > 1 else "")


def rounds_to(history: History, threshold: float) -> int | None:
    """The first round that was measured with GA at or above the threshold."""
    return next((i for i, m in enumerate(history, start=1) if m.metrics.get("GA", -math.inf) >= threshold), None)


def arrival(histories: Sequence[History], threshold: float, digits: str) -> str:
    """In which round runs reach a threshold, and how many of them, if not all."""
    reached = [number for history in histories if (number := rounds_to(history, threshold)) is not None]
    if not reached:
        return "never"
    share = f" ({len(reached)}/{len(histories)})" if len(reached) < len(histories) else ""
    return mean_and_deviation(reached, digits) + share
