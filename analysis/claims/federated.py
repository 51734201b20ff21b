"""What the paper says about FOLA and its rivals on MNIST and CIFAR-10."""

import math
import operator
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pandas as pd

from analysis import contests, tables
from analysis.claims.claim import Finding, Mean, Statement, alike, compared, joined, need, unknown, written
from analysis.claims.means import best_means, need_cases, need_only, on_common_seeds, where_words
from analysis.parts import Part
from analysis.statistics import mean_interval

ENVIRONMENT = ["data.alpha", "data.clients"]
# Dirichlet(1) makes all mixtures of classes equally likely; below it clients lack classes.
LARGE_ALPHA = 1.0
# A direction is there if so many steps follow it.
MOSTLY = 0.8


def first_round(part: Part) -> Finding:
    """Best of grid in round 1: FOLA against FedAvg for every alpha and N."""
    need_cases(part.runs, "FOLA", "FedAvg")
    need_only(part.runs, ENVIRONMENT)
    alphas = sorted(part.runs["data.alpha"].dropna().unique())
    need(
        len(alphas) and alphas[0] < LARGE_ALPHA <= alphas[-1],
        f"the rule needs a small and a large α, below {LARGE_ALPHA:g} and not below; there is only "
        f"α = {', '.join(map(contests.shown, alphas)) or '-'}",
    )
    means = best_means(contests.best_of_grid(part.runs, keys=ENVIRONMENT), ENVIRONMENT)
    pairs: dict[float, list[tuple[Mean, Mean]]] = {}
    rows = []
    for alpha, clients in sorted({place for place, _ in means}):
        fola, fedavg = (means.get(((alpha, clients), case), Mean()) for case in ("FOLA", "FedAvg"))
        pairs.setdefault(alpha, []).append((fola, fedavg))
        row = {"α": alpha, "N": clients, "FedAvg GA (%)": fedavg.value, "FOLA GA (%)": fola.value}
        rows.append({**row, "difference (points)": fola.value - fedavg.value, "n": min(fola.ended, fedavg.ended)})
    small = [compared("", fola, fedavg, operator.gt) for fola, fedavg in pairs[alphas[0]]]
    ahead = sum(bool(one.true) for one in small)
    text = f"at α = {alphas[0]:g} FOLA is ahead for {ahead} of {len(small)} numbers of clients"
    return Finding(
        pd.DataFrame(rows),
        [
            joined(text, small),
            alike(f"at α = {alphas[-1]:g} the two are alike: {{gap}} apart on average", pairs[alphas[-1]]),
        ],
    )


def environment(part: Part) -> Finding:
    """Best of grid in round 1: GA rises with alpha and falls with N."""
    need_only(part.runs, ENVIRONMENT)
    best = contests.best_of_grid(part.runs, keys=ENVIRONMENT)
    best = best.loc[best["n"].gt(0) & best["diverged_seeds"].eq(0)]
    need(len(best), "under no condition has a setting ended with all its seeds")
    grid = 100 * best.pivot_table(index=["case", "data.clients"], columns="data.alpha", values="mean")
    by_alpha = [b > a for row in grid.to_numpy() for a, b in pairwise(row) if a == a and b == b]
    over_clients = [grid.loc[case].to_numpy().T for case in grid.index.get_level_values("case").unique()]
    by_clients = [b < a for rows in over_clients for row in rows for a, b in pairwise(row) if a == a and b == b]
    seeds = int(best["n"].min())
    shown = grid.rename(columns=lambda alpha: f"GA (%), α = {alpha:g}").reset_index()
    return Finding(
        shown.rename(columns={"data.clients": "N"}),
        [
            Statement(f"{what} in {sum(steps)} of {len(steps)} steps", sum(steps) >= MOSTLY * len(steps), seeds)
            if steps
            else unknown(what, f"there is one {symbol} only", seeds)
            for what, symbol, steps in (("GA rises with α", "α", by_alpha), ("GA falls as N grows", "N", by_clients))
        ],
    )


