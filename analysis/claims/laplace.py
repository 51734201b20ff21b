"""What the paper says about Laplace approximations, AE and LF: softmax regression on MNIST, two clients."""

import pandas as pd

from analysis import tables
from analysis.claims.claim import A_FEW, SAME, Finding, falls
from analysis.figures.correlation import error_points
from analysis.parts import Part
from analysis.statistics import MIN_FOR_CORRELATION, correlation

# "Nearly 90 %" of the paper.
NEARLY_90 = 89.0
FULL = ["full online", "full offline"]


def full_is_best(part: Part) -> Finding:
    """Full curvature ends best, and comes near 90 % within three rounds."""
    table = _by_round(part, "GA", 100)
    last, final = table.columns[-1], table.iloc[:, -1]
    others = final.loc[[case for case in final.index if not case.startswith("full")]]
    best = str(others.idxmax())
    third = table["GA (%), round 3"]
    return Finding(
        table.reset_index(),
        [
            (
                f"{case}: {final[case]:.1f} % in the last round, the best other ({best}) {others[best]:.1f} %",
                bool(final[case] > others[best]),
            )
            for case in FULL
        ]
        + [
            (
                f"full reaches {third[FULL].max():.1f} % in round 3 (nearly 90 % is taken as {NEARLY_90:g} %)",
                bool(third[FULL].max() >= NEARLY_90),
            ),
            (
                f"no other has in {last.rpartition(', ')[2]} ({others.max():.1f} %) what full has in round 3",
                bool(others.max() < third[FULL].max()),
            ),
        ],
    )


def laplace_online(part: Part) -> Finding:
    """Online curvature ends better than offline, and gets there more steadily, for every form."""
    table = _by_round(part, "GA", 100).join(_by_round(part, "LA", 100))
    late = f"falls of GA after round {A_FEW} (points)"
    table[late] = falls(part.rounds, A_FEW).groupby(part.runs.set_index("run_id")["case"]).mean()
    held = []
    for form in ("full", "e-full", "diagonal"):
        for metric in ("GA", "LA"):
            final = table[[name for name in table if str(name).startswith(f"{metric} ")]].iloc[:, -1]
            online, offline = final[f"{form} online"], final[f"{form} offline"]
            held.append((f"{form}: final {metric} {online:.1f} % online, {offline:.1f} % offline", online > offline))
        online, offline = (table[late][f"{form} {how}"] for how in ("online", "offline"))
        text = f"{form}: after round {A_FEW} falls of GA add up to {online:.1f} points online, {offline:.1f} offline"
        if part.rounds["round"].max() > A_FEW:
            held.append((text, bool(online < offline)))
    return Finding(table.reset_index(), held)


def e_full_is_average(part: Part) -> Finding:
    """E-full precisions are alike, so that the product is nearly the average."""
    table = _by_round(part, "precision_cosine_minmax", 1).join(_by_round(part, "GA", 100))
    table = table.loc[[case for case in table.index if case.startswith(("e-full", "FedAvg"))]]
    final = table.iloc[:, -1]
    held = []
    for case in ("e-full online", "e-full offline"):
        cosine = table.loc[case].iloc[0]
        difference = final[case] - final["FedAvg"]
        held.append((f"{case}: {difference:+.2f} points from FedAvg in the last round", abs(difference) < SAME))
        held.append((f"{case}: cosine of the two clients' precisions {cosine:.3f} in round 1", bool(cosine > 0.95)))
    return Finding(table.reset_index(), held)


def diagonal_keeps_differences(part: Part) -> Finding:
    """Diagonal precisions differ between clients, which helps in the first rounds."""
    table = _by_round(part, "precision_cosine_minmax", 1).join(_by_round(part, "GA", 100))
    table = table.loc[[case for case in table.index if case.startswith(("diagonal", "e-full", "FedAvg"))]]
    held = []
    for how in ("online", "offline"):
        diagonal, e_full = table.loc[f"diagonal {how}"], table.loc[f"e-full {how}"]
        cosines = f"cosine in round 1 {diagonal.iloc[0]:.2f} (e-full {e_full.iloc[0]:.2f})"
        held.append((f"{how}: {cosines}", bool(diagonal.iloc[0] < e_full.iloc[0])))
        gain = diagonal["GA (%), round 1"] - e_full["GA (%), round 1"]
        held.append((f"{how}: {gain:+.1f} points of GA over e-full in round 1", bool(gain > 0)))
    return Finding(table.reset_index(), held)


def tracks(part: Part, accuracy: str, error: str) -> Finding:
    """An accuracy falls as its error grows, over all runs and for each alpha."""
    points = error_points(part.runs, error)
    points = points.loc[points[error] > 0]  # the reference itself is no evidence
    groups: dict[str, pd.DataFrame] = {"all": points}
    groups |= {f"{alpha:g}": mine for alpha, mine in points.groupby("data.alpha")}
    rows, held = [], []
    for alpha, mine in groups.items():
        found = correlation(mine[error], mine[accuracy])
        if found.spearman is None or found.pearson is None or found.n < MIN_FOR_CORRELATION:
            continue
        rows.append({"α": alpha, **tables.correlated(found)})
        ends = f"{found.spearman.low:.2f} to {found.spearman.high:.2f}"
        where = "over all α" if alpha == "all" else f"at α = {alpha}"
        held.append((f"{where} ρ = {found.spearman.mean:.2f} ({ends}), n = {found.n}", found.spearman.high < 0))
    return Finding(pd.DataFrame(rows), held)


def _by_round(part: Part, metric: str, factor: float) -> pd.DataFrame:
    """A metric of each case in the first, third and last round, the mean over seeds."""
    rounds = part.rounds
    chosen = sorted({1, 3, int(rounds["round"].max())})
    wide = factor * rounds.pivot_table(index="case", columns="round", values=metric, sort=False, dropna=False)[chosen]
    name = {"precision_cosine_minmax": "cosine"}.get(metric, f"{metric} (%)")
    return wide.rename(columns=lambda number: f"{name}, round {number}").rename_axis(columns=None)
