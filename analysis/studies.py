"""What a study says about its runs, read from what its sweep has stored: the same that the sweep itself goes by."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.store import Store
from fl_lightning.runs.palette import DISPLAY
from fl_lightning.stopping import Stop
from tune import best
from tune.edges import spaces


class Unchanging(dict[str, Any]):
    """Nobody writes to it, so nobody needs a copy: pandas copies what a table knows deeply in every operation."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unchanging":
        return self


def attributes(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a table of runs must know of its study: what varies as what, what was tried, and how the best is chosen."""
    keys, metric = best.keys_of(content), content.get("metric") or "GA"
    known: dict[str, Any] = {
        "conditions": sorted(keys.environments),
        "tuned": sorted(keys.tuned),
        "cases": sorted(keys.cases),
        "given": sorted(keys.given),
        "metric": metric,
    }
    known["spaces"] = Unchanging({DISPLAY.get(case, case): tried for case, tried in spaces(content).items()})
    fresh, chooses = confirming(content), _chooses(content)
    fewer = any(case.get("confirming") for case in content.get("cases") or ())
    told = content.get("seeds") and chooses
    known["protocol"] = best.protocol(metric, content["seeds"], fresh, fewer) if told else ""
    return known


def _chooses(content: Mapping[str, Any]) -> bool:
    """Whether there is anything to choose from, or a choice to confirm."""
    spaces = [content.get("space") or {}, *(case.get("space") or {} for case in content.get("cases") or ())]
    ranges = [values for space in spaces for values in space.values()]
    return bool(confirming(content)) or any(kind != "grid" or len(values) > 1 for kind, values in ranges)


def confirming(content: Mapping[str, Any]) -> list[int]:
    """The seeds that had no part in choosing."""
    return list((content.get("confirm") or {}).get("seeds") or ())


def as_the_study_sees(table: pd.DataFrame, content: Mapping[str, Any], store: Store) -> pd.DataFrame:
    """Its runs with what they are for, and no longer than its rule wants them.

    A run may belong to several studies: one chooses by it, another confirms with it or stops it earlier.
    """
    table = table.copy()
    table["ended"] = table["status"].eq("finished")  # what a rule of its own had seen enough of may not be enough here
    if content.get("seeds"):
        table["confirms"] = table["seed"].isin(confirming(content))
    if content.get("stop"):
        table = _stopped(table, Stop(**content["stop"]), store)
    return table


def _stopped(table: pd.DataFrame, stop: Stop, store: Store) -> pd.DataFrame:
    """Each run up to the round in which the rule had seen enough; without that, only a finished one has ended."""
    long = store.history(list(table["run_id"])).drop_duplicates(["run_id", "round", "key"], keep="last")
    rounds = long.pivot(index=["run_id", "round"], columns="key", values="value").sort_index()
    table = table.set_index("run_id")
    for run_id in table.index.intersection(rounds.index.get_level_values("run_id")):
        mine = rounds.loc[run_id]
        enough = stop.enough(mine[stop.metric].tolist()) if stop.metric in mine else None
        if enough is not None:
            table.loc[run_id, "ended"] = True
            table.loc[run_id, "rounds"] = int(mine.index[enough - 1])
            if table.loc[run_id, "status"] == "diverged":  # later, which this study would never have seen
                table.loc[run_id, "status"] = "stopped"
            measured = [name for name in mine if name in table]
            table.loc[run_id, measured] = mine.iloc[enough - 1][measured]
            table.loc[run_id, "best_GA"] = mine["GA"].iloc[:enough].max() if "GA" in mine else float("nan")
    return table.reset_index()
