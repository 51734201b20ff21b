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


def as_swept_last(sweeps: Sequence[Sweep]) -> Sweep | None:
    """The last sweep of a study, with what earlier ones have found of the cases that it was told to leave out.

    `sweep STUDY --cases A` and then `--cases B` make one study of two cases, if it says the same of all else. A case
    that is gone from the study itself stays out.

    Args:
        sweeps: Of one study at one scale, the oldest first.
    """
    if not sweeps:
        return None
    whole = sweeps[-1]
    for earlier in reversed(sweeps[:-1]):
        whole = _completed(whole, earlier)
    return whole


def _completed(sweep: Sweep, earlier: Sweep) -> Sweep:
    """A sweep, with the cases that it lacks and an earlier one of the same study has."""
    among, ours = list(sweep.content.get("among") or ()), _by_label(sweep.content)
    wanted = {label: case for label, case in _by_label(earlier.content).items() if label in among and label not in ours}
    if not wanted or _all_else(sweep.content) != _all_else(earlier.content):
        return sweep
    cases = sorted([*ours.values(), *wanted.values()], key=lambda case: among.index(case["label"]))
    named = {run_id: label for run_id, label in earlier.cases.items() if label in wanted}
    return sweep._replace(content={**sweep.content, "cases": cases}, cases={**named, **sweep.cases})


def _by_label(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {case["label"]: case for case in content.get("cases") or ()}


def _all_else(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in ("cases", "among")}