def convergence(part: Part) -> Finding:
    """FOLA reaches thresholds before FedAvg, and ends higher than all others."""
    need_cases(part.runs, "FOLA", "FedAvg")
    need(part.lasts, "one round shows no convergence")
    runs = contests.final_stage(part.runs)  # shorter runs, by which settings were chosen, show nothing else
    table = tables.accuracy_and_rounds(runs, part.rounds, part.thresholds)
    keys = contests.conditions(runs)
    with_outcomes = table.assign(outcomes=list(contests.best_of_grid(runs)["outcomes"]))  # the same rows
    others = set(runs.loc[runs["method"].ne("fola"), "case"])
    held: list[Statement] = []
    for condition in contests.groups(with_outcomes, list(map(contests.symbol, keys))):
        rows = {str(row["case"]): row for _, row in condition.iterrows()}
        place = where_words({key: condition[contests.symbol(key)].iloc[0] for key in keys})
        ends = {case: Mean(row["GA (%)"], row["n"], row["diverged seeds"]) for case, row in rows.items()}
        fola, fedavg = (ends.get(case, Mean()) for case in ("FOLA", "FedAvg"))
        for level in (f"{threshold:.0%}" for threshold in part.thresholds):
            arrivals = [_arrival(rows.get(case), level) for case in ("FOLA", "FedAvg")]
            if any(arrivals):
                sooner = _order(rows.get("FOLA"), level) > _order(rows.get("FedAvg"), level)
                words = [words or "never" for words in arrivals]
                text = f"{place}{level} GA by FOLA {words[0]}, by FedAvg {words[1]}"
                held.append(compared(text, fola, fedavg, lambda *_, sooner=sooner: sooner))
        own = rows["FOLA"]["outcomes"] if "FOLA" in rows else {}
        pairs = {case: on_common_seeds(own, rows[case]["outcomes"]) for case in rows if case in others}
        rivals = {case: pair for case, pair in pairs.items() if pair[1].seeds}
        held.append(_against_the_best(place, rivals, fola.seeds))
    return Finding(table, held)


def _against_the_best(place: str, rivals: Mapping[str, tuple[Mean, Mean]], seeds: int) -> Statement:
    """FOLA's final GA against that of the rival that is hardest to beat.

    Args:
        place: Where, in words.
        rivals: FOLA and each rival on the seeds that both have.
        seeds: Of FOLA.
    """
    if not rivals:
        return unknown(f"{place}final GA", "no other method has ended on the same seeds")
    found = []
    for rival, (fola, other) in rivals.items():
        lead = fola.value - other.value
        few = f" on {fola.seeds} common {'seeds' if fola.seeds > 1 else 'seed'}" if fola.seeds < seeds else ""
        text = f"{place}final GA {written(lead, '+.1f')} points against the best other method ({rival}){few}"
        found.append((compared(text, fola, other, operator.gt), math.inf if math.isnan(lead) else lead))
    enough = [one for one in found if one[0].seeds > 1] or found  # one seed tells nothing where others have more
    return min(enough, key=lambda one: ((False, None, True).index(one[0].true), one[1]))[0]


def every_alpha(part: Part) -> Finding:
    """FOLA against the best other method for every alpha, at the best of equally many settings."""
    keys = ["data.alpha"]
    need_cases(part.runs, "FOLA")
    need_only(part.runs, [*keys, "federation.rounds"])
    rounds = part.runs["federation.rounds"]
    first_stage = part.runs.loc[rounds.eq(rounds.groupby(part.runs["data.alpha"]).transform("min"))]
    tried = contests.best_of_grid(first_stage, keys=keys)
    # What a case owes to having tried more settings than others, where all of them were run.
    luck = {(row["data.alpha"], row["case"]): 100 * (row["mean"] - row["expected"]) for _, row in tried.iterrows()}
    means = best_means(contests.best_of_grid(contests.final_stage(part.runs), keys=keys), keys)
    rows, held = [], []
    for alpha in sorted({place[0] for place, _ in means}):
        even = {}
        for case in dict.fromkeys(part.runs["case"]):
            final = means.get(((alpha,), case), Mean())
            even[case] = final._replace(value=final.value - luck.get((alpha, case), 0.0))
            row = {"α": alpha, "case": case, "GA (%)": final.value, "at equal budgets (%)": even[case].value}
            rows.append({**row, "settings tried": _tried(tried, alpha, case), "n": final.ended})
        others = {case: mean for case, mean in even.items() if case != "FOLA" and mean.ended}
        if not others:
            held.append(unknown(f"α = {alpha:g}", "no other method has ended"))
            continue
        best = max(others, key=lambda case: (not others[case].diverged, others[case].value))
        difference = written(even["FOLA"].value - others[best].value, "+.1f")
        text = f"α = {alpha:g}: {difference} points over {best} at equal budgets"
        held.append(compared(text, even["FOLA"], others[best], operator.gt))
    return Finding(pd.DataFrame(rows), held)


