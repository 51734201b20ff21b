"""What the numbers say, in sentences: no more than they allow."""

from collections.abc import Mapping, Sequence

import pandas as pd

from analysis import comparisons, tables
from analysis.statistics import MIN_FOR_INTERVAL
from analysis.study import Study
from fl_lightning.metrics.metric import LA


def summary(study: Study) -> list[str]:
    """The findings of a set of runs."""
    if not len(study.runs):
        return ["There are no runs."]
    remarks = [f"{remark[0].upper()}{remark[1:]}." for remark in study.remarks]
    sentences = [_what_there_is(study), *remarks]
    if not study.runs["ended"].any():
        return [*sentences, "No run has ended, so there is nothing to compare yet."]
    last = comparisons.final_stage(study)
    found = [*_comparisons(last), *_best(last), *_arrivals(last), *_traffic(last), *_correlation(study)]
    return [*sentences, *found]


def _what_there_is(study: Study) -> str:
    runs = study.runs
    cases = list(dict.fromkeys(runs["case"]))
    keys, tuned = comparisons.conditions(study), comparisons.tuned(study)
    number = len(list(comparisons.groups(runs, keys)))
    fresh = runs["confirms"].astype(bool) if "confirms" in runs else pd.Series(False, runs.index)
    seeds, confirming = (runs.loc[chosen, "seed"].nunique() for chosen in (~fresh, fresh))
    # A study may use other data at another scale than its name says.
    learnt = runs[["data", "model"]].drop_duplicates().itertuples(index=False)
    problem = " and ".join(f"{data} ({model})" for data, model in learnt)
    text = f"{_count(len(runs), 'run')} of {', '.join(cases)} on {problem}: {_count(seeds, 'seed')}"
    if confirming:
        text += f" to choose by and {confirming} to confirm"
    if keys:
        text += f", {_count(number, 'combination')} of {' and '.join(map(comparisons.symbol, keys))}"
    if tuned:
        text += f"; tuned: {', '.join(map(comparisons.symbol, tuned))}"
    return f"{text}."


def _comparisons(study: Study) -> list[str]:
    table = tables.paired_comparison(study)
    if not len(table):
        return []
    if table["n"].max() <= 1:
        return ["With one seed no difference can be tested."]
    keys = [comparisons.symbol(key) for key in comparisons.conditions(study)]
    sentences = []
    for (case, rival), mine in table.groupby(["case", "against"], sort=False):
        under = mine.loc[mine[keys[0]].ne("all")] if keys else mine
        if len(under) > 1:
            sentences.append(_over_conditions(str(case), str(rival), under, keys))
        else:
            sentences.append(_one_comparison(str(case), str(rival), under.iloc[0]))
    return sentences


def _one_comparison(case: str, rival: str, row: "pd.Series[float]") -> str:
    n, ahead = int(row["n"]), int(row["ahead"])
    if n == 0:
        return f"{case} and {rival} have no seed in common."
    difference, low, high = (row[f"difference (points){end}"] for end in ("", " low", " high"))
    spread = f"95 % interval {low:+.1f} to {high:+.1f}" if n >= MIN_FOR_INTERVAL else f"range {low:+.1f} to {high:+.1f}"
    behind = n - ahead - int(row["ties"])
    if difference * (ahead - behind) <= 0:  # the mean and the number of seeds disagree
        text = f"{case} is ahead of {rival} in {ahead} of {_count(n, 'seed')} and behind in {behind}"
    else:
        side, number = ("ahead of", ahead) if difference > 0 else ("behind", behind)
        text = f"{case} is {side} {rival} in {number} of {_count(n, 'seed')}"
    text += f", mean difference {difference:+.1f} points of GA"
    text += f" ({spread})" if n > 1 else ""
    if row["p"] == row["p"]:
        text += f"; signed-rank test p = {row['p']:.2g}, effect size {row['effect']:+.2f}"
    return f"{text}; {row['remark']}." if row["remark"] else f"{text}."


def _over_conditions(case: str, rival: str, rows: pd.DataFrame, keys: Sequence[str]) -> str:
    """Few words about many comparisons: the table has them all."""
    differences = rows["difference (points)"]
    ahead = int((differences > 0).sum())
    most, least = (rows.iloc[int(place)] for place in (differences.argmax(), differences.argmin()))

    def place(row: "pd.Series[float]") -> str:
        return ", ".join(f"{key} = {comparisons.shown(row[key])}" for key in keys)

    numbers = sorted(set(rows["n"]))
    n = f"n = {numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
    tested = rows["p (Holm)"].dropna() if "p (Holm)" in rows else rows["p"].dropna()
    text = (
        f"By mean GA {case} is ahead of {rival} under {ahead} of {len(rows)} conditions ({n} pairs each), from "
        f"{differences.min():+.1f} points at {place(least)} to {differences.max():+.1f} points at {place(most)}"
    )
    if len(tested):
        return f"{text}; p < 0.05 after Holm's correction under {int((tested < 0.05).sum())} of {len(tested)} tested."
    return f"{text}; too few seeds for a test."


