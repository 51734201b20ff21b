"""Tables of the paper: numbers for CSV, text for LaTeX and HTML.

Every function takes a `Study` of `analysis.runs` and returns a DataFrame of numbers. Where a column `X` is followed by
`X low` and `X high`, these are the ends of its 95 % interval, or with fewer than five runs their range; `X std` is the
standard deviation over runs. `analysis.formats` makes text of them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import comparisons
from analysis.boundary_notes import at_edges, in_cells
from analysis.columns import column
from analysis.figures.correlation import error_points
from analysis.formats import NOTE, html, latex, readable, save
from analysis.runs import Study
from analysis.statistics import (
    MIN_FOR_CORRELATION,
    Correlation,
    Interval,
    correlation,
    mean_interval,
    paired,
)
from fl_lightning.errors import unknown
from fl_lightning.metrics.metric import BY_NAME, GA, LA, METRICS, kinds_in
from tune.best import OPTIMISM_POINTS

# What is measured on the clients' own test sets, and of every kind of prediction.
PERSONAL = [metric for metric in METRICS if metric.name.startswith("PA_")]
CALIBRATION = [BY_NAME[name] for name in ("NLL", "Brier", "ECE", "adaptive_ECE", "classwise_ECE", "AURC")]


def accuracy_and_rounds(study: Study) -> pd.DataFrame:
    """The paper's table: GA, LA and the first round with GA at each threshold, at the best setting of every case."""
    best = comparisons.best_of_grid(study)
    keys, tuned = comparisons.conditions(study), comparisons.tuned(study)
    rows = []
    for _, row in best.iterrows():
        mine = study.runs.loc[study.runs["run_id"].isin(row["run_ids"])]
        curves = study.rounds.loc[study.rounds["run_id"].isin(row["run_ids"])]
        line = {comparisons.symbol(key): row[key] for key in keys}
        line |= {"case": row["case"], "setting": comparisons.in_words({key: row[key] for key in tuned})}
        for metric in (GA, LA):
            line |= spread_columns(f"{metric} (%)", 100 * mine[metric])
        for threshold in study.thresholds:
            first = curves.loc[curves[GA].ge(threshold)].groupby("run_id")["round"].min()
            line |= {f"rounds to {threshold:.0%}": first.mean(), f"rounds to {threshold:.0%} std": first.std()}
            line[f"reached {threshold:.0%}"] = len(first)
        if (best["confirmed"] & best["chosen_mean"].notna()).any():
            line[OPTIMISM_POINTS] = _optimism(row)
        line |= {"n": row["n"], "diverged seeds": row["diverged_seeds"], "settings tried": row["tried"]}
        rows.append(line)
    return pd.DataFrame(rows)


def best_settings(study: Study, metric: str = GA) -> pd.DataFrame:
    """The best setting of every case under all conditions, and what to expect of it on an equal budget.

    Where it ran again on fresh seeds: `chosen`, the mean of the seeds that chose it; `confirmed`, that of the fresh
    ones; and `optimism`, by how much the former looked too good.
    """
    best = comparisons.best_of_grid(study, metric)
    tuned = comparisons.tuned(study)
    name = f"confirmed {metric} (%)" if len(best) and best["confirmed"].any() else f"{metric} (%)"
    measured = 100 * study.runs.set_index("run_id")[metric]
    rows = [
        {
            **{comparisons.symbol(key): row[key] for key in comparisons.conditions(study)},
            "case": row["case"],
            **{comparisons.symbol(key): row[key] for key in tuned},
            "at the edge": edge,
            **_chosen_and_confirmed(row, metric, name, measured.reindex(list(row["run_ids"]))),
            "n": row["n"],
            "diverged seeds": row["diverged_seeds"],
            "settings tried": row["tried"],
            "diverged settings": row["diverged"],
            "incomplete settings": row["incomplete"],
            "expected best of equal budget (%)": 100 * row["expected"],
            "equal budget": row["budget"],
        }
        for (_, row), edge in zip(best.iterrows(), in_cells(at_edges(best, study)), strict=True)
    ]
    table = pd.DataFrame(rows)
    if table.get(OPTIMISM_POINTS, pd.Series([0.0])).isna().all():  # no length has both kinds of seeds
        table = table.drop(columns=OPTIMISM_POINTS)
    return table


