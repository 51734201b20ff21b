"""What the paper says about Laplace approximations, AE and LF: softmax regression on MNIST, two clients."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis import comparisons, tables
from analysis.claims.claim import (
    A_FEW,
    SAME,
    Finding,
    Outcomes,
    against_the_best,
    alike,
    answered,
    compared,
    need,
    unknown,
    weakest,
)
from analysis.claims.means import in_round, late_falls, less_seeds, need_only
from analysis.statistics import correlation
from analysis.study import Study
from fl_lightning.metrics.metric import GA, LA

# "Nearly 90 %" of the paper.
NEARLY_90 = 89.0
# "Cosines near 1" of the paper.
NEARLY_1 = 0.95
COSINE = "precision_cosine_minmax"
FULL = ("full online", "full offline")
FORMS = ("full", "e-full", "diagonal")
HOW = ("online", "offline")
NOTHING = Outcomes()


def full_is_best(part: Study) -> Finding:
    """Full curvature ends best, and comes near 90 % within three rounds."""
    last = _last_round(part)
    need(last >= A_FEW, f"the rule looks at round {A_FEW}, and round {last} is the last")
    final, third = (in_round(part, GA, number, 100) for number in (last, A_FEW))
    others = {case: found for case, found in final.items() if not case.startswith("full") and found.good}
    need(others, "no other form of curvature has ended")
    held = []
    for case in FULL:
        mine = final.get(case, NOTHING)
        held.append(against_the_best(f"{case}: {mine:.1f} % in the last round", mine, others))
    early = max((third.get(case, NOTHING) for case in FULL), key=lambda found: (found.seeds > 0, found.mean))
    text = f"full has {early:.1f} % in round {A_FEW}"
    held.append(compared(f"{text} (nearly 90 % is taken as {NEARLY_90:g} %)", early, NEARLY_90))
    text = f"{text}, others in round {last}"
    if last > A_FEW:
        held.append(against_the_best(text, early, others))
    else:
        held.append(unknown(text, f"round {last} is the last"))
    return Finding(_table(part, (GA,)), held)


def laplace_online(part: Study) -> Finding:
    """Online curvature ends better than offline, and gets there more steadily, for every form."""
    last = _last_round(part)
    late = late_falls(part)
    held = []
    for form in FORMS:
        for metric in (GA, LA):
            online, offline = _pair(in_round(part, metric, last, 100), form)
            text = f"{form}: final {metric} {online:.1f} % online, {offline:.1f} % offline"
            held.append(compared(text, online, offline))
        online, offline = _pair(late, form)
        text = f"{form}: after round {A_FEW} drops in GA add up to {online:.1f} points online, {offline:.1f} offline"
        if last > A_FEW:
            held.append(compared(text, online, offline, less=True))
        else:
            held.append(unknown(f"{form}: drops in GA after round {A_FEW}", f"round {last} is the last"))
    name = f"sum of drops in GA after round {A_FEW} (points)"
    table = _table(part, (GA, LA))
    return Finding(table.assign(**{name: [late[case].mean for case in table["case"]]}), held)


def e_full_is_average(part: Study) -> Finding:
    """E-full precisions are alike, so that the product is nearly the average, also while other products are not."""
    last = _last_round(part)
    curves = [in_round(part, GA, number, 100) for number in range(1, last + 1)]
    apart = {number: found for number, found in enumerate(curves, start=1) if _others_differ(found)}
    first = in_round(part, COSINE, 1)
    held = []
    for case in (f"e-full {how}" for how in HOW):
        text = f"{case}: close to FedAvg in the {len(apart)} of {last} rounds in which another form is not"
        places = [
            alike(f"{text}, least in round {number}", found.get(case, NOTHING), found.get("FedAvg", NOTHING))
            for number, found in apart.items()
        ]
        held.append(weakest(places) if places else unknown(text, "every method would pass"))
        cosine = first.get(case, NOTHING)
        text = f"{case}: cosine of the two clients' precisions {cosine:.3f} in round 1 ({NEARLY_1:g} are asked)"
        held.append(compared(text, cosine, NEARLY_1))
    return Finding(_table(part, (COSINE, GA), ("e-full", "FedAvg")), held)


def diagonal_keeps_differences(part: Study) -> Finding:
    """Diagonal precisions differ between clients, which helps in the first rounds."""
    cosines, accuracies = in_round(part, COSINE, 1), in_round(part, GA, 1, 100)
    held = []
    for how in HOW:
        diagonal, e_full = (cosines.get(f"{form} {how}", NOTHING) for form in ("diagonal", "e-full"))
        text = f"{how}: cosine in round 1 {diagonal:.2f} (e-full {e_full:.2f})"
        held.append(compared(text, diagonal, e_full, less=True))
        diagonal, e_full = (accuracies.get(f"{form} {how}", NOTHING) for form in ("diagonal", "e-full"))
        text = f"{how}: {diagonal:.1f} % GA in round 1 (e-full {e_full:.1f} %)"
        held.append(compared(text, diagonal, e_full))
    return Finding(_table(part, (COSINE, GA), ("diagonal", "e-full", "FedAvg")), held)


def tracks(part: Study, accuracy: str, error: str) -> Finding:
    """An accuracy falls as its error grows, over all runs and for each alpha."""
    points = comparisons.error_points(part, error)
    points = points.loc[points[error] > 0] if len(points) else points  # the reference itself says nothing
    need(len(points), f"no run that ended has an {error} above zero")
    groups: dict[str, pd.DataFrame] = {f"{alpha:g}": mine for alpha, mine in points.groupby("data.alpha")}
    if len(groups) > 1:
        groups = {"all": points, **groups}
    rows, held = [], []
    for alpha, everyone in groups.items():
        mine = less_seeds(everyone, (accuracy, error))
        found = correlation(mine[error], mine[accuracy], comparisons.setting_numbers(part.of(mine)))
        rows.append({"α": alpha, **tables.correlated(found)})
        where = "over all α" if alpha == "all" else f"at α = {alpha}"
        seeds = mine["seed"].nunique()
        rho = found.spearman
        if rho is None or rho.low != rho.low:
            held.append(unknown(f"{where} {accuracy} falls as {error} grows", found.remark, seeds))
        else:
            ends = f"{rho.low:.2f} to {rho.high:.2f}"
            text = f"{where} ρ = {rho.mean:.2f} ({ends}), n = {found.n} of {found.clusters} settings"
            held.append(answered(text, rho, seeds, -math.inf, 0.0))
    return Finding(pd.DataFrame(rows), held)


def _last_round(part: Study) -> int:
    need_only(part, ())
    need(len(part.rounds), "no round has been measured")
    return int(part.rounds["round"].max())


def _pair(means: dict[str, Outcomes], form: str) -> tuple[Outcomes, Outcomes]:
    return means.get(f"{form} online", NOTHING), means.get(f"{form} offline", NOTHING)


def _others_differ(means: dict[str, Outcomes]) -> bool:
    """Whether full or diagonal curvature is further from FedAvg than what counts as the same."""
    average = means.get("FedAvg", NOTHING).mean
    others = [found.mean for case, found in means.items() if case.startswith(("full", "diagonal"))]
    return any(abs(value - average) >= SAME for value in others)


def _table(part: Study, metrics: Sequence[str], cases: tuple[str, ...] = ("",)) -> pd.DataFrame:
    """Metrics of each case in the first, third and last round, the mean over seeds that ended."""
    chosen = [number for number in sorted({1, A_FEW, _last_round(part)}) if number <= _last_round(part)]
    found = {(metric, number): in_round(part, metric, number) for metric in metrics for number in chosen}
    rows = []
    for case in dict.fromkeys(part.runs["case"]):
        if case.startswith(cases):
            row: dict[str, Any] = {"case": case}
            for (metric, number), means in found.items():
                name, factor = ("cosine", 1) if metric == COSINE else (f"{metric} (%)", 100)
                row[f"{name}, round {number}"] = factor * means.get(case, NOTHING).mean
            rows.append(row)
    return pd.DataFrame(rows)


# By the key of the claim.
RULES = {
    "full_is_best": full_is_best,
    "laplace_online": laplace_online,
    "e_full_is_average": e_full_is_average,
    "diagonal_keeps_differences": diagonal_keeps_differences,
    "ga_tracks_ae": lambda part: tracks(part, GA, "AE"),
    "la_tracks_lf": lambda part: tracks(part, LA, "LF"),
}
