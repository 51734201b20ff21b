"""What the paper says about FOLA and its rivals on MNIST and CIFAR-10."""

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

import pandas as pd

from analysis import columns, comparisons, tables
from analysis.claims.claim import (
    A_FEW,
    Finding,
    Outcomes,
    Statement,
    against_the_best,
    alike,
    answered,
    compared,
    need,
    unknown,
)
from analysis.claims.means import (
    best_outcomes,
    falls,
    in_percent,
    less_seeds,
    need_cases,
    need_only,
    over_seeds,
    where_words,
)
from analysis.statistics import Interval, mean_interval
from analysis.study import Study
from fl_lightning.metrics.metric import GA, LA

ENVIRONMENT = ["data.alpha", "data.clients"]
# Dirichlet(1) makes all mixtures of classes equally likely; below it clients lack classes.
LARGE_ALPHA = 1.0
# A direction is there if so many steps follow it.
MOSTLY = 0.8
OFFLINE = "offline"


def first_round(part: Study) -> Finding:
    """Best of grid in round 1: FOLA against FedAvg for every alpha and N."""
    need_cases(part.runs, "FOLA", "FedAvg")
    need_only(part, ENVIRONMENT)
    alphas = sorted(part.runs["data.alpha"].dropna().unique())
    need(
        len(alphas) and alphas[0] < LARGE_ALPHA <= alphas[-1],
        f"the rule needs a small and a large α, below {LARGE_ALPHA:g} and not below; there is only "
        f"α = {', '.join(map(comparisons.shown, alphas)) or '-'}",
    )
    best = best_outcomes(comparisons.best_of_grid(part, keys=ENVIRONMENT), ENVIRONMENT)
    rows, held = [], []
    for alpha, clients in sorted({place for place, _ in best}):
        fola, fedavg = (best.get(((alpha, clients), case), Outcomes()) for case in ("FOLA", "FedAvg"))
        row = {"α": alpha, "N": clients, "FedAvg GA (%)": fedavg.mean, "FOLA GA (%)": fola.mean}
        n = min(len(fola.good), len(fedavg.good))
        rows.append({**row, "difference (points)": fola.mean - fedavg.mean, "n": n})
        if alpha == alphas[0]:
            held.append(compared(f"α = {alpha:g}, N = {clients:g}: FOLA is ahead", fola, fedavg))
        if alpha == alphas[-1]:
            held.append(alike(f"α = {alpha:g}, N = {clients:g}: the two are alike", fola, fedavg))
    return Finding(pd.DataFrame(rows), held)


def environment(part: Study) -> Finding:
    """Best of grid in round 1: GA rises with alpha and falls with N."""
    need_only(part, ENVIRONMENT)
    best = comparisons.best_of_grid(part, keys=ENVIRONMENT)
    best = best.loc[best["n"].gt(0) & best["diverged_seeds"].eq(0)]
    need(len(best), "no setting has finished on all its seeds")
    seeds = set.intersection(*(set(outcomes) for outcomes in best["outcomes"]))
    of_means, of_seeds = (
        _steps(best, best["mean"]),
        {seed: _steps(best, _of_seed(best, seed)) for seed in sorted(seeds)},
    )
    held = []
    for place, (what, symbol) in enumerate((("GA rises with α", "α"), ("GA falls as N grows", "N"))):
        steps = of_means[place]
        if not steps:
            held.append(unknown(what, f"there is one {symbol} only"))
            continue
        right = sum(step > 0 for step in steps)
        mine = Outcomes({seed: fmean(found[place]) for seed, found in of_seeds.items()})
        part_held = compared(f"{what} in {right} of {len(steps)} steps, by points a step", mine, 0.0)
        held.append(part_held if right >= MOSTLY * len(steps) else part_held._replace(answer="no"))
    grid = 100 * best.pivot_table(index=["case", "data.clients"], columns="data.alpha", values="mean")
    shown = grid.rename(columns=lambda alpha: f"GA (%), α = {alpha:g}").reset_index()
    return Finding(shown.rename(columns={"data.clients": "N"}), held)


def _of_seed(best: pd.DataFrame, seed: int) -> "pd.Series[float]":
    return pd.Series([outcomes[seed] for outcomes in best["outcomes"]], best.index)


def _steps(best: pd.DataFrame, values: "pd.Series[float]") -> tuple[list[float], list[float]]:
    """How far GA rises in each step to the next larger alpha, and falls in each to the next larger N, in points."""
    table = best.assign(GA=100 * values).pivot_table(index=["case", "data.clients"], columns="data.alpha", values=GA)
    by_alpha = [b - a for row in table.to_numpy() for a, b in pairwise(row) if a == a and b == b]
    over_clients = [mine.to_numpy().T for _, mine in table.groupby(level="case")]
    by_clients = [a - b for rows in over_clients for row in rows for a, b in pairwise(row) if a == a and b == b]
    return by_alpha, by_clients


