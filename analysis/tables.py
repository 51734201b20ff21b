"""Tables of the paper: numbers for CSV, text for LaTeX and HTML.

Every function takes a `Study` of `analysis.runs` and returns a DataFrame of numbers. Where a column `X` is followed by
`X low` and `X high`, these are the ends of its 95 % interval, or with fewer than five runs their range; `X std` is the
standard deviation over runs. `analysis.formats` makes text of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import comparisons
from analysis.catalogue import Entry
from analysis.columns import column
from analysis.statistics import (
    MIN_FOR_CORRELATION,
    Correlation,
    Interval,
    correlation,
    mean_interval,
    paired,
)
from analysis.study import Study
from fl_lightning.errors import unknown
from fl_lightning.metrics.metric import BY_NAME, GA, LA, METRICS, kinds_in
from tune.best import OPTIMISM_POINTS
from tune.boundary import Side, edges
from tune.study import Range

# What is measured on the clients' own test sets, and of every kind of prediction.
PERSONAL = [metric for metric in METRICS if metric.name.startswith("PA_")]
CALIBRATION = [BY_NAME[name] for name in ("NLL", "Brier", "ECE", "adaptive_ECE", "classwise_ECE", "AURC")]


def _best_runs(study: Study) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The best setting of every case, as the beginning of its row, and its runs."""
    for _, row in comparisons.best_of_grid(study).iterrows():
        start = {comparisons.symbol(key): row[key] for key in comparisons.conditions(study)} | {"case": row["case"]}
        yield start, study.runs.loc[study.runs["run_id"].isin(row["run_ids"])]


def accuracy_and_rounds(study: Study) -> pd.DataFrame:
    """GA, LA and rounds to thresholds, at the best setting of every case. [low, high]: 95 % bootstrap interval over
    seeds; (low to high): range of fewer than five runs, no interval.
    """
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
            line |= arrival_columns(threshold, first)
        if (best["confirmed"] & best["chosen_mean"].notna()).any():
            line[OPTIMISM_POINTS] = _optimism(row)
        line |= {"n": row["n"], "diverged seeds": row["diverged_seeds"], "settings tried": row["tried"]}
        rows.append(line)
    return pd.DataFrame(rows)


def best_settings(study: Study, metric: str = GA) -> pd.DataFrame:
    """The best setting of every case. With unequal numbers of settings, compare the expected best of equally many.

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


def at_edges(best: pd.DataFrame, study: Study) -> list[dict[str, Side]]:
    """For every row of `comparisons.best_of_grid`: which settings lie at which end.

    Args:
        best: The best settings.
        study: What they were chosen from; it says what was tried, or else the runs themselves do.
    """
    tuned = comparisons.tuned(study)
    found = []
    for _, row in best.iterrows():
        mine = study.runs.loc[study.runs["case"].eq(row["case"])]
        seen = {key: Range("grid", tuple(mine[key].dropna().unique())) for key in tuned}
        space = study.spec.spaces.get(row["case"], seen)
        chosen = {key: row[key] for key in space if key in row}
        found.append(edges(chosen, {key: space[key] for key in chosen}))
    return found


def in_cells(found: Sequence[Mapping[str, str]]) -> list[str]:
    """One cell for each row.

    >>> in_cells([{"training.lr": "largest", "training.epochs": "smallest"}, {}])
    ['lr (largest), E (smallest)', '']
    """
    return [", ".join(f"{comparisons.symbol(key)} ({side})" for key, side in one.items()) for one in found]


def paired_comparison(
    study: Study, first: str | None = None, second: str | None = None, metric: str = GA
) -> pd.DataFrame:
    """Differences of GA on equal seeds and partitions, at the best setting of every case; Wilcoxon's signed-rank test,
    with Holm's correction for all tests of this table; effect: rank-biserial correlation from -1 to 1.

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
        if keys and matched["comparison"].nunique() > 1:
            whole = _over_conditions(matched)
            rows.append({comparisons.symbol(keys[0]): "all", "case": reference, "against": rival, **_compared(whole)})
    table = pd.DataFrame(rows)
    if len(table):
        table["p (Holm)"] = _holm(table["p"])
    return table


