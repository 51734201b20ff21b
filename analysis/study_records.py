"""What sweeps have left of a study: what was swept, which runs that takes, and what it says about them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.metrics.metric import GA
from fl_lightning.runs.plotting.palette import DISPLAY
from fl_lightning.runs.provenance import SETTINGS_TAG, VERSIONS_TAG
from fl_lightning.system.text import original
from tune import best
from tune.boundary import spaces
from tune.study import STATE, STUDY, TABLE

# Which column names the part whose version it is; the others have no name.
NAMED = ("method", "data", "model", "engine")


class Sweep(NamedTuple):
    """A sweep that has left its parent run.

    Attributes:
        study: Its name.
        scale: At which scale.
        run_id: Of the parent run in MLflow; empty if no store has answered.
        content: The study as it was swept; empty while unknown.
        cases: What its runs are called, by their identities; empty until it has ended.
        swept: When it was last begun or gone on with, in seconds.
        ended: Whether nothing more comes.
    """

    study: str
    scale: str
    run_id: str
    content: Mapping[str, Any]
    cases: Mapping[str, str]
    swept: float = 0.0
    ended: bool = True


@dataclass(frozen=True)
class Spec:
    """What a study says about its runs; nothing without one.

    Attributes:
        keys: Which settings are conditions, which are tuned, which make a case.
        metric: What chooses the best settings.
        spaces: What was tried, by case.
        protocol: How the numbers of the best settings came about; empty if there was no choice, None if unknown.
        has_stages: Whether runs with fewer rounds than others may be steps of the study on its way.
        thresholds: Levels of GA that the study asks about.
    """

    keys: best.Keys = field(default_factory=best.Keys)
    metric: str = ""
    spaces: Mapping[str, Any] = field(default_factory=dict)
    protocol: str | None = None
    has_stages: bool = False
    thresholds: tuple[float, ...] = ()


NO_SPEC = Spec()


def sweeps_in(out: Path) -> list[Sweep]:
    """Every sweep whose folder lies in a folder of runs."""
    return [read(path.parent) for path in sorted(out.glob(f"sweeps/*/{STUDY}"))]


def read(folder: Path) -> Sweep:
    """The sweep in a folder."""
    said, table = folder / STUDY, folder / TABLE
    content = yaml.load(said.read_text(encoding="utf-8"), yaml.CSafeLoader) or {}
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # of an earlier version
        state = {"run_id": "", "swept": said.stat().st_mtime, "ended": table.exists()}
    return Sweep(content["name"], content.get("scale") or "all", content=content, cases=cases_in(table), **state)


def cases_in(table: Path | None) -> dict[str, str]:
    """What the runs of a sweep are called, from its table of runs: by identity, in older ones by MLflow's id."""
    text = table.read_text(encoding="utf-8").strip() if table is not None and table.exists() else ""
    if table is None or not text:
        return {}
    listed = pd.read_csv(table, usecols=lambda name: name in ("identity", "run_id", "case"), dtype=str)
    key = "identity" if "identity" in listed else "run_id"
    return dict(zip(listed[key], listed["case"].map(original), strict=True))


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
        named = {run: label for run, label in earlier.cases.items() if label in new}
        whole = whole._replace(content={**whole.content, "cases": cases}, cases={**named, **whole.cases})
    return whole


def _agree(last: Sweep, earlier: Sweep) -> bool:
    """Whether the last sweep left out cases on request, and an earlier one was of the same study."""
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


def spec_of(content: Mapping[str, Any]) -> Spec:
    """What a study says about its runs: what varies as what, what was tried, and how the best is chosen."""
    metric = content.get("metric") or GA
    fewer = any(case.get("confirming") for case in content.get("cases") or ())
    chosen = content.get("seeds") and _chooses(content)
    return Spec(
        keys=best.keys_of(content),
        metric=metric,
        spaces={DISPLAY.get(case, case): tried for case, tried in spaces(content).items()},
        protocol=best.protocol(metric, content["seeds"], confirming(content), fewer) if chosen else "",
        has_stages=True,
        thresholds=tuple(content.get("thresholds") or ()),
    )


