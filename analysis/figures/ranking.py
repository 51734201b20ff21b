"""All methods under every heterogeneity, each at its best setting, with intervals."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import comparisons, style
from analysis.figures.accuracy import finish, lacking, values_of
from analysis.runs import Study
from analysis.style import Picture
from fl_lightning.metrics.metric import GA
from fl_lightning.runs.plotting import palette

# Training on pooled data does not compete: it shows how far the others could get.
REFERENCES = frozenset({"centralised"})
ROW = 0.19  # inches for a method
SPREAD = 0.7  # of a row is shared by the values of alpha


def winners(study: Study) -> Picture:
    """GA of every method for each alpha, which is the colour; a filled marker is the best, or level with it.

    A method differs from the best if its interval ends below where that of the best begins. Rows are sorted by the
    mean over all alpha.
    """
    if problem := lacking(study, "data.alpha"):
        return style.empty(problem, study)
    study, remarks = comparisons.largest(study, ("data.alpha",))
    best = comparisons.best_of_grid(study, GA, ["data.alpha"])
    alphas = values_of(best, "data.alpha")
    # Rounded, so that equals stand in the order of their names, whatever the last bit says.
    means = best.groupby("case")["mean"].mean().round(9)
    order = list(means.sort_values(kind="stable", na_position="first").index)
    figure, (panel,) = style.picture(height=ROW * len(order) + 0.3)
    entries: list[tuple[str, dict[str, Any]]] = []
    for number, (alpha, colour) in enumerate(zip(alphas, style.sequence(len(alphas)), strict=True)):
        mine = best.loc[best["data.alpha"].eq(alpha)].set_index("case").reindex(order)
        shift = SPREAD * ((number + 0.5) / len(alphas) - 0.5)
        first = _draw(panel, mine, colour, -shift)
        entries.append((f"α = {comparisons.shown(alpha)}: {first}", {"color": colour, "marker": "o"}))
    panel.set_xlabel("GA (%)")
    panel.set_yticks(range(len(order)), order)
    panel.set_ylim(-0.6, len(order) - 0.4)
    style.legend(figure, entries, columns=2)
    return finish(figure, best, study, remarks, "filled: best or level with it", percent=False)


def _draw(panel: Axes, rows: pd.DataFrame, colour: str, shift: float) -> str:
    """The means and intervals of one alpha; returns the best case there."""
    contest = rows.loc[[case not in REFERENCES for case in rows.index]]
    if not contest["mean"].notna().any():
        return "none"
    first = str(contest["mean"].idxmax())
    low, high = (rows[side].fillna(rows["mean"]).to_dict() for side in ("low", "high"))
    for place, case in enumerate(rows.index):
        y = place + shift
        if not np.isfinite(rows.loc[case, "mean"]):
            if rows.loc[case, "diverged"] > 0:
                panel.plot(0.01, y, "x", color=colour, ms=3, transform=panel.get_yaxis_transform(), clip_on=False)
            continue
        level = case not in REFERENCES and high[case] >= low[first]
        panel.plot([100 * low[case], 100 * high[case]], [y, y], color=colour, lw=1.0, zorder=2)
        face = colour if level else palette.current().paper
        panel.plot(100 * rows.loc[case, "mean"], y, "o", color=colour, mfc=face, ms=3.2, mew=0.8, zorder=3)
    return first