def paired_comparison(
    study: Study, first: str | None = None, second: str | None = None, metric: str = GA
) -> pd.DataFrame:
    """One case against the others, each at its best setting, on pairs of runs with equal seed and partition.

    Under several conditions the last row of each pair takes the mean over all of them for every seed: runs of one seed
    under different conditions are not independent, seeds are.

    Args:
        study: The runs.
        first: The case in question; by default FOLA, or the first one.
        second: Its rival; by default every other case.
        metric: What is large if good.
    """
    column(study.runs, metric)
    if not len(study.runs):
        return pd.DataFrame()
    cases = list(dict.fromkeys(study.runs["case"]))
    for name in (first, second):
        if name is not None and name not in cases:
            raise unknown("case", name, cases)
    reference = first or reference_case(study)
    rivals = [second] if second else [case for case in cases if case != reference]
    study = comparisons.final_stage(study)
    keys = comparisons.conditions(study)
    chosen = comparisons.chosen_runs(comparisons.best_of_grid(study, metric), study).runs
    rows = []
    for rival in rivals:
        matched = _pairs(chosen, reference, rival, keys, metric)
        for group in comparisons.groups(matched, keys):
            conditions = {comparisons.symbol(key): group[key].iloc[0] for key in keys}
            rows.append({**conditions, "case": reference, "against": rival, **_compared(group)})
        if keys and matched["contest"].nunique() > 1:
            whole = _over_conditions(matched)
            rows.append({comparisons.symbol(keys[0]): "all", "case": reference, "against": rival, **_compared(whole)})
    table = pd.DataFrame(rows)
    if len(table):
        table["p (Holm)"] = _holm(table["p"])
    return table


def correlations(study: Study) -> pd.DataFrame:
    """Pearson and Spearman: GA with LA under equal conditions, GA with AE and LA with LF over all of them."""
    rows = []
    ended = comparisons.final_stage(study.of(study.runs.loc[study.runs["ended"]]))
    keys = comparisons.conditions(ended)
    for contest in comparisons.groups(ended.runs.dropna(subset=[GA, LA]), keys):
        where = {comparisons.symbol(key): contest[key].iloc[0] for key in keys}
        found = _by_case(study.of(contest), contest[LA], contest[GA])
        rows += [{"of": GA, "with": LA, **where, **row} for row in found]
    for x, y in (("AE", GA), ("LF", LA)):
        points = error_points(study, x)
        points = points.loc[points[x] > 0] if len(points) else points
        if len(points):
            mine = study.of(points)
            rows += [{"of": y, "with": x, **row} for row in _by_case(mine, points[x], points[y])]
            # The relation is curved: a line fits the logarithm better.
            rows += [{"of": y, "with": f"log {x}", **row} for row in _by_case(mine, np.log(points[x]), points[y])]
    return pd.DataFrame(rows)


def _by_case(study: Study, x: "pd.Series[float]", y: "pd.Series[float]") -> list[dict[str, Any]]:
    """For every case that has enough runs, and for all together."""
    runs = study.runs
    groups = {str(case): mine.index for case, mine in runs.groupby("case", sort=False)}
    enough = {case: index for case, index in groups.items() if len(index) >= MIN_FOR_CORRELATION and len(groups) > 1}
    enough["all" if len(groups) > 1 else next(iter(groups))] = runs.index
    settings = comparisons.setting_numbers(study)
    return [
        {"case": case, **correlated(correlation(x.loc[index], y.loc[index], settings.loc[index]))}
        for case, index in enough.items()
    ]


def costs(study: Study) -> pd.DataFrame:
    """What a round costs every case: bytes, seconds, gradients; and GA at the traffic that all of them reach."""
    rounds = study.rounds
    if "bytes_down" not in rounds:
        return pd.DataFrame()
    best = comparisons.best_of_grid(study)
    keys = comparisons.conditions(study)
    rows = []
    for contest in comparisons.groups(best, keys):
        ids = {run_id: row["case"] for _, row in contest.iterrows() for run_id in row["run_ids"]}
        curves = rounds.loc[rounds["run_id"].isin(ids)].assign(sent=_traffic)
        totals = curves.groupby(["seed", "run_id"])["sent"].max()
        common = totals.loc[totals > 0].groupby("seed").min()
        # A percent of grace: a method that sends one number more must not lose a round by it.
        within = curves.loc[curves["sent"].le(1.01 * curves["seed"].map(common))]
        for case, mine in curves.groupby(curves["run_id"].map(ids), sort=False):
            sends = mine["sent"].max() > 0
            reached = within.loc[within["run_id"].isin(mine["run_id"])].groupby("run_id")[GA].last()
            rows.append(
                {
                    **{comparisons.symbol(key): contest[key].iloc[0] for key in keys},
                    "case": case,
                    "MB per round": (mine["bytes_down"] + mine["bytes_up"]).mean() / 1e6,
                    # The median: the first round after a start also loads code and data.
                    "seconds per round": (mine["seconds_local"] + mine["seconds_server"]).median(),
                    "gradients per round": mine["gradient_evaluations"].mean(),
                    "GA (%) within common MB": 100 * reached.mean() if sends and len(reached) else np.nan,
                    "common MB": common.mean() / 1e6,
                    "n": mine["run_id"].nunique(),
                }
            )
    return pd.DataFrame(rows)


