"""Means over seeds as rules compare them, with what they leave out, and what the runs must have for that."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd

from analysis import contests
from analysis.claims.claim import A_FEW, Mean, need
from analysis.parts import Part

Places = dict[tuple[tuple[Any, ...], str], Mean]


def need_cases(runs: pd.DataFrame, *cases: str) -> None:
    """The runs must have some of each of these cases."""
    lacking = [case for case in cases if case not in set(runs["case"])]
    need(not lacking, f"there are no runs of {' and '.join(lacking)}")


def need_only(runs: pd.DataFrame, keys: Collection[str]) -> None:
    """No other conditions than these may differ, or the runs would not be comparable."""
    further = [contests.symbol(key) for key in contests.conditions(runs) if key not in keys]
    need(not further, f"{' and '.join(further)} differ between runs, which the rule does not know of")


def best_means(best: pd.DataFrame, keys: Collection[str]) -> Places:
    """GA in percent at the best setting, from `contests.best_of_grid`, by conditions and case."""
    return {
        (tuple(row[key] for key in keys), str(row["case"])): Mean(
            100 * float(row["mean"]), int(row["n"]), int(row["diverged_seeds"])
        )
        for _, row in best.iterrows()
    }


def on_common_seeds(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[Mean, Mean]:
    """Two cases on the seeds that both have, from the `outcomes` of `contests.best_of_grid`, in percent.

    >>> on_common_seeds({1: 0.4, 2: 0.6, 3: 0.9}, {1: 0.3, 2: 0.5})
    (Mean(value=50.0, ended=2, diverged=0), Mean(value=40.0, ended=2, diverged=0))
    """
    common = one.keys() & other.keys()

    def mean(outcomes: Mapping[int, float]) -> Mean:
        good = [100 * outcomes[seed] for seed in sorted(common) if not math.isnan(outcomes[seed])]
        return Mean(sum(good) / len(good) if good else math.nan, len(good), len(common) - len(good))

    return mean(one), mean(other)


def where_words(conditions: Mapping[str, Any]) -> str:
    """Conditions as the beginning of a sentence."""
    return "".join(f"{contests.symbol(key)} = {contests.shown(value)}: " for key, value in conditions.items())


def in_round(part: Part, metric: str, number: int, factor: float = 1.0) -> dict[str, Mean]:
    """A metric of every case in one round."""
    if metric not in part.rounds:
        return {}
    ended = part.rounds.loc[part.rounds["ended"] & part.rounds["round"].eq(number)].dropna(subset=[metric])
    return over_seeds(part.runs, factor * ended.set_index("run_id")[metric])


def late_falls(part: Part) -> dict[str, Mean]:
    """How far GA falls from round to round after the first few, added up, in points."""
    return over_seeds(part.runs, falls(part.rounds, A_FEW))


def over_seeds(runs: pd.DataFrame, values: "pd.Series[float]") -> dict[str, Mean]:
    """Means of some values of runs, by case; only runs that ended count.

    Args:
        runs: One row per run.
        values: By run id.
    """
    found = {}
    for case, mine in runs.groupby("case", sort=False):
        known = values.reindex(mine.loc[mine["ended"], "run_id"]).dropna()
        found[str(case)] = Mean(float(known.mean()), len(known), int(mine["status"].eq("diverged").sum()))
    return found


def falls(rounds: pd.DataFrame, after: int = 0) -> "pd.Series[float]":
    """How far GA falls from round to round, added up over each run, in points; only after some rounds.

    NaN for runs that have not gone on after them.
    """
    measured = rounds.loc[rounds["GA"].notna()]
    ordered = measured.loc[measured["round"] >= after].sort_values(["run_id", "round"])
    lost = 100 * (-ordered.groupby("run_id")["GA"].diff()).clip(lower=0)
    return lost.groupby(ordered["run_id"]).sum(min_count=1)