def convergence(part: Study) -> Finding:
    """FOLA reaches thresholds before FedAvg, and ends higher than all others."""
    need_cases(part.runs, "FOLA", "FedAvg")
    need(part.lasts, "one round shows no convergence")
    last = comparisons.final_stage(part)  # shorter runs, by which settings were chosen, show nothing else
    table = tables.accuracy_and_rounds(last)
    keys = comparisons.conditions(last)
    best = comparisons.best_of_grid(last)
    others = set(last.runs.loc[~last.runs["method"].isin(columns.FOLA), "case"])
    held: list[Statement] = []
    for condition in comparisons.groups(best, keys):
        rows = {str(row["case"]): row for _, row in condition.iterrows()}
        place = where_words({key: condition[key].iloc[0] for key in keys})
        for threshold in part.thresholds:
            arrivals = {case: _arrivals(rows.get(case), part.rounds, threshold) for case in ("FOLA", "FedAvg")}
            reached = {
                case: sum(math.isfinite(number) for number in found.values()) for case, found in arrivals.items()
            }
            if any(reached.values()):
                words = [f"{case} (reached by {reached[case]} of {len(arrivals[case])} seeds)" for case in arrivals]
                text = f"{place}{threshold:.0%} GA sooner by {' than by '.join(words)}"
                fola, fedavg = (_censored(arrivals[case], part.rounds) for case in arrivals)
                held.append(compared(text, fola, fedavg, less=True))
        ends = {case: in_percent(row["outcomes"]) for case, row in rows.items()}
        rivals = {case: found for case, found in ends.items() if case in others}
        held.append(against_the_best(f"{place}final GA", ends.get("FOLA", Outcomes()), rivals))
    return Finding(table, held)


def _arrivals(row: "pd.Series[Any] | None", rounds: pd.DataFrame, threshold: float) -> dict[int, float]:
    """By seed, the first round with so much GA; infinite if there is none, NaN if the seed diverged."""
    if row is None:
        return {}
    mine = rounds.loc[rounds["run_id"].isin(row["run_ids"])]
    first = mine["round"].where(mine[GA].ge(threshold), math.inf).groupby(mine["seed"]).min()
    return {
        seed: math.nan if value != value else float(first.get(seed, math.inf))
        for seed, value in row["outcomes"].items()
    }


def _censored(arrivals: Mapping[int, float], rounds: pd.DataFrame) -> Outcomes:
    """Never counts as the round after the last."""
    after = float(rounds["round"].max()) + 1
    return Outcomes({seed: after if math.isinf(number) else number for seed, number in arrivals.items()})


def every_alpha(part: Study) -> Finding:
    """FOLA against the best other method for every alpha, at the best of equally many settings."""
    keys = ["data.alpha"]
    need_cases(part.runs, "FOLA")
    need_only(part, [*keys, "federation.rounds"])
    rounds = part.runs["federation.rounds"]
    first_stage = part.runs.loc[rounds.eq(rounds.groupby(part.runs["data.alpha"]).transform("min"))]
    tried = comparisons.best_of_grid(part.of(first_stage), keys=keys).set_index(["data.alpha", "case"])
    best = best_outcomes(comparisons.best_of_grid(comparisons.final_stage(part), keys=keys), keys)
    rows, held = [], []
    for alpha in sorted({place[0] for place, _ in best}):
        even = {}
        for case in dict.fromkeys(part.runs["case"]):
            final = best.get(((alpha,), case), Outcomes())
            # What a case gains by trying more settings than others, where all of them were run.
            luck = 100 * tried["luck"].get((alpha, case), 0.0)
            even[case] = final.minus(luck)
            row = {"α": alpha, "case": case, "GA (%)": final.mean, "at equal budgets (%)": even[case].mean}
            rows.append({**row, "settings tried": tried["tried"].get((alpha, case), 0), "n": len(final.good)})
        fola = even.pop("FOLA")
        held.append(against_the_best(f"α = {alpha:g}: GA at equal budgets", fola, even))
    return Finding(pd.DataFrame(rows), held)


def ga_and_la(part: Study) -> Finding:
    """LA and GA over all settings under equal conditions."""
    table = tables.correlations(part.of(less_seeds(part.runs, (GA, LA), comparisons.conditions(part))))
    need(len(table), "no run has ended")
    table = table.loc[table["with"].eq(LA)]
    single = part.runs.loc[part.runs["ended"], "case"].nunique() == 1
    keys = [symbol for key in comparisons.conditions(part) if (symbol := comparisons.symbol(key)) in table]
    held = []
    seeds = part.runs.loc[part.runs["ended"], "seed"].nunique()
    for _, row in table.loc[table["case"].eq("all") | single].iterrows():
        place = "".join(f"{key} = {comparisons.shown(row[key])}: " for key in keys)
        low, high, rho = row["Spearman ρ low"], row["Spearman ρ high"], row["Spearman ρ"]
        text = f"{place}Spearman's ρ over {row['n']} runs of {row['settings']} settings is positive"
        if low == low:
            words = f"{text}: {rho:.2f}, interval over settings {low:.2f} to {high:.2f}"
            held.append(answered(words, Interval(rho, low, high, row["n"]), seeds))
        else:
            held.append(unknown(text, row["remark"], seeds))
    return Finding(table.drop(columns=["remark"]), held)


