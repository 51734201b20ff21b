"""Which runs are compared: conditions, settings that are tuned, seeds, and the best setting of every case.

A *comparison* has one set of conditions (data, partition, model, rounds). In it every *case* (a method, or a variant of
it) has tried some *settings* (learning rate, epochs, lambda), each with some seeds. `tune.best` has the rule for the
best setting of a case, the same for sweeps and reports; what is a condition and what is tuned, the study says, and
without one the section of a setting does.

If a study confirms its choice on fresh seeds, the numbers of the best are of these. If not, the choice and the report
use the same seeds, as in the paper: the numbers of the best are a little too good, for every case alike.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.columns import column
from analysis.statistics import expected_best, mean_interval
from analysis.study import Study
from fl_lightning.metrics.metric import GA, sign
from tune import best

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
# Where the data or a reference lie changes no comparison.
NEITHER = frozenset({"data.root", "method", "federation.start"})


def varied(table: pd.DataFrame, sections: Sequence[str]) -> list[str]:
    """The settings of some sections that differ between the runs of a table."""
    names = [str(c) for c in table if str(c).partition(".")[0] in sections and str(c) not in NEITHER]
    return [name for name in names if table[name].nunique(dropna=False) > 1]


def conditions(study: Study) -> list[str]:
    """What makes a comparison of its own: varied settings of data, model and rounds, and what the study says.

    Settings that the study tunes, or that make a case, do not count.
    """
    table, known = study.runs, study.spec.keys
    further = [key for key in sorted(known.environments) if key in table and table[key].nunique(dropna=False) > 1]
    found = list(dict.fromkeys([*filter(known.is_condition, varied(table, CONDITIONS)), *further]))
    # What the study sets according to the others says nothing new, unless it was set otherwise.
    leading = [key for key in found if key in further or not known.follows(key)]
    return [key for key in found if key in leading or not _follow(table, leading, key)]


def _follow(table: pd.DataFrame, leading: Sequence[str], key: str) -> bool:
    """Whether some settings decide another one."""
    return bool(leading) and bool((table.groupby(list(leading), dropna=False)[key].nunique(dropna=False) == 1).all())


def tuned(study: Study) -> list[str]:
    """What was tried for every case."""
    table, known = study.runs, study.spec.keys
    fixed = conditions(study)
    cases = table.groupby("case", sort=False)
    named = [str(key) for key in table if str(key) in known.tuned and table[key].nunique(dropna=False) > 1]
    candidates = dict.fromkeys([*varied(table, (*TUNED, *CONDITIONS)), *named])
    given = [key for key in candidates if known.follows(key) and _follow(table, fixed, key)]
    # What differs between cases but not within one of them belongs to the case.
    return [
        key
        for key in candidates
        if key not in fixed and key not in given and (cases[key].nunique(dropna=False) > 1).any()
    ]


def setting_numbers(study: Study) -> "pd.Series[int]":
    """Which runs have the same case, setting and conditions, and differ in the seed alone: equal numbers."""
    keys = ["case", *conditions(study), *tuned(study)]
    return study.runs.groupby(keys, dropna=False, sort=False).ngroup()


def largest(study: Study, handled: Sequence[str] = (), longest: bool = True) -> tuple[Study, list[str]]:
    """The comparisons that one picture can show, and in words what it leaves out.

    Conditions that the picture does not show must be the same for all: the value with the most runs, of equally many
    the largest. The rounds of a study that goes on from a first stage are those of its last, however few runs reach it.

    Args:
        study: The runs.
        handled: Conditions that the picture shows.
        longest: Whether the last stage of a study is preferred.
    """
    remarks = []
    for key in conditions(study):
        table = study.runs
        if key in handled or table[key].nunique(dropna=False) < 2:
            continue
        counts = table[key].value_counts(dropna=False)
        counts = counts.reindex(sorted(counts.index, key=order, reverse=True))
        last_stage = longest and key == "federation.rounds" and has_stages(study)
        value = counts.index[0 if last_stage else int(counts.argmax())]
        chosen = table[key].isna() if value is None or value != value else table[key].eq(value)
        others = [shown(other) for other in counts.index if other is not value and other != value]
        left_out = int((~chosen).sum())
        remarks.append(f"only {symbol(key)} = {shown(value)}; {left_out} runs at {', '.join(others)} are not shown")
        study = study.of(table.loc[chosen])
    return study, remarks


def has_stages(study: Study) -> bool:
    """Whether runs with fewer rounds than others are steps of a study on its way, not conditions of their own.

    Runs without a study, and a study that says that it compares numbers of rounds, have no stages.
    """
    return study.spec.has_stages and "federation.rounds" not in study.spec.keys.environments


def final_stage(study: Study) -> Study:
    """Without the runs that a study only made to choose the setting which it continued to more rounds."""
    if "federation.rounds" not in conditions(study) or not has_stages(study):
        return study
    table, others = study.runs, [key for key in conditions(study) if key != "federation.rounds"]
    rounds = table["federation.rounds"]
    most = rounds.groupby([table[key] for key in others], dropna=False).transform("max") if others else rounds.max()
    return study.of(table.loc[rounds.eq(most)])


# What the choice of a setting asks of a run beside settings and metrics.
OF_A_CHOICE = ("case", "method", "seed", "status", "ended", "confirms", "run_id")


def best_of_grid(
    study: Study, metric: str = GA, keys: Sequence[str] | None = None, chosen_by: str | None = None
) -> pd.DataFrame:
    """The best setting of every case under all conditions; `tune.best` says what is best.

    Where all cases of a comparison have runs on seeds that had no part in choosing, the numbers are of these.

    Args:
        study: The runs.
        metric: What is shown.
        keys: Conditions; by default whatever varies of data, model and rounds, and what the study says.
        chosen_by: What decides; by default the study's own metric, or the one that is shown.

    Returns:
        One row per comparison and case: the conditions, `case`, `method`, the tuned settings, `mean`, `low`, `high` and
        `n` of the metric, `remark`, `diverged_seeds` (of this setting, if none was eligible), `tried` (settings),
        `diverged` and `incomplete` (settings that were not eligible), `budget` (settings that every case has),
        `expected` (best of so many, expected), `luck` (how much better the best of all is expected to be, by the
        seeds that chose alone), `run_ids` and, by seed, `outcomes` (NaN if it diverged);
        `confirmed`, whether these are runs on fresh seeds, and `chosen_mean`, of the seeds that chose (NaN if they
        have not gone on to as many rounds).
    """
    table = study.runs
    column(table, metric)
    chosen_by = chosen_by or study.spec.metric or metric
    if chosen_by not in table:  # no run has measured it yet
        chosen_by = metric
    keys = conditions(study) if keys is None else [key for key in keys if key in table]
    everything = tuned(study)
    settings = [key for key in everything if key not in keys]
    # Of hundreds of columns a few are looked at, but all would be copied for each of thousands of groups.
    looked_at = dict.fromkeys((*keys, *settings, *OF_A_CHOICE, metric, chosen_by))
    table = table[[key for key in looked_at if key in table]]
    rows: list[dict[str, Any]] = []
    for comparison in _groups(table, keys):
        mine = [_chosen(case, settings, metric, chosen_by) for case in _groups(comparison, ["case"])]
        # A picture that shows a tuned setting compares settings, of which only the best has fresh seeds.
        needed = [one for one in mine if len(one.good)]
        confirmed = settings == everything and bool(needed) and all(len(one.fresh) for one in needed)
        # What diverged was tried as well, and a method that loses settings so has no right to more of the others.
        counts = [len(one.scores) + one.diverged for one in mine if one.scores]
        budget = min(counts, default=0)
        for one in mine:
            row = _described(one, keys, settings, metric, confirmed and len(one.good) > 0, budget)
            rows.append({**row, "budget": budget})
    return pd.DataFrame(rows)


class _Chosen(NamedTuple):
    """The best setting of one case in one comparison.

    Attributes:
        runs: All runs of this setting that had a part in choosing; if there are none, those that confirm it.
        good: Those of them that ended, one for each seed.
        fresh: Its runs that confirm it.
        tried: How many settings there were.
        diverged: How many of them diverged for some seed.
        incomplete: How many lack seeds.
        scores: The means of all that were eligible, large if good, by which the choice was made, and of the metric.
        chooses: Whether any of its runs had a part in choosing.
    """

    runs: pd.DataFrame
    good: pd.DataFrame
    fresh: pd.DataFrame
    tried: int
    diverged: int
    incomplete: int
    scores: list[tuple[float, float]]
    chooses: bool


def _chosen(case: pd.DataFrame, settings: Sequence[str], metric: str, chosen_by: str) -> _Chosen:
    # In the order in which they were tried, which decides between equals.
    numbers = case.groupby(list(settings), dropna=False, sort=False).ngroup() if settings else pd.Series(0, case.index)
    # Of arrays, since a table of its own for each of thousands of settings takes seconds.
    setting, seed = numbers.to_numpy(), case["seed"].to_numpy()
    confirms = case["confirms"].astype(bool).to_numpy() if "confirms" in case else np.zeros(len(case), bool)
    # Where fresh seeds alone have so many rounds, they are of the one setting that was chosen before.
    chooses = not confirms.all()
    is_fresh = confirms if chooses else np.zeros(len(case), bool)
    has_ended, has_diverged = case["ended"].to_numpy(bool), case["status"].eq("diverged").to_numpy(bool)
    groups = pd.unique(setting[~is_fresh])
    is_good = has_ended & case[chosen_by].notna().to_numpy() & ~is_fresh
    is_good[is_good] = ~pd.DataFrame({0: setting[is_good], 1: seed[is_good]}).duplicated(keep="last").to_numpy()
    values, shown_values = case[chosen_by].to_numpy(), case[metric].to_numpy()
    good = [np.flatnonzero(is_good & (setting == number)) for number in groups]
    is_lost = has_diverged & ~is_fresh
    lost = [len(set(seed[is_lost & (setting == number)])) for number in groups]
    way = sign(chosen_by)
    tried = [best.Tried(values[rows].tolist(), seeds, way) for rows, seeds in zip(good, lost, strict=True)]
    complete = best.complete(tried)
    place = best.best(tried) or 0
    is_best = setting == groups[place]
    return _Chosen(
        runs=case.loc[is_best & ~is_fresh],
        good=case.iloc[good[place]],
        fresh=case.loc[(has_ended | has_diverged) & is_best & confirms],
        tried=len(groups),
        diverged=sum(one.diverged > 0 for one in tried) if chooses else 0,
        incomplete=sum(not whole and one.diverged == 0 for one, whole in zip(tried, complete, strict=True)),
        scores=[
            (way * one.mean, float(pd.Series(shown_values[rows]).mean()))
            for one, rows, whole in zip(tried, good, complete, strict=True)
            if whole or (not chooses and one.scores)
        ],
        chooses=chooses,
    )


def _described(
    one: _Chosen, keys: Sequence[str], settings: Sequence[str], metric: str, confirmed: bool, budget: int
) -> dict[str, Any]:
    runs, good = one.runs, one.good
    if confirmed:
        runs = one.fresh
        good = runs.loc[runs["ended"] & runs[metric].notna()].drop_duplicates("seed", keep="last")
    first = one.runs.iloc[0]
    scores = [*(score for score, _ in one.scores), *[-math.inf] * one.diverged]
    means = [*(mean for _, mean in one.scores), *[0.0] * one.diverged]
    expected = expected_best(means, budget, scores) if one.scores else math.nan
    return {
        **{key: first[key] for key in keys},
        "case": first["case"],
        "method": first["method"],
        **{key: first[key] for key in settings},
        **mean_interval(good[metric].to_numpy())._asdict(),
        "diverged_seeds": int(runs["status"].eq("diverged").sum()),
        "tried": one.tried,
        "diverged": one.diverged,
        "incomplete": one.incomplete,
        "expected": expected,
        "luck": expected_best(means, len(means), scores) - expected if one.scores else 0.0,
        "run_ids": tuple(good["run_id"]),
        "outcomes": {
            **dict.fromkeys(runs.loc[runs["status"].eq("diverged"), "seed"], math.nan),
            **dict(zip(good["seed"], good[metric], strict=True)),
        },
        "confirmed": confirmed,
        "chosen_mean": float(one.good[metric].mean()) if one.chooses else math.nan,
    }


def protocol(study: Study) -> str:
    """How the numbers of the best settings came about; empty if there was nothing to choose from."""
    if study.spec.protocol is not None:  # a study knows what it has tried, also for runs that are not in this table
        return study.spec.protocol
    runs = study.runs
    return best.protocol(GA, sorted(runs["seed"].unique())) if len(runs) and tuned(study) else ""


def chosen_runs(found: pd.DataFrame, study: Study) -> Study:
    """The runs of the best settings."""
    ids = {run_id for ids in found["run_ids"] for run_id in ids} if len(found) else set()
    return study.of(study.runs.loc[study.runs["run_id"].isin(ids)])


def budget_remarks(found: pd.DataFrame) -> list[str]:
    """Where the choice was not equally free for all, or not complete."""
    remarks: list[str] = []
    if not len(found):
        return remarks
    tried = found.groupby("case", sort=False)["tried"].max()
    if tried.nunique() > 1:
        each = ", ".join(f"{case} {number}" for case, number in tried.items())
        remarks.append(
            f"unequal budgets: settings tried under each condition: {each}; compare the expected best of equal budgets"
        )
    for name, words in (("diverged", "diverged for some seed"), ("incomplete", "lack seeds")):
        number = int(found[name].sum())
        if number:
            remarks.append(f"{number} of {int(found['tried'].sum())} settings {words} and could not be chosen")
    for case, seeds in found.groupby("case", sort=False)["diverged_seeds"].sum().items():
        if seeds:
            remarks.append(f"{case}: {seeds} seed{'s' if seeds > 1 else ''} diverged; means are of the others")
    return remarks


def confirmed_remarks(found: pd.DataFrame) -> list[str]:
    """Whether the numbers are of seeds that had no part in choosing."""
    if not len(found) or not found["confirmed"].any():
        return []
    numbers = sorted(set(found.loc[found["confirmed"], "n"]))
    many = " or ".join(map(str, numbers))
    return [f"the numbers of the best settings are of {many} fresh seeds, which had no part in choosing them"]


def error_points(study: Study, error: str) -> pd.DataFrame:
    """The runs that say something about an error, after their last round.

    AE is about aggregation from the usual start, LF about clients that start at the optimum. Without such
    clients, LF is that of the usual runs.
    """
    runs = study.runs
    if error not in runs:
        return runs.iloc[:0]
    known = runs.loc[runs["ended"] & runs[error].notna() & runs["data.alpha"].notna()]
    start = known["federation.start"].notna() if "federation.start" in known else pd.Series(False, known.index)
    chosen = known.loc[start if error == "LF" and start.any() else ~start]
    return chosen.loc[chosen["federation.rounds"].eq(chosen["federation.rounds"].max())]


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