def _chooses(content: Mapping[str, Any]) -> bool:
    """Whether there is anything to choose from, or a choice to confirm."""
    spaces = [content.get("space") or {}, *(case.get("space") or {} for case in content.get("cases") or ())]
    ranges = [values for space in spaces for values in space.values()]
    return bool(confirming(content)) or any(kind != "grid" or len(values) > 1 for kind, values in ranges)


def confirming(content: Mapping[str, Any]) -> list[int]:
    """The seeds that had no part in choosing."""
    return list((content.get("confirm") or {}).get("seeds") or ())


def as_the_study_sees(table: pd.DataFrame, content: Mapping[str, Any], measured: pd.DataFrame) -> pd.DataFrame:
    """Its runs with their purpose, up to the round at which its rule stops them.

    A run may belong to several studies: one chooses by it, another confirms with it or stops it earlier.
    """
    table = table.copy()
    table["ended"] = table["status"].eq("finished")  # what a rule of its own had seen enough of may not be enough here
    if content.get("seeds"):
        table["confirms"] = table["seed"].isin(confirming(content))
    if content.get("stop"):
        table = _stopped(table, Stop(**content["stop"]), measured)
    return table


def _stopped(table: pd.DataFrame, stop: Stop, measured: pd.DataFrame) -> pd.DataFrame:
    """Each run up to the round in which the rule had seen enough; without that, only a finished one has ended."""
    table = table.set_index("run_id")
    mine = measured.loc[measured["run_id"].isin(table.index)]
    for run_id, rounds in ((str(run_id), rounds) for run_id, rounds in mine.groupby("run_id")):
        rounds = rounds.dropna(axis="columns", how="all")
        enough = stop.enough(rounds[stop.metric].tolist()) if stop.metric in rounds else None
        if enough is not None:
            table.loc[run_id, "ended"] = True
            table.loc[run_id, "rounds"] = int(rounds["round"].iloc[enough - 1])
            if table.loc[run_id, "status"] == "diverged":  # later, which this study would never have seen
                table.loc[run_id, "status"] = "stopped"
            names = [str(name) for name in rounds if name in table]
            table.loc[run_id, names] = rounds.iloc[enough - 1][names]
            table.loc[run_id, "best_GA"] = rounds[GA].iloc[:enough].max() if GA in rounds else float("nan")
    return table.reset_index()


def superseded(table: pd.DataFrame) -> "pd.Series[bool]":
    """Runs whose settings another version of the code has computed later: those of the newest version count."""
    if SETTINGS_TAG not in table or table[SETTINGS_TAG].isna().all():
        return pd.Series(False, index=table.index)
    setting = [table[SETTINGS_TAG], table["federation.rounds"]]
    newest = table.sort_values(["ended", "start"]).groupby(setting, sort=False)[VERSIONS_TAG].transform("last")
    return table[SETTINGS_TAG].notna() & table[VERSIONS_TAG].ne(newest.reindex(table.index))


def mixed(table: pd.DataFrame) -> list[str]:
    """Which parts the runs of a table have in several versions, in words: such numbers should not be compared."""
    if VERSIONS_TAG not in table:
        return []
    versions = table[VERSIONS_TAG].map(_parsed)
    remarks = []
    for part in dict.fromkeys(part for one in versions for part in one):
        found = versions.map(lambda one, part=part: one.get(part))
        groups: Iterable[Any] = table.groupby(part, sort=False).groups.items() if part in NAMED else [("", table.index)]
        for name, index in groups:
            counts = found.loc[index].dropna().value_counts().sort_index()
            if len(counts) > 1:
                each = ", ".join(f"{version} ({number} runs)" for version, number in counts.items())
                what = f"{part} {name}".strip()
                remarks.append(f"runs of several versions of the code are mixed: {what} version {each}; sweep again")
    return remarks


def _parsed(text: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text) if isinstance(text, str) else {}
    return content