def _best(study: Study) -> list[str]:
    best = comparisons.best_of_grid(study)
    remarks = [*comparisons.budget_remarks(best), *edge_remarks(best, tables.at_edges(best, study))]
    if protocol := comparisons.protocol(study):
        remarks.insert(0, f"the best settings were {protocol}")
    sentences = [f"{remark[0].upper()}{remark[1:]}." for remark in remarks]
    too_good = 100 * (best["chosen_mean"] - best["mean"])[best["confirmed"]].dropna() if len(best) else best
    if len(too_good):
        too_good = too_good.groupby(best["case"], sort=False).mean()
        each = ", ".join(f"{case} {points:+.1f}" for case, points in too_good.items())
        sentences.append(f"Optimism of the seeds that chose against fresh ones, in points of GA: {each}.")
    ranked = best.loc[best["n"] > 0].sort_values("mean", ascending=False)
    if len(list(comparisons.groups(best, comparisons.conditions(study)))) == 1 and len(ranked) > 1:
        each = ", ".join(f"{row['case']} {row['mean']:.1%}".replace("%", " %") for _, row in ranked.iterrows())
        sentences.append(f"Final GA, mean over seeds at the best setting: {each}.")
    return sentences


def edge_remarks(best: pd.DataFrame, found: Sequence[Mapping[str, str]]) -> list[str]:
    """One sentence for every setting that is best at an end, with the cases that it is best for."""
    conditions = best.groupby("case", sort=False).size()
    sentences = []
    for key, side in dict.fromkeys(end for one in found for end in one.items()):
        cases: dict[str, list[str]] = {}
        for (_, row), one in zip(best.iterrows(), found, strict=True):
            if one.get(key) == side:
                cases.setdefault(row["case"], []).append(comparisons.shown(row[key]))
        each = ", ".join(_case(case, values, int(conditions[case])) for case, values in cases.items())
        sentences.append(
            f"the best {comparisons.symbol(key)} is the {side} that was tried for {each}: a better one may lie beyond"
        )
    return sentences


def _case(case: str, values: Sequence[str], conditions: int) -> str:
    """A case with its best values at the end."""
    often = f" under {len(values)} of {conditions} conditions" if conditions > 1 else ""
    return f"{case} ({', '.join(dict.fromkeys(values))}{often})"


def _arrivals(study: Study) -> list[str]:
    if len(list(comparisons.groups(study.runs, comparisons.conditions(study)))) > 1:
        return []
    table = tables.accuracy_and_rounds(study)
    sentences = []
    for threshold in study.thresholds:
        name = f"{threshold:.0%}"
        if not table[f"reached {name}"].any():
            sentences.append(f"No case reaches a GA of {threshold:.0%}.".replace("%", " %"))
            continue
        words = [
            f"{row['case']} in round {row[f'rounds to {name}']:.3g}{_share(int(row[f'reached {name}']), int(row['n']))}"
            if row[f"reached {name}"]
            else f"{row['case']} never"
            for _, row in table.iterrows()
        ]
        sentences.append(f"A GA of {threshold:.0%} is reached by ".replace("%", " %") + ", ".join(words) + ".")
    return sentences


def _traffic(study: Study) -> list[str]:
    table = tables.costs(study)
    if not len(table) or len(list(comparisons.groups(study.runs, comparisons.conditions(study)))) > 1:
        return []
    first, sends = tables.reference_case(study), table.loc[table["MB per round"] > 0].set_index("case")
    sentences = []
    rivals = [case for case in sends.index if case != first and first in sends.index]
    for rival in ["FedAvg"] if "FedAvg" in rivals else rivals[:1]:  # the table has them all
        factor = sends["MB per round"][first] / sends["MB per round"][rival]
        one, two = (sends["GA (%) within common MB"][case] for case in (first, rival))
        if abs(factor - 1) < 0.01:
            continue
        text = f"{first} sends {factor:,.0f}" if factor >= 10 else f"{first} sends {factor:.2g}"
        text += f" times as much per round as {rival}"
        if one == one and two == two:
            common = sends["common MB"].iloc[0]
            traffic = f"{common:,.0f}" if common >= 1000 else f"{common:.3g}"
            text += f"; within the same traffic ({traffic} MB) GA is {one:.1f} % against {two:.1f} %"
        sentences.append(f"{text}.")
    return sentences


def _correlation(study: Study) -> list[str]:
    table = tables.correlations(study)
    if table.empty:  # no run has measured them
        return []
    sentences = []
    keys = [comparisons.symbol(key) for key in comparisons.conditions(comparisons.final_stage(study))]
    # Errors first: where they were measured, they are what the study is about.
    for _, row in table.sort_values("with", key=lambda of: of.eq(LA), kind="stable").iterrows():
        several = (table["with"].eq(row["with"]) & table["case"].eq("all")).any()
        if (several and row["case"] != "all") or row["Spearman ρ"] != row["Spearman ρ"]:
            continue
        if str(row["with"]).startswith("log"):  # ranks do not change
            continue
        known = [key for key in keys if key in row and comparisons.shown(row[key]) != "-"]
        where = f" at {', '.join(f'{key} = {comparisons.shown(row[key])}' for key in known)}" if known else ""
        low, high = row["Spearman ρ low"], row["Spearman ρ high"]
        verdict = "" if low > 0 or high < 0 else ", zero included"
        sure = f"95 % interval {low:.2f} to {high:.2f}{verdict}" if low == low else row["remark"]
        sentences.append(
            f"{row['of']} and {row['with']} have Spearman's ρ = {row['Spearman ρ']:.2f} over {row['n']} runs of "
            f"{row['settings']} settings{where} ({sure})."
        )
    return sentences[:4]


def _share(reached: int, n: int) -> str:
    """Of all seeds, if there are several."""
    return f" ({reached} of {_count(n, 'seed')})" if n > 1 else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
