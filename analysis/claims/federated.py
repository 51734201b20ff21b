"""What the paper says about FOLA and its rivals on MNIST and CIFAR-10."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd

from analysis import contests, tables
from analysis.claims.claim import A_FEW, SAME, Finding, falls
from analysis.parts import Part
from analysis.statistics import mean_interval

OFFLINE = "offline"
ENVIRONMENT = ["data.alpha", "data.clients"]


def first_round(part: Part) -> Finding:
    """Best of grid in round 1: FOLA against FedAvg for every alpha and N."""
    table = tables.paired_comparison(part.runs, "FOLA", "FedAvg")
    for symbol, key in (("α", "data.alpha"), ("N", "data.clients")):
        if symbol not in table:  # the same for all runs
            table[symbol] = part.runs[key].iloc[0]
    best = contests.best_of_grid(part.runs, keys=ENVIRONMENT).pivot_table(
        index=ENVIRONMENT, columns="case", values="mean"
    )
    each = table.loc[table["α"].ne("all")].set_index(["α", "N"]).sort_index()
    shown = pd.DataFrame(
        {
            "FedAvg GA (%)": 100 * best["FedAvg"],
            "FOLA GA (%)": 100 * best["FOLA"],
            "difference (points)": each["difference (points)"].astype(float),
            "seeds ahead": each["ahead"].astype(int),
            "n": each["n"].astype(int),
        }
    )
    shown.index.names = ["α", "N"]
    alphas = sorted(set(each.index.get_level_values("α")))
    low = each.loc[alphas[0]]
    ahead = int((low["difference (points)"] > 0).sum())
    gaps = [float(each.loc[alpha]["difference (points)"].mean()) for alpha in (alphas[0], alphas[-1])]
    return Finding(
        shown.reset_index(),
        [
            (
                f"at α = {alphas[0]:g} FOLA is ahead for {ahead} of {len(low)} numbers of clients, on average by "
                f"{gaps[0]:+.1f} points",
                ahead == len(low),
            ),
            (
                f"at α = {alphas[-1]:g} the two are alike: {gaps[1]:+.1f} points on average",
                abs(gaps[1]) < SAME,
            ),
        ],
    )


def environment(part: Part) -> Finding:
    """Best of grid in round 1: GA rises with alpha and falls with N."""
    best = contests.best_of_grid(part.runs, keys=ENVIRONMENT)
    grid = 100 * best.pivot_table(index=["case", "data.clients"], columns="data.alpha", values="mean")
    by_alpha = [b > a for row in grid.to_numpy() for a, b in pairwise(row)]
    over_clients = [grid.loc[case].to_numpy().T for case in grid.index.get_level_values("case").unique()]
    by_clients = [b < a for rows in over_clients for row in rows for a, b in pairwise(row)]
    shown = grid.rename(columns=lambda alpha: f"GA (%), α = {alpha:g}").reset_index()
    return Finding(
        shown.rename(columns={"data.clients": "N"}),
        [
            (f"GA {what} in {sum(steps)} of {len(steps)} steps", _mostly(steps))
            for what, steps in (("rises with α", by_alpha), ("falls as N grows", by_clients))
            if steps
        ],
    )


def convergence(part: Part) -> Finding:
    """FOLA reaches thresholds before FedAvg, and ends higher."""
    table = tables.accuracy_and_rounds(part.runs, part.rounds, part.thresholds)
    keys = [contests.symbol(key) for key in contests.conditions(part.runs)]
    held = []
    for condition in contests.groups(table, keys):
        fola, fedavg = (condition.loc[condition["case"].eq(case)].iloc[0] for case in ("FOLA", "FedAvg"))
        where = "".join(f"{key} = {contests.shown(fola[key])}: " for key in keys)
        for threshold in part.thresholds:
            level, reached = f"{threshold:.0%}", f"reached {threshold:.0%}"
            sooner = (fola[reached], -fola[f"rounds to {level}"]) > (fedavg[reached], -fedavg[f"rounds to {level}"])
            rounds = [_arrival(row, level) for row in (fola, fedavg)]
            if fola[reached] or fedavg[reached]:
                held.append((f"{where}{level} GA by FOLA {rounds[0]}, by FedAvg {rounds[1]}", bool(sooner)))
        others = condition.loc[~condition["case"].str.startswith("FOLA")]
        best = others.sort_values("GA (%)").iloc[-1]
        difference = fola["GA (%)"] - best["GA (%)"]
        held.append(
            (f"{where}final GA {difference:+.1f} points against the best other method ({best['case']})", difference > 0)
        )
    return Finding(table, held)


def every_alpha(part: Part) -> Finding:
    """FOLA against the best other method for every alpha, at the best settings."""
    runs = contests.final_stage(part.runs)
    best = contests.best_of_grid(runs)
    table = 100 * best.pivot_table(index="case", columns="data.alpha", values="mean", sort=False)
    held = []
    for alpha in table:
        others = table[alpha].drop("FOLA")
        difference = table[alpha]["FOLA"] - others.max()
        held.append((f"α = {alpha:g}: {difference:+.1f} points over {others.idxmax()}", bool(difference > 0)))
    n = best.groupby("case", sort=False)["n"].max()
    shown = table.rename(columns=lambda alpha: f"GA (%), α = {alpha:g}").assign(n=n)
    return Finding(shown.reset_index(), held)


def ga_and_la(part: Part) -> Finding:
    """LA and GA over all settings under equal conditions."""
    table = tables.correlations(part.runs)
    table = table.loc[table["with"].eq("LA")]
    row = table.loc[table["case"].eq("all")].iloc[0]
    low, high = row["Spearman ρ low"], row["Spearman ρ high"]
    text = f"Spearman's ρ = {row['Spearman ρ']:.2f} over {row['n']} runs, interval {low:.2f} to {high:.2f}"
    return Finding(table.drop(columns=["remark"]), [(f"{text}: positive", row["Spearman ρ"] > 0 and low > 0)])


def steadiness(part: Part) -> Finding:
    """How far GA falls from round to round after the first few: online and offline."""
    runs = part.runs.assign(
        falls=part.runs["run_id"].map(falls(part.rounds)),
        late_falls=part.runs["run_id"].map(falls(part.rounds, A_FEW)),
    )
    keys = contests.conditions(runs)
    rows, held = [], []
    for condition in contests.groups(runs, keys):
        where = {contests.symbol(key): condition[key].iloc[0] for key in keys}
        late = {}
        for case, mine in condition.groupby("case", sort=False):
            ended = mine.loc[mine["ended"]]
            late[str(case)] = float(ended["late_falls"].mean())
            rows.append(
                {
                    **where,
                    "case": case,
                    **tables.columns("falls of GA (points)", mean_interval(ended["falls"])),
                    **tables.columns(f"after round {A_FEW} (points)", mean_interval(ended["late_falls"])),
                    **tables.columns("final GA (%)", mean_interval(100 * ended["GA"])),
                    "n": len(ended),
                    "diverged seeds": int(mine["status"].eq("diverged").sum()),
                }
            )
        online, offline = _pair(late)
        place = "".join(f"{key} = {contests.shown(value)}: " for key, value in where.items())
        text = f"{place}after round {A_FEW} falls of GA add up to {online:.1f} points online, {offline:.1f} offline"
        held.append((text, online < offline))
    return Finding(pd.DataFrame(rows), held if part.rounds["round"].max() > A_FEW else [])


def prior_and_product(part: Part) -> Finding:
    """Product and prior together against either alone."""
    runs = part.runs.loc[part.runs["ended"]]
    rows = []
    for (case, strength), mine in runs.groupby(["case", "method.strength"], sort=False):
        line: dict[str, Any] = {"aggregation": case, "λ": strength, "n": len(mine)}
        for metric in ("GA", "LA"):
            line |= tables.columns(f"{metric} (%)", mean_interval(100 * mine[metric].to_numpy()))
        rows.append(line)
    table = pd.DataFrame(rows)
    with_prior = table.loc[table["λ"] > 0].sort_values("GA (%)").groupby("aggregation").tail(1).set_index("aggregation")
    both, prior = with_prior.loc["product"], with_prior.loc["average"]
    product = table.loc[table["λ"].eq(0)].set_index("aggregation").loc["product"]
    text = f"product with prior (λ = {both['λ']:g}) {both['GA (%)']:.1f} % GA"
    return Finding(
        table,
        [
            (f"{text}, product alone {product['GA (%)']:.1f} %", bool(both["GA (%)"] > product["GA (%)"])),
            (
                f"{text}, prior alone (λ = {prior['λ']:g}) {prior['GA (%)']:.1f} %",
                bool(both["GA (%)"] > prior["GA (%)"]),
            ),
        ],
    )


def _arrival(row: "pd.Series[float]", level: str) -> str:
    reached, n = int(row[f"reached {level}"]), int(row["n"])
    if not reached:
        return "never"
    share = f" ({reached} of {n} seeds)" if reached < n else ""
    return f"in round {row[f'rounds to {level}']:.3g}{share}"


def _pair(means: Mapping[str, float]) -> tuple[float, float]:
    """FOLA online and offline, whatever a study calls them."""
    offline = [value for case, value in means.items() if OFFLINE in case]
    online = [value for case, value in means.items() if case.startswith("FOLA") and OFFLINE not in case]
    return online[0], offline[0]


def _mostly(steps: Sequence[bool]) -> bool:
    return sum(steps) >= 0.8 * len(steps)
