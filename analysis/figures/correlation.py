"""What goes with what: GA with LA over all settings, GA with AE and LA with LF over degrees of heterogeneity."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import comparisons, style
from analysis.statistics import Correlation, Interval, correlation
from analysis.study import Study
from analysis.style import Picture
from fl_lightning.metrics.metric import AXES, BY_NAME, GA, LA
from fl_lightning.runs.plotting import palette, strokes
from fl_lightning.runs.plotting.palette import MARKERS


def global_against_local(study: Study) -> Picture:
    """One point per run, under equal conditions; lines are least squares."""
    study, remarks = comparisons.largest(study, longest=False)
    runs = study.runs
    ended = runs.loc[runs["ended"] & runs[GA].notna() & runs[LA].notna()]
    if not len(ended):
        return style.empty("no run has ended", study)
    looks = style.looks_of(ended)
    figure, (panel,) = style.picture(height=2.6)
    entries: list[tuple[str, dict[str, Any]]] = []
    for case, look in looks.items():
        mine = ended.loc[ended["case"].eq(case)]
        panel.plot(100 * mine[LA], 100 * mine[GA], look.marker, color=look.colour, ms=3.2, alpha=0.75, mew=0)
        found = correlation(mine[LA], mine[GA], comparisons.setting_numbers(study.of(mine)))
        if found.pearson is not None:
            _regression(panel, 100 * mine[LA], 100 * mine[GA], look.colour, "solid")
        entries.append((f"{case}: {in_words(found)}", {"color": look.colour, "marker": look.marker}))
    if len(looks) > 1:
        found = correlation(ended[LA], ended[GA], comparisons.setting_numbers(study.of(ended)))
        if found.pearson is not None:
            _regression(panel, 100 * ended[LA], 100 * ended[GA], style.ink(), palette.DASHES[1])
        entries.append((f"all: {in_words(found)}", {"color": style.ink(), "linestyle": palette.DASHES[1]}))
    panel.set(xlabel=AXES[LA], ylabel=AXES[GA])
    strokes.percent(panel)
    about = [("correlations, uncorrected for effects of seeds:", {"linestyle": "none"})]
    style.legend(figure, about, entries, columns=1)
    style.headline(figure, f"one point per run; {_numbers(study.of(ended))}")
    figure.remarks = [*study.remarks, *remarks]
    figure.run_ids = list(ended["run_id"])
    return figure


def errors_behind_accuracies(study: Study) -> Picture:
    """Distances from a reference posterior: AE of the server's model, LF of the clients' models.

    Stars at the left edge are the runs whose posterior is the origin of AE and LF.
    """
    references = study.references
    pairs = [(x, y, comparisons.error_points(study, x)) for x, y in (("AE", GA), ("LF", LA))]
    pairs = [(x, y, points) for x, y, points in pairs if len(points)]
    if not pairs:
        return style.empty("no run has measured AE or LF; give runs a probe.reference, as the study ae_lf does", study)
    alphas = sorted({alpha for _, _, points in pairs for alpha in points["data.alpha"].dropna()})
    colours = dict(zip(alphas, palette.sequence(max(len(alphas), 1)), strict=False))
    figure, panels = style.picture(len(pairs), height=2.4)
    shapes: dict[Any, str] = {}
    at_zero = 0
    for panel, (x, y, points) in zip(panels, pairs, strict=True):
        kinds = _shapes(points)
        shapes |= {kind: MARKERS[i % len(MARKERS)] for i, kind in enumerate(dict.fromkeys(kinds), start=len(shapes))}
        positive = points[x] > 0
        edge = points.loc[positive, x].min() / 2 if positive.any() else 1.0
        for (alpha, kind, seen), mine in points.groupby([points["data.alpha"], kinds, positive]):
            face = colours[alpha] if seen else style.paper()
            look = {"color": colours[alpha], "mfc": face, "ms": 3.6, "alpha": 0.85, "mew": 0 if seen else 0.8}
            panel.plot(mine[x].clip(lower=edge), 100 * mine[y], shapes[kind], linestyle="none", **look)
        if x == "AE" and references is not None:
            for alpha, mine in references.loc[references["ended"]].groupby("data.alpha"):
                if alpha in colours:
                    panel.plot(np.full(len(mine), edge), 100 * mine[y], "*", color=colours[alpha], ms=6, mew=0)
        at_zero += int((~positive).sum())
        panel.set_xscale("log")
        style.logarithmic(panel)
        panel.set(xlabel=f"{BY_NAME[x].axis}, log scale", ylabel=AXES[y])
        strokes.percent(panel)
        apart = points.loc[positive]
        found = correlation(np.log(apart[x]), apart[y], comparisons.setting_numbers(study.of(apart)))
        panel.set_title(f"{y} and log {x}: {in_words(found)}", fontsize=6, color=style.ink(), loc="left")
    has_stars = references is not None and len(references) > 0
    style.legend(
        figure,
        [(f"α = {comparisons.shown(alpha)}", {"color": colour, "lw": 3}) for alpha, colour in colours.items()],
        [(kind, {"marker": mark, "linestyle": "none"}) for kind, mark in shapes.items()]
        + ([("reference (AE = 0)", {"marker": "*", "linestyle": "none", "ms": 6})] if has_stars else []),
    )
    shown = pd.concat([points for _, _, points in pairs]).drop_duplicates("run_id")
    zero = f"; {at_zero} at distance 0 are hollow, at the left edge" if at_zero else ""
    style.headline(figure, f"one point per run; {_numbers(study.of(shown))}{zero}")
    figure.remarks = list(study.remarks)
    figure.run_ids = list(shown["run_id"])
    return figure


def _shapes(points: pd.DataFrame) -> "pd.Series[str]":
    """By case; if there is only one, by its epochs."""
    if points["case"].nunique() > 1 or points["training.epochs"].nunique() < 2:
        return points["case"]
    return points["training.epochs"].map(lambda epochs: f"E = {comparisons.shown(epochs)}")


def in_words(found: Correlation) -> str:
    """Both correlations in one line, or why there are none.

    >>> in_words(Correlation(3, 3, None, None, "n = 3 points are too few for a correlation"))
    'n = 3 points are too few for a correlation'
    """
    if found.pearson is None or found.spearman is None:
        return found.remark
    return f"r = {_with_ends(found.pearson)}, ρ = {_with_ends(found.spearman)}, n = {found.n}"


def _numbers(study: Study) -> str:
    runs = study.runs
    settings, seeds = len(list(comparisons.groups(runs, ["case", *comparisons.tuned(study)]))), runs["seed"].nunique()
    return f"n = {len(runs)} runs, {settings} settings, {seeds} seed{'s' if seeds > 1 else ''}"


def _with_ends(value: Interval) -> str:
    ends = f" [{value.low:.2f}, {value.high:.2f}]" if value.low == value.low else ""
    return f"{value.mean:.2f}{ends}"


def _regression(panel: Axes, x: "pd.Series[float]", y: "pd.Series[float]", colour: str, dash: object) -> None:
    slope, offset = np.polyfit(x, y, 1)
    # As far as there are points, and no further than accuracies go.
    ends = np.array([x.min(), x.max()])
    if slope:
        ends = ends.clip(*sorted((edge - offset) / slope for edge in (0, 100)))
    panel.plot(ends, slope * ends + offset, color=colour, linestyle=dash, lw=1.0)