def ga_and_la(part: Part) -> Finding:
    """LA and GA over all settings under equal conditions."""
    table = tables.correlations(part.runs)
    need(len(table), "no run has ended")
    table = table.loc[table["with"].eq("LA")]
    single = part.runs.loc[part.runs["ended"], "case"].nunique() == 1
    keys = [symbol for key in contests.conditions(part.runs) if (symbol := contests.symbol(key)) in table]
    held = []
    seeds = part.runs.loc[part.runs["ended"], "seed"].nunique()
    for _, row in table.loc[table["case"].eq("all") | single].iterrows():
        place = "".join(f"{key} = {contests.shown(row[key])}: " for key in keys)
        low, high, rho = row["Spearman ρ low"], row["Spearman ρ high"], row["Spearman ρ"]
        text = f"{place}Spearman's ρ over {row['n']} runs of {row['settings']} settings is positive"
        if low == low:
            held.append(Statement(f"{text}: {rho:.2f}, interval {low:.2f} to {high:.2f}", rho > 0 and low > 0, seeds))
        else:
            held.append(unknown(text, row["remark"], seeds))
    return Finding(table.drop(columns=["remark"]), held)


def prior_and_product(part: Part) -> Finding:
    """Product and prior together against either alone; the strength is chosen on other seeds than it is judged on."""
    runs = part.runs.loc[part.runs["ended"] | part.runs["status"].eq("diverged")]
    need_cases(runs, "product", "average")
    need_only(runs, ["method.strength"])
    rows = []
    for (case, strength), mine in runs.groupby(["case", "method.strength"], sort=False):
        line: dict[str, Any] = {"aggregation": case, "λ": strength, "n": int(mine["ended"].sum())}
        for metric in ("GA", "LA"):
            line |= tables.columns(f"{metric} (%)", mean_interval(100 * mine.loc[mine["ended"], metric].to_numpy()))
        rows.append({**line, "diverged seeds": int(mine["status"].eq("diverged").sum())})
    with_prior, without = runs.loc[runs["method.strength"] > 0], runs.loc[runs["method.strength"].eq(0)]
    both, prior = (_tuned_elsewhere(with_prior.loc[with_prior["case"].eq(case)]) for case in ("product", "average"))
    product = _tuned_elsewhere(without.loc[without["case"].eq("product")])
    text = f"product with prior {both:.1f} % GA"
    return Finding(
        pd.DataFrame(rows),
        [
            compared(f"{text}, product alone {product:.1f} %", both, product, operator.gt),
            compared(f"{text}, prior alone {prior:.1f} %", both, prior, operator.gt),
        ],
    )


def _tuned_elsewhere(runs: pd.DataFrame) -> Mean:
    """GA of a case in percent, for every seed at the strength that is best for the other seeds.

    So the best of several strengths is not flattered by having been chosen on what it is judged by, and can be compared
    with a case that has nothing to choose. A strength that diverged for some seed, or lacks one, is not chosen.
    """
    table = 100 * runs.pivot_table(index="seed", columns="method.strength", values="GA", dropna=False)
    died = runs.loc[~runs["ended"]]
    whole = table.drop(columns=[name for name in table if name in set(died["method.strength"])]).dropna(axis=1)
    if whole.empty:  # the strength with the most seeds stands for the case
        counts = runs.groupby("method.strength")["ended"].sum()
        mine = runs.loc[runs["method.strength"].eq(float(counts.index[int(counts.argmax())]))] if len(counts) else runs
        ended = mine.loc[mine["ended"]]
        return Mean(100 * ended["GA"].mean(), len(ended), len(mine) - len(ended))
    if whole.shape[1] == 1:
        return Mean(float(whole.iloc[:, 0].mean()), len(whole))
    need(len(whole) > 1, "with one seed, a strength cannot be chosen on other seeds than it is judged on")
    judged = [whole.loc[seed, whole.drop(index=seed).mean().idxmax()] for seed in whole.index]
    return Mean(float(sum(judged) / len(judged)), len(judged))


def _tried(tried: pd.DataFrame, alpha: float, case: str) -> int:
    return int(tried.loc[tried["data.alpha"].eq(alpha) & tried["case"].eq(case), "tried"].sum())


def _order(row: "pd.Series[Any] | None", level: str) -> tuple[float, float]:
    """More seeds that arrive come first, then earlier arrival."""
    if row is None or not row[f"reached {level}"]:
        return 0.0, 0.0
    return float(row[f"reached {level}"]), -float(row[f"rounds to {level}"])


def _arrival(row: "pd.Series[Any] | None", level: str) -> str:
    """In which round, and for how many seeds if not for all; empty if never."""
    if row is None or not row[f"reached {level}"]:
        return ""
    reached, n = int(row[f"reached {level}"]), int(row["n"])
    share = f" ({reached} of {n} seeds)" if reached < n else ""
    return f"in round {row[f'rounds to {level}']:.3g}{share}"
