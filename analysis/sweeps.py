"""What sweeps have left of a study: what was swept, and what its runs are called."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Sweep(NamedTuple):
    """A sweep that has left its parent run.

    Attributes:
        study: Its name.
        scale: At which scale.
        run_id: Of the parent run.
        content: The study as it was swept; empty while unknown.
        cases: What its runs are called, by run id; empty until it has ended.
    """

    study: str
    scale: str
    run_id: str
    content: Mapping[str, Any]
    cases: Mapping[str, str]


def steps(sweeps: Sequence[Sweep]) -> list[Sweep]:
    """The sweeps of a study that belong to its last one, which is the first of them.

    `sweep STUDY --cases A` and then `--cases B` are two steps of one study, if it says the same of all else. A case
    that is gone from the study itself is none.

    Args:
        sweeps: Of one study at one scale, the oldest first.
    """
    return [sweep for sweep in reversed(sweeps) if sweep is sweeps[-1] or _agree(sweeps[-1], sweep)]


def joined(taken: Sequence[Sweep]) -> Sweep | None:
    """What all steps of a study have found, as if it had been one sweep; the later one of a case counts."""
    if not taken:
        return None
    whole = taken[0]
    for earlier in taken[1:]:
        ours, among = _by_label(whole.content), list(whole.content["among"])
        new = {label: case for label, case in _by_label(earlier.content).items() if label not in ours}
        cases = sorted([*ours.values(), *new.values()], key=lambda case: among.index(case["label"]))
        named = {run_id: label for run_id, label in earlier.cases.items() if label in new}
        whole = whole._replace(content={**whole.content, "cases": cases}, cases={**named, **whole.cases})
    return whole


def _agree(last: Sweep, earlier: Sweep) -> bool:
    """Whether the last sweep was told to leave out cases, and an earlier one was of the same study."""
    ours, theirs = _by_label(last.content), _by_label(earlier.content)
    return (
        theirs.keys() | ours.keys() <= set(last.content.get("among") or ())
        and all(theirs[label] == ours[label] for label in theirs.keys() & ours.keys())
        and _all_else(last.content) == _all_else(earlier.content)
    )


def _by_label(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {case["label"]: case for case in content.get("cases") or ()}


def _all_else(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in ("cases", "among")}
