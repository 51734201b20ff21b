"""Outcomes by seed as rules compare them, and what the runs must have for that."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from analysis import comparisons
from analysis.claims.claim import A_FEW, Outcomes, need
from analysis.study import Study
from fl_lightning.metrics.metric import GA

Places = dict[tuple[tuple[Any, ...], str], Outcomes]


def need_cases(runs: pd.DataFrame, *cases: str) -> None:
    """The runs must have some of each of these cases."""
    lacking = [case for case in cases if case not in set(runs["case"])]
    need(not lacking, f"there are no runs of {' and '.join(lacking)}")


def need_only(part: Study, keys: Collection[str]) -> None:
    """No other conditions than these may differ, or the runs would not be comparable."""
    further = [comparisons.symbol(key) for key in comparisons.conditions(part) if key not in keys]
    need(not further, f"{' and '.join(further)} differ between runs, which the rule does not know of")


def best_outcomes(best: pd.DataFrame, keys: Collection[str]) -> Places:
    """GA in percent at the best setting, from `comparisons.best_of_grid`, by conditions and case."""
    return {
        (tuple(row[key] for key in keys), str(row["case"])): in_percent(row["outcomes"]) for _, row in best.iterrows()
    }


def in_percent(outcomes: Mapping[int, float]) -> Outcomes:
    """The `outcomes` of `comparisons.best_of_grid`."""
    return Outcomes({seed: 100 * value for seed, value in outcomes.items()})


def where_words(conditions: Mapping[str, Any]) -> str:
    """Conditions as the beginning of a sentence."""
    return "".join(f"{comparisons.symbol(key)} = {comparisons.shown(value)}: " for key, value in conditions.items())


def in_round(part: Study, metric: str, number: int, factor: float = 1.0) -> dict[str, Outcomes]:
    """A metric of every case in one round."""
    if metric not in part.rounds:
        return {}
    ended = part.rounds.loc[part.rounds["ended"] & part.rounds["round"].eq(number)].dropna(subset=[metric])
    return over_seeds(part.runs, factor * ended.set_index("run_id")[metric])


def late_falls(part: Study) -> dict[str, Outcomes]:
    """How far GA falls from round to round after the first few, added up, in points."""
    return over_seeds(part.runs, falls(part.rounds, A_FEW))


def over_seeds(runs: pd.DataFrame, values: "pd.Series[float]") -> dict[str, Outcomes]:
    """Some values of runs, by case; only runs that ended or diverged count.

    Args:
        runs: One row per run.
        values: By run id.
    """
    found = {}
    for case, mine in runs.groupby("case", sort=False):
        good = mine.loc[mine["ended"] & mine["run_id"].isin(values.dropna().index)]
        lost = dict.fromkeys(mine.loc[mine["status"].eq("diverged"), "seed"], math.nan)
        found[str(case)] = Outcomes({**lost, **dict(zip(good["seed"], values.reindex(good["run_id"]), strict=True))})
    return found


def less_seeds(runs: pd.DataFrame, metrics: Sequence[str], equal: Sequence[str] = ()) -> pd.DataFrame:
    """The metrics without what a seed does to all runs alike, which relates no settings to each other.

    Args:
        runs: One row per run; those that have not ended have no metrics then.
        metrics: Their names.
        equal: Conditions under which runs of a seed are compared.
    """
    good = runs[list(metrics)].where(runs["ended"])
    by_seed = good.groupby([runs[key] for key in (*equal, "seed")], dropna=False).transform("mean")
    return runs.assign(**{metric: good[metric] - by_seed[metric] + good[metric].mean() for metric in metrics})


def falls(rounds: pd.DataFrame, after: int = 0) -> "pd.Series[float]":
    """How far GA falls from round to round, added up over each run, in points; only after some rounds.

    NaN for runs that have not gone on after them.
    """
    measured = rounds.loc[rounds[GA].notna()]
    ordered = measured.loc[measured["round"] >= after].sort_values(["run_id", "round"])
    lost = 100 * (-ordered.groupby("run_id")[GA].diff()).clip(lower=0)
    return lost.groupby(ordered["run_id"]).sum(min_count=1)
