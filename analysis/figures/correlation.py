"""What goes with what: GA with LA over all settings, GA with AE and LA with LF over degrees of heterogeneity."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import contests, style
from analysis.runs import DISPLAY
from analysis.statistics import Correlation, Interval, correlation
from analysis.style import MARKERS, Picture


def global_against_local(runs: pd.DataFrame) -> Picture:
    """GA over LA, one point per run, with a regression line and both correlations for every case and for all."""
    runs, remarks = contests.largest(runs, longest=False)
    ended = runs.loc[runs["ended"] & runs["GA"].notna() & runs["LA"].notna()]
    if not len(ended):
        return style.empty("no run has ended", runs)
    methods = {case: DISPLAY.get(m, m) for case, m in zip(ended["case"], ended["method"], strict=True)}
    looks = style.looks(list(dict.fromkeys(ended["case"])), methods)
    figure, (panel,) = style.picture(height=2.6)
    entries = []
    for case, look in looks.items():
        mine = ended.loc[ended["case"].eq(case)]
        panel.plot(100 * mine["LA"], 100 * mine["GA"], look.marker, color=look.colour, ms=3.2, alpha=0.75, mew=0)
        found = correlation(mine["LA"], mine["GA"])
        if found.pearson is not None:
            _regression(panel, 100 * mine["LA"], 100 * mine["GA"], look.colour, "solid")
        entries.append((f"{case}: {in_words(found)}", {"color": look.colour, "marker": look.marker}))
    if len(looks) > 1:
        found = correlation(ended["LA"], ended["GA"])
        if found.pearson is not None:
            _regression(panel, 100 * ended["LA"], 100 * ended["GA"], style.ink(), style.DASHES[1])
        entries.append((f"all: {in_words(found)}", {"color": style.ink(), "linestyle": style.DASHES[1]}))
    panel.set(xlabel="LA: clients' models (%)", ylabel="GA: server's model (%)")
    style.legend(figure, entries, columns=1)
    style.headline(figure, f"one point per run; {_numbers(ended)}")
    figure.remarks = [*runs.attrs.get("remarks", ()), *remarks]
    figure.run_ids = list(ended["run_id"])
    return figure


def errors_behind_accuracies(runs: pd.DataFrame) -> Picture:
    """GA over AE and LA over LF: colour is alpha, shape the case (or E, where only that varies)."""
    pairs = [(x, y) for x, y in (("AE", "GA"), ("LF", "LA")) if x in runs and runs[x].notna().any()]
    if not pairs:
        return style.empty("no run has measured AE or LF; give runs a probe.reference, as the study ae_lf does", runs)
    runs, remarks = contests.largest(runs, ("data.alpha", "federation.rounds"))
    ended = runs.loc[runs["ended"]]
    alphas = sorted(ended["data.alpha"].dropna().unique())
    colours = dict(zip(alphas, style.sequence(max(len(alphas), 1)), strict=False))
    shape = "case" if ended["case"].nunique() > 1 or "training.epochs" not in ended else "training.epochs"
    shapes = dict(zip(sorted(ended[shape].unique()), MARKERS * 9, strict=False))
    figure, panels = style.picture(len(pairs), height=2.4)
    names = {
        "AE": "AE: distance of the server's model (log scale)",
        "LF": "LF: mean distance of the clients' models (log scale)",
    }
    for panel, (x, y) in zip(panels, pairs, strict=True):
        measured = ended.loc[ended[x].notna() & ended[y].notna()]
        positive = measured.loc[measured[x] > 0]
        for (alpha, kind), mine in positive.groupby(["data.alpha", shape]):
            panel.plot(mine[x], 100 * mine[y], shapes[kind], color=colours[alpha], ms=3.6, alpha=0.8, mew=0)
        panel.set_xscale("log")
        panel.set(xlabel=names[x], ylabel=f"{y} (%)")
        found = correlation(np.log(positive[x]), positive[y], clusters=None)
        style.logarithmic(panel)
        panel.set_title(f"{y} and log {x}: {in_words(found)}", fontsize=6, color=style.ink(), loc="left")
        if len(positive) < len(measured):
            remarks.append(f"{len(measured) - len(positive)} runs with {x} = 0 have no place on a logarithmic axis")
    entries = [(f"α = {contests.shown(alpha)}", {"color": colour, "lw": 3}) for alpha, colour in colours.items()]
    kinds = [
        (str(kind) if shape == "case" else f"E = {contests.shown(kind)}", {"marker": mark, "linestyle": "none"})
        for kind, mark in shapes.items()
    ]
    style.legend(figure, entries, kinds)
    style.headline(figure, f"one point per run; {_numbers(ended)}")
    figure.remarks = [*runs.attrs.get("remarks", ()), *remarks]
    figure.run_ids = list(ended["run_id"])
    return figure


def in_words(found: Correlation) -> str:
    """Both correlations in one line, or why there are none.

    >>> in_words(Correlation(3, None, None, "n = 3 points are too few for a correlation"))
    'n = 3 points are too few for a correlation'
    """
    if found.pearson is None or found.spearman is None:
        return found.remark
    return f"r = {_with_ends(found.pearson)}, ρ = {_with_ends(found.spearman)}, n = {found.n}"


def _numbers(runs: pd.DataFrame) -> str:
    settings, seeds = len(list(contests.groups(runs, ["case", *contests.tuned(runs)]))), runs["seed"].nunique()
    return f"n = {len(runs)} runs, {settings} settings, {seeds} seed{'s' if seeds > 1 else ''}"


def _with_ends(value: Interval) -> str:
    ends = f" [{value.low:.2f}, {value.high:.2f}]" if value.low == value.low else ""
    return f"{value.mean:.2f}{ends}"


def _regression(panel: Axes, x: "pd.Series[float]", y: "pd.Series[float]", colour: str, dash: object) -> None:
    slope, offset = np.polyfit(x, y, 1)
    ends = np.array([x.min(), x.max()])
    panel.plot(ends, slope * ends + offset, color=colour, linestyle=dash, lw=1.0)
