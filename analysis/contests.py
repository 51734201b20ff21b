"""Which runs compete with which: conditions, settings that are tuned, seeds, and the best setting of everybody.

A *contest* has one set of conditions (data, partition, model, rounds). In it every *case* (a method, or a variant of
it) has tried some *settings* (learning rate, epochs, strength), each with some seeds. The best setting of a case is the
one with the largest mean over seeds; a setting that diverged for one seed is worth nothing, and one that lacks seeds
which others have is not eligible, or luck would decide. If no setting is eligible, the one with the most seeds that
ended stands for the case, and it is said how many diverged.

The choice and the report use the same seeds and the same test set, as in the paper: the numbers of the best are a
little too good, for every case alike.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.columns import column
from analysis.statistics import expected_best, mean_interval

# The paper's symbols.
SYMBOLS = {
    "training.lr": "lr",
    "training.epochs": "E",
    "training.batch_size": "B",
    "data.alpha": "α",
    "data.clients": "N",
    "method.strength": "λ",
    "method.damping": "γ",
    "federation.rounds": "R",
    "method.curvature_form": "curvature",
}
CONDITIONS = ("data", "model", "federation")
TUNED = ("training", "method")
# Where the data or a reference lie is no condition.
NEITHER = frozenset({"data.root", "method", "federation.start"})


def varied(table: pd.DataFrame, sections: Sequence[str]) -> list[str]:
    """The settings of some sections that differ between the runs of a table."""
    names = [str(c) for c in table if str(c).partition(".")[0] in sections and str(c) not in NEITHER]
    return [name for name in names if table[name].nunique(dropna=False) > 1]


def conditions(table: pd.DataFrame, declared: Sequence[str] = ()) -> list[str]:
    """What makes a contest of its own: varied settings of data, model and rounds, and what the study says is one."""
    further = [key for key in (*declared, *table.attrs.get("conditions", ())) if key in table]
    further = [key for key in further if table[key].nunique(dropna=False) > 1]
    return list(dict.fromkeys([*varied(table, CONDITIONS), *further]))


def tuned(table: pd.DataFrame, declared: Sequence[str] = ()) -> list[str]:
    """What was tried for every case."""
    fixed = conditions(table, declared)
    cases = table.groupby("case", sort=False)
    # What differs between cases but not within one of them belongs to the case.
    return [key for key in varied(table, TUNED) if key not in fixed and (cases[key].nunique(dropna=False) > 1).any()]


def setting_numbers(table: pd.DataFrame) -> "pd.Series[int]":
    """Which runs have the same case, setting and conditions, and differ in the seed alone: equal numbers."""
    keys = ["case", *conditions(table), *tuned(table)]
    return table.groupby(keys, dropna=False, sort=False).ngroup()


def largest(table: pd.DataFrame, handled: Sequence[str] = (), longest: bool = True) -> tuple[pd.DataFrame, list[str]]:
    """The contests that one picture can show, and in words what it leaves out.

    Conditions that the picture does not show must be the same for all: the value with the most runs, of equally many
    the largest. The rounds of a study that goes on from a first stage are those of its last, however few runs reach it.

    Args:
        table: Runs, or rounds of runs.
        handled: Conditions that the picture shows.
        longest: Whether the last stage of a study is preferred.
    """
    remarks = []
    for key in conditions(table):
        if key in handled or table[key].nunique(dropna=False) < 2:
            continue
        counts = table.drop_duplicates("run_id")[key].value_counts(dropna=False)
        counts = counts.reindex(sorted(counts.index, key=order, reverse=True))
        last_stage = longest and key == "federation.rounds" and has_stages(table)
        value = counts.index[0 if last_stage else int(counts.argmax())]
        chosen = table[key].isna() if value is None or value != value else table[key].eq(value)
        others = [shown(other) for other in counts.index if other is not value and other != value]
        left_out = table.loc[~chosen, "run_id"].nunique()
        remarks.append(f"only {symbol(key)} = {shown(value)}; {left_out} runs at {', '.join(others)} are not shown")
        kept = table.loc[chosen]
        kept.attrs.update(table.attrs)
        table = kept
    return table, remarks


def has_stages(table: pd.DataFrame) -> bool:
    """Whether runs with fewer rounds than others are steps of a study on its way, not conditions of their own.

    Runs without a study, and a study that says that it compares numbers of rounds, have no stages.
    """
    return bool(table.attrs.get("stages")) and "federation.rounds" not in table.attrs.get("conditions", ())


def final_stage(table: pd.DataFrame) -> pd.DataFrame:
    """Without the runs that a study only made to choose the setting which it continued to more rounds."""
    if "federation.rounds" not in conditions(table) or not has_stages(table):
        return table
    others = [key for key in conditions(table) if key != "federation.rounds"]
    rounds = table["federation.rounds"]
    most = rounds.groupby([table[key] for key in others], dropna=False).transform("max") if others else rounds.max()
    kept = table.loc[rounds.eq(most)]
    kept.attrs.update(table.attrs)
    return kept


def best_of_grid(table: pd.DataFrame, metric: str = "GA", keys: Sequence[str] | None = None) -> pd.DataFrame:
    """The best setting of every case under all conditions.

    Args:
        table: Runs.
        metric: What is large if good.
        keys: Conditions; by default whatever varies of data, model and rounds.

    Returns:
        One row per contest and case: the conditions, `case`, `method`, the tuned settings, `mean`, `low`, `high` and
        `n` of the metric, `remark`, `diverged_seeds` (of this setting, if none was eligible), `tried` (settings),
        `diverged` and `incomplete` (settings that were not eligible), `budget` (settings that every case of the contest
        has), `expected` (best of so many, expected), `run_ids`.
    """
    column(table, metric)
    keys = conditions(table) if keys is None else [key for key in keys if key in table]
    settings = [key for key in tuned(table) if key not in keys]
    rows: list[dict[str, Any]] = []
    for contest in _groups(table, keys):
        mine = [_best(case, keys, settings, metric) for case in _groups(contest, ["case"])]
        counts = [len(row["means"]) for row in mine if row["means"]]
        for row in mine:
            row["budget"] = min(counts, default=0)
            means = row.pop("means")
            row["expected"] = expected_best(means, row["budget"]) if means else math.nan
        rows += mine
    return pd.DataFrame(rows)


def _best(runs: pd.DataFrame, keys: Sequence[str], settings: Sequence[str], metric: str) -> dict[str, Any]:
    """The best setting of one case in one contest."""
    groups = list(_groups(runs, settings))
    eligible, diverged, incomplete = [], 0, 0
    seeds = max(group.loc[group["ended"] | group["status"].eq("diverged"), "seed"].nunique() for group in groups)
    for group in groups:
        done = group.loc[group["ended"] & group[metric].notna()].drop_duplicates("seed", keep="last")
        if group["status"].eq("diverged").any():
            diverged += 1
        elif len(done) < max(seeds, 1):
            incomplete += 1
        else:
            eligible.append(done)
    means = [float(group[metric].mean()) for group in eligible]
    if eligible:
        whole = best = eligible[int(np.argmax(means))]
    else:
        whole = max(groups, key=lambda group: (group["ended"].sum(), group.loc[group["ended"], metric].mean()))
        best = whole.loc[whole["ended"] & whole[metric].notna()]
    interval = mean_interval(best[metric].to_numpy())
    first = runs.iloc[0]
    return {
        **{key: first[key] for key in keys},
        "case": first["case"],
        "method": first["method"],
        **{key: whole.iloc[0][key] for key in settings},
        **interval._asdict(),
        "diverged_seeds": int(whole["status"].eq("diverged").sum()),
        "tried": len(groups),
        "diverged": diverged,
        "incomplete": incomplete,
        # What diverged was tried as well, and a method that loses settings so has no right to more of the others.
        "means": [*means, *[0.0] * diverged] if means else [],
        "run_ids": tuple(best["run_id"]),
    }


def chosen_runs(best: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table that belong to the best settings."""
    ids = {run_id for ids in best["run_ids"] for run_id in ids} if len(best) else set()
    kept = table.loc[table["run_id"].isin(ids)]
    kept.attrs.update(table.attrs)
    return kept