def prior_and_product(part: Study) -> Finding:
    """Product and prior together against either alone; the strength is chosen on other seeds."""
    runs = part.runs.loc[part.runs["ended"] | part.runs["status"].eq("diverged")]
    need_cases(runs, "product", "average")
    need_only(part.of(runs), ["method.strength"])
    rows = []
    for (case, strength), mine in runs.groupby(["case", "method.strength"], sort=False):
        line: dict[str, Any] = {"aggregation": case, "λ": strength, "n": int(mine["ended"].sum())}
        for metric in (GA, LA):
            line |= tables.columns(f"{metric} (%)", mean_interval(100 * mine.loc[mine["ended"], metric].to_numpy()))
        rows.append({**line, "diverged seeds": int(mine["status"].eq("diverged").sum())})
    with_prior, without = runs.loc[runs["method.strength"] > 0], runs.loc[runs["method.strength"].eq(0)]
    both, prior = (_tuned_elsewhere(with_prior.loc[with_prior["case"].eq(case)]) for case in ("product", "average"))
    product = _tuned_elsewhere(without.loc[without["case"].eq("product")])
    text = f"product with prior {both:.1f} % GA"
    return Finding(
        pd.DataFrame(rows),
        [
            compared(f"{text}, product alone {product:.1f} %", both, product),
            compared(f"{text}, prior alone {prior:.1f} %", both, prior),
        ],
    )


def _tuned_elsewhere(runs: pd.DataFrame) -> Outcomes:
    """GA of a case in percent, for every seed at the lambda that is best for the other seeds.

    So the best of several strengths is not flattered by its choice, and can be compared with a case that has nothing to
    choose. A lambda that diverged for some seed, or lacks one, is not chosen.
    """
    table = 100 * runs.pivot_table(index="seed", columns="method.strength", values=GA, dropna=False)
    died = runs.loc[~runs["ended"]]
    whole = table.drop(columns=[name for name in table if name in set(died["method.strength"])]).dropna(axis=1)
    if whole.empty:  # the lambda with the most seeds stands for the case
        counts = runs.groupby("method.strength")["ended"].sum()
        mine = runs.loc[runs["method.strength"].eq(float(counts.index[int(counts.argmax())]))] if len(counts) else runs
        return in_percent(dict(zip(mine["seed"], mine[GA].where(mine["ended"]), strict=True)))
    if whole.shape[1] == 1:
        return Outcomes(dict(zip(whole.index, whole.iloc[:, 0], strict=True)))
    need(len(whole) > 1, "with one seed, no other seed is left to choose a strength on")
    return Outcomes({seed: whole.loc[seed, whole.drop(index=seed).mean().idxmax()] for seed in whole.index})


def steadiness(part: Study) -> Finding:
    """How far GA falls from round to round after the first few: online and offline."""
    need_late_rounds(part)
    runs = part.runs.assign(
        falls=part.runs["run_id"].map(falls(part.rounds)),
        late_falls=part.runs["run_id"].map(falls(part.rounds, A_FEW)),
    )
    keys = comparisons.conditions(part.of(runs))
    rows, held = [], []
    for condition in comparisons.groups(runs, keys):
        where = {key: condition[key].iloc[0] for key in keys}
        for case, mine in condition.groupby("case", sort=False):
            ended = mine.loc[mine["ended"]]
            rows.append(
                {
                    **{comparisons.symbol(key): value for key, value in where.items()},
                    "case": case,
                    **tables.columns("sum of drops in GA (points)", mean_interval(ended["falls"])),
                    **tables.columns(f"after round {A_FEW} (points)", mean_interval(ended["late_falls"])),
                    **tables.columns("final GA (%)", mean_interval(100 * ended[GA])),
                    "n": len(ended),
                    "diverged seeds": int(mine["status"].eq("diverged").sum()),
                }
            )
        late = over_seeds(condition, condition.set_index("run_id")["late_falls"])
        # FOLA online and offline, whatever a study calls them.
        offline = next((found for case, found in late.items() if OFFLINE in case), Outcomes())
        online_cases = [case for case in late if case.startswith("FOLA") and OFFLINE not in case]
        online = late[online_cases[0]] if online_cases else Outcomes()
        text = f"{where_words(where)}after round {A_FEW} drops in GA add up to {online:.1f} points online, "
        held.append(compared(f"{text}{offline:.1f} offline", online, offline, less=True))
    return Finding(pd.DataFrame(rows), held)


def need_late_rounds(part: Study) -> None:
    """A curve can only fall after the first few rounds if it goes on after them."""
    last = int(part.rounds["round"].max()) if len(part.rounds) else 0
    need(last > A_FEW, f"the rule looks at rounds after round {A_FEW}, and round {last} is the last")


# By the key of the claim.
RULES = {
    "first_round": first_round,
    "environment": environment,
    "convergence_mnist": convergence,
    "convergence_cifar": convergence,
    "every_alpha": every_alpha,
    "ga_and_la": ga_and_la,
    "online_mnist": steadiness,
    "online_cifar": steadiness,
    "prior_and_product": prior_and_product,
}
