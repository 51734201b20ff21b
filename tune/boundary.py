"""Whether a setting that was chosen lies at the edge of what was tried: then a better one may lie beyond."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from tune.study import Range, Study

Side = Literal["smallest", "largest"]
# Of a continuous range, at each end.
MARGIN = 0.05


def edge(key: str, value: Any, tried: Range) -> Side | None:
    """At which end of a range a value lies.

    Nothing lies beyond 0, nor below 1 if all values are whole numbers, such as epochs; a method's mostly are not.

    >>> lr, whole = Range("grid", (1, 0.1, 0.01)), Range("grid", (1, 5, 10))
    >>> edge("training.lr", 1.0, lr), edge("training.lr", 0.1, lr), edge("training.lr", 0.01, lr)
    ('largest', None, 'smallest')
    >>> edge("training.epochs", 1, whole), edge("method.strength", 1, whole)
    (None, 'smallest')
    """
    numbers = [number for number in tried.values if _is_number(number)]
    if not _is_number(value) or len(set(numbers)) < 2:
        return None
    low, high = min(numbers), max(numbers)
    margin = 0.0
    if tried.kind in ("uniform", "loguniform"):
        margin = MARGIN
        if tried.kind == "loguniform":
            value, low, high = map(math.log, (value, low, high))
    if value >= high - margin * (high - low):
        return "largest"
    counts = not key.startswith("method.") and all(float(number).is_integer() for number in numbers)
    limits = (0, 1) if counts else (0,)
    if value <= low + margin * (high - low) and min(numbers) not in limits:
        return "smallest"
    return None


def edges(settings: Mapping[str, Any], space: Mapping[str, Range]) -> dict[str, Side]:
    """The tuned settings that lie at an end of what was tried, and at which."""
    found = {key: edge(key, settings.get(key), tried) for key, tried in space.items()}
    return {key: side for key, side in found.items() if side is not None}


def space_of(study: Study, label: str) -> dict[str, Range]:
    """What was tried for a case."""
    return {**study.space, **next(case.space for case in study.cases if case.label == label)}


def spaces(study: Mapping[str, Any]) -> dict[str, dict[str, Range]]:
    """What was tried for every case, from the content of a study's file as a sweep stores it."""

    def ranges(space: Mapping[str, Any] | None) -> dict[str, Range]:
        return {key: Range(kind, tuple(values)) for key, (kind, values) in (space or {}).items()}

    common = ranges(study.get("space"))
    return {case["label"]: {**common, **ranges(case.get("space"))} for case in study.get("cases") or ()}


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, bool | str) and math.isfinite(value)