def budget_remarks(best: pd.DataFrame) -> list[str]:
    """Where the choice was not equally free for all, or not complete."""
    remarks: list[str] = []
    if not len(best):
        return remarks
    tried = best.groupby("case", sort=False)["tried"].max()
    if tried.nunique() > 1:
        each = ", ".join(f"{case} {number}" for case, number in tried.items())
        remarks.append(
            f"unequal budgets: settings tried under each condition: {each}; compare the expected best of equal budgets"
        )
    for name, words in (("diverged", "diverged for some seed"), ("incomplete", "lack seeds")):
        number = int(best[name].sum())
        if number:
            remarks.append(f"{number} of {int(best['tried'].sum())} settings {words} and could not be chosen")
    for case, seeds in best.groupby("case", sort=False)["diverged_seeds"].sum().items():
        if seeds:
            remarks.append(f"{case}: {seeds} seed{'s' if seeds > 1 else ''} diverged; means are of the others")
    return remarks


def symbol(key: str) -> str:
    """A setting as the paper writes it.

    >>> symbol("training.epochs"), symbol("data.feature_skew")
    ('E', 'feature_skew')
    """
    return SYMBOLS.get(key, key.rpartition(".")[2] if "." in key else key)


def shown(value: Any) -> str:
    """A value as one writes it.

    >>> shown(0.10), shown(100.0), shown((64, 32)), shown(float("nan"))
    ('0.1', '100', '[64, 32]', '-')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float | np.floating):
        return f"{value:g}"
    if isinstance(value, tuple):
        return json.dumps(value)
    return str(value)


def order(value: Any) -> tuple[bool, float]:
    """What to sort by: numbers as numbers; everything else stays in the order that it has, after them.

    >>> sorted([12, "b", 6, "a", 15.0, None], key=order)
    [None, 6, 12, 15.0, 'b', 'a']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False, -math.inf
    return (False, float(value)) if isinstance(value, int | float | np.number) else (True, 0.0)


def in_words(settings: Mapping[str, Any]) -> str:
    """Settings in one line; what a method does not have is left out.

    >>> in_words({"training.lr": 0.1, "method.strength": float("nan"), "data.alpha": 1.0})
    'lr = 0.1, α = 1'
    """
    return ", ".join(f"{symbol(key)} = {text}" for key, value in settings.items() if (text := shown(value)) != "-")


def _groups(table: pd.DataFrame, keys: Sequence[str]) -> Iterator[pd.DataFrame]:
    if not keys:
        if len(table):
            yield table
        return
    found = table.groupby(list(keys), dropna=False, sort=False)
    for _, group in sorted(found, key=lambda item: [order(value) for value in item[0]]):
        yield group


groups = _groups