def calibration(study: Study) -> pd.DataFrame:
    """NLL, Brier, ECE, AURC and AUROC of every case and kind of prediction, at the best setting of every case."""
    runs = study.runs
    best = comparisons.best_of_grid(study)
    keys = comparisons.conditions(study)
    kinds, strange = kinds_in(map(str, runs)), _strange(runs)
    rows = []
    for _, row in best.iterrows():
        mine = runs.loc[runs["run_id"].isin(row["run_ids"])]
        start = {comparisons.symbol(key): row[key] for key in keys} | {"case": row["case"]}
        found = [kind for kind in kinds if mine[f"{kind}/NLL"].notna().any()]
        for kind in found or [""]:
            prefix = f"{kind}/" if kind else ""
            line = start | {"prediction": kind or "map"}
            line |= spread_columns("accuracy (%)", 100 * mine[f"{prefix}accuracy" if kind else GA])
            for metric in CALIBRATION:
                if f"{prefix}{metric.name}" in mine:
                    line |= spread_columns(metric.heading, mine[f"{prefix}{metric.name}"])
            for name in strange:
                if f"{prefix}AUROC/{name}" in mine and mine[f"{prefix}AUROC/{name}"].notna().any():
                    line |= spread_columns(f"AUROC {name}", mine[f"{prefix}AUROC/{name}"])
            if kind == "temperature" and "posterior/logit_temperature" in mine:
                line |= spread_columns("fitted T", mine["posterior/logit_temperature"])
            rows.append(line | {"n": int(mine[f"{prefix}NLL"].notna().sum())})
    return pd.DataFrame(rows)


def detection(study: Study) -> pd.DataFrame:
    """AUROC, AUPR and FPR95 of the entropy for out-of-distribution inputs, a row for each kind of prediction."""
    runs = study.runs
    best = comparisons.best_of_grid(study)
    keys = comparisons.conditions(study)
    rows = []
    for _, row in best.iterrows():
        mine = runs.loc[runs["run_id"].isin(row["run_ids"])]
        for name in _strange(runs):
            for kind in kinds_in(map(str, runs)):
                if f"{kind}/AUROC/{name}" not in mine or mine[f"{kind}/AUROC/{name}"].isna().all():
                    continue
                line = {comparisons.symbol(key): row[key] for key in keys} | {"OOD inputs": name}
                line |= {"case": row["case"], "prediction": kind}
                for metric in ("AUROC", "AUPR", "FPR95"):
                    if f"{kind}/{metric}/{name}" in mine:
                        line |= spread_columns(metric, mine[f"{kind}/{metric}/{name}"])
                rows.append(line | {"n": int(mine[f"{kind}/AUROC/{name}"].notna().sum())})
    return pd.DataFrame(rows)


def _strange(runs: pd.DataFrame) -> list[str]:
    """The out-of-distribution inputs that were measured."""
    return [str(name).removeprefix("map/AUROC/") for name in runs if str(name).startswith("map/AUROC/")]


def personal(study: Study) -> pd.DataFrame:
    """Accuracy on the clients' own test sets, before and after local training, at the best setting of every case."""
    runs = study.runs
    best = comparisons.best_of_grid(study)
    keys = comparisons.conditions(study)
    rows = []
    for _, row in best.iterrows():
        mine = runs.loc[runs["run_id"].isin(row["run_ids"])]
        if mine["PA_after"].isna().all():
            continue
        line = {comparisons.symbol(key): row[key] for key in keys} | {"case": row["case"]}
        for metric in PERSONAL:
            line |= spread_columns(metric.heading, 100 * mine[metric.name])
        rows.append(line | {"n": int(mine["PA_after"].notna().sum())})
    return pd.DataFrame(rows)