def correlations(study: Study) -> pd.DataFrame:
    """GA with LA under equal conditions, GA with AE and LA with LF over all of them; intervals from resampled settings,
    each with all its seeds.
    """
    rows = []
    ended = comparisons.final_stage(study.of(study.runs.loc[study.runs["ended"]]))
    keys = comparisons.conditions(ended)
    for comparison in comparisons.groups(ended.runs.dropna(subset=[GA, LA]), keys):
        where = {comparisons.symbol(key): comparison[key].iloc[0] for key in keys}
        found = _by_case(study.of(comparison), comparison[LA], comparison[GA])
        rows += [{"of": GA, "with": LA, **where, **row} for row in found]
    for x, y in (("AE", GA), ("LF", LA)):
        points = comparisons.error_points(study, x)
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
    """Traffic of the server and all clients together, seconds and gradients; the last GA that each case reaches within
    the traffic that all of them use.
    """
    rounds = study.rounds
    if "bytes_down" not in rounds:
        return pd.DataFrame()
    best = comparisons.best_of_grid(study)
    keys = comparisons.conditions(study)
    rows = []
    for comparison in comparisons.groups(best, keys):
        ids = {run_id: row["case"] for _, row in comparison.iterrows() for run_id in row["run_ids"]}
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
                    **{comparisons.symbol(key): comparison[key].iloc[0] for key in keys},
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
    """The mean (map) and, after a final round, every kind of prediction: 15 bins of equal width; AUROC of the entropy
    for out-of-distribution inputs; T: what the logits of temperature are divided by. NLL, Brier, the kinds of ECE and
    AURC are small if good.
    """
    runs = study.runs
    kinds, detected = kinds_in(map(str, runs)), _detected(runs)
    rows = []
    for start, mine in _best_runs(study):
        found = [kind for kind in kinds if mine[f"{kind}/NLL"].notna().any()]
        for kind in found or [""]:
            prefix = f"{kind}/" if kind else ""
            line = start | {"prediction": kind or "map"}
            line |= spread_columns("accuracy (%)", 100 * mine[f"{prefix}accuracy" if kind else GA])
            for metric in CALIBRATION:
                if f"{prefix}{metric.name}" in mine:
                    line |= spread_columns(metric.heading, mine[f"{prefix}{metric.name}"])
            for name in detected:
                if f"{prefix}AUROC/{name}" in mine and mine[f"{prefix}AUROC/{name}"].notna().any():
                    line |= spread_columns(f"AUROC {name}", mine[f"{prefix}AUROC/{name}"])
            if kind == "temperature" and "posterior/logit_temperature" in mine:
                line |= spread_columns("fitted T", mine["posterior/logit_temperature"])
            rows.append(line | {"n": int(mine[f"{prefix}NLL"].notna().sum())})
    return pd.DataFrame(rows)


def detection(study: Study) -> pd.DataFrame:
    """How well the entropy of a prediction separates out-of-distribution inputs from the test set. AUROC and AUPR are
    large if good. FPR95 is small if good: the share of the test set that is flagged when 95 % of the others are.
    """
    rows = []
    for start, mine in _best_runs(study):
        for name in _detected(mine):
            for kind in kinds_in(map(str, mine)):
                if f"{kind}/AUROC/{name}" not in mine or mine[f"{kind}/AUROC/{name}"].isna().all():
                    continue
                case = start["case"]
                where = {key: value for key, value in start.items() if key != "case"}
                line = where | {"out-of-distribution inputs": name, "case": case, "prediction": kind}
                for metric in ("AUROC", "AUPR", "FPR95"):
                    if f"{kind}/{metric}/{name}" in mine:
                        line |= spread_columns(metric, mine[f"{kind}/{metric}/{name}"])
                rows.append(line | {"n": int(mine[f"{kind}/AUROC/{name}"].notna().sum())})
    return pd.DataFrame(rows)


def _detected(runs: pd.DataFrame) -> list[str]:
    """The out-of-distribution inputs that were looked at."""
    names = [str(name) for name in runs if str(name).startswith("map/AUROC/")]
    return [name.removeprefix("map/AUROC/") for name in names if runs[name].notna().any()]


def personal(study: Study) -> pd.DataFrame:
    """PA before: the server's model as a round begins; after: each client's model after local training. Means over the
    clients of the last round; the mean of the worst tenth of them; their standard deviation.
    """
    rows = []
    for line, mine in _best_runs(study):
        if mine["PA_after"].isna().all():
            continue
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


def mean_columns(name: str, values: "pd.Series[float]") -> dict[str, float]:
    """The mean of some values and their standard deviation."""
    return {name: float(values.mean()), f"{name} std": float(values.std())}


def arrival_columns(threshold: float, rounds: "pd.Series[Any]") -> dict[str, float]:
    """When runs reach a level of GA, given the first such round of each that does, and how many do."""
    level = f"{threshold:.0%}"
    return {**mean_columns(f"rounds to {level}", rounds), f"reached {level}": len(rounds)}


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
    comparison = chosen.groupby(list(keys), dropna=False, sort=False).ngroup() if keys else 0
    columns = ["comparison", "seed", "partition", metric]
    table = chosen.assign(comparison=comparison)
    one = table.loc[table["case"].eq(first), [*columns, *keys]]
    two = table.loc[table["case"].eq(second), columns]
    return one.merge(two, on=["comparison", "seed"], suffixes=(" first", " second")).rename(
        columns={f"{metric} first": "first", f"{metric} second": "second"}
    )


def _over_conditions(matched: pd.DataFrame) -> pd.DataFrame:
    same = matched.loc[matched["partition first"].eq(matched["partition second"])]
    complete = same.groupby("seed").filter(lambda mine: mine["comparison"].nunique() == matched["comparison"].nunique())
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


# In the order of the report; the names are those of `fl-lightning table`.
TABLES = (
    Entry(accuracy_and_rounds, "GA, LA and rounds to thresholds", name="accuracy", of_chosen=True),
    Entry(best_settings, "Best settings", lambda s: bool(comparisons.tuned(s)), name="best", of_chosen=True),
    Entry(paired_comparison, "Paired comparison", name="paired", of_chosen=True),
    Entry(calibration, "Calibration", lambda s: s.measures("ECE"), of_chosen=True),
    Entry(
        detection,
        "Out-of-distribution inputs",
        lambda s: bool(_detected(s.runs)),
        of_chosen=True,
    ),
    Entry(personal, "Accuracy on the clients' own test sets", lambda s: s.measures("PA_after"), of_chosen=True),
    Entry(correlations, "Correlations"),
    Entry(costs, "What a round costs"),
)