def reference_case(study: Study) -> str:
    """The case that others are compared with: FOLA as the paper has it, else the first."""
    cases = study.runs.drop_duplicates("case").set_index("case")
    if "FOLA" in cases.index:
        return "FOLA"
    usual = {"method": "fola", "method.curvature": "online", "method.curvature_form": "diagonal"}
    usual |= {"method.aggregation": "product"}
    for key, value in usual.items():
        if key in cases and cases[key].eq(value).any():
            cases = cases.loc[cases[key].eq(value)]
    return str(cases.index[0])


def spread_columns(name: str, values: "pd.Series[float]") -> dict[str, float]:
    """The mean of some values, the ends of its interval, and their standard deviation."""
    return {**columns(name, mean_interval(values.to_numpy())), f"{name} std": float(values.std())}


def columns(name: str, interval: Interval) -> dict[str, float]:
    """A number and the ends of its interval, as all tables have them."""
    return {name: interval.mean, f"{name} low": interval.low, f"{name} high": interval.high}


def _chosen_and_confirmed(
    row: "pd.Series[Any]", metric: str, name: str, values: "pd.Series[float]"
) -> dict[str, float]:
    if not name.startswith("confirmed"):
        return spread_columns(name, values)
    return {
        f"chosen {metric} (%)": 100 * row["chosen_mean"],
        **spread_columns(name, values if row["confirmed"] else values.iloc[:0]),
        OPTIMISM_POINTS: _optimism(row),
    }


def _optimism(row: "pd.Series[Any]") -> float:
    """By how many points the seeds that chose a setting look better than fresh ones."""
    return float(100 * (row["chosen_mean"] - row["mean"])) if row["confirmed"] else np.nan


def _pairs(chosen: pd.DataFrame, first: str, second: str, keys: Sequence[str], metric: str) -> pd.DataFrame:
    """One row per condition and seed that both have."""
    contest = chosen.groupby(list(keys), dropna=False, sort=False).ngroup() if keys else 0
    columns = ["contest", "seed", "partition", metric]
    table = chosen.assign(contest=contest)
    one = table.loc[table["case"].eq(first), [*columns, *keys]]
    two = table.loc[table["case"].eq(second), columns]
    return one.merge(two, on=["contest", "seed"], suffixes=(" first", " second")).rename(
        columns={f"{metric} first": "first", f"{metric} second": "second"}
    )


def _over_conditions(matched: pd.DataFrame) -> pd.DataFrame:
    same = matched.loc[matched["partition first"].eq(matched["partition second"])]
    complete = same.groupby("seed").filter(lambda mine: mine["contest"].nunique() == matched["contest"].nunique())
    means = complete.groupby("seed")[["first", "second"]].mean().reset_index()
    return means.assign(**{"partition first": "", "partition second": ""})


def _compared(group: pd.DataFrame) -> dict[str, Any]:
    same = group.loc[group["partition first"].eq(group["partition second"])]
    found = paired(100 * same["first"].to_numpy(), 100 * same["second"].to_numpy())
    other = len(group) - len(same)
    remark = "; ".join(filter(None, (found.remark, f"{other} pairs on unequal partitions left out" if other else "")))
    return {
        "n": found.n,
        "ahead": found.ahead,
        "ties": found.ties,
        **columns("difference (points)", found.difference),
        "p": found.p if found.p is not None else np.nan,
        "effect": found.effect if found.effect is not None else np.nan,
        "remark": remark,
    }


def _holm(p: "pd.Series[float]") -> "pd.Series[float]":
    """Holm's correction for as many tests as there are."""
    known = p.dropna().sort_values()
    steps = known * np.arange(len(known), 0, -1)
    return steps.cummax().clip(upper=1).reindex(p.index)


def correlated(found: Correlation) -> dict[str, Any]:
    """Both correlations and their intervals, with the numbers of points and of settings behind them."""
    nothing = Interval(np.nan, np.nan, np.nan, found.n)
    return {
        "n": found.n,
        "settings": found.clusters,
        **columns("Pearson r", found.pearson or nothing),
        **columns("Spearman ρ", found.spearman or nothing),
        "remark": found.remark,
    }


def _traffic(curve: pd.DataFrame) -> "pd.Series[float]":
    return (curve["bytes_down"] + curve["bytes_up"]).groupby(curve["run_id"]).cumsum()


__all__ = [
    "NOTE",
    "accuracy_and_rounds",
    "best_settings",
    "calibration",
    "columns",
    "correlated",
    "correlations",
    "costs",
    "detection",
    "html",
    "latex",
    "paired_comparison",
    "personal",
    "readable",
    "reference_case",
    "save",
    "spread_columns",
]
