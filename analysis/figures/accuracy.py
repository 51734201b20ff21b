"""Final accuracy over conditions and hyperparameters.

Values stand at equal distances along x, each with its label: the paper's grids are neither linear nor logarithmic.
A gap in a line is a value without result; a cross at the bottom one where every setting diverged.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import comparisons, style
from analysis.statistics import mean_interval
from analysis.study import Study
from analysis.style import Picture
from fl_lightning.metrics.metric import AXES, GA, LA
from fl_lightning.runs.plotting import palette, strokes
from fl_lightning.runs.plotting.palette import Look

# Training on pooled data is not compared: it shows how far the others could get.
REFERENCES = frozenset({"centralised"})
ROW = 0.19  # inches for a method
SPREAD = 0.7  # of a row is shared by the values of alpha
LEARNING = ("training.lr", "training.epochs", "training.batch_size")
LABELS = {
    "training.lr": "learning rate lr",
    "training.epochs": "local epochs E",
    "training.batch_size": "batch size B",
    "data.alpha": "Dirichlet α (small: heterogeneous)",
}


def best_for_alpha_and_clients(study: Study) -> Picture:
    """The best setting of every method under every condition. Colour is N; FedAvg is solid, FOLA dashed."""
    if problem := lacking(study, "data.alpha"):
        return style.empty(problem, study)
    study, remarks = comparisons.largest(study, ("data.alpha", "data.clients"))
    best = comparisons.best_of_grid(study, GA, ["data.alpha", "data.clients"])
    alphas, numbers = values_of(best, "data.alpha"), values_of(best, "data.clients")
    cases = sorted(best["case"].unique(), key=lambda case: (case != "FedAvg", case != "FOLA"))
    colours, dashes = dict(zip(numbers, palette.sequence(len(numbers)), strict=True)), palette.dashes(cases)
    figure, (panel,) = style.picture()
    for number in numbers:
        for case in cases:
            mine = best.loc[best["case"].eq(case) & best["data.clients"].eq(number)]
            _line(
                panel, mine, "data.alpha", alphas, Look(colours[number], "o"), dashes[case], len(numbers) * len(cases)
            )
    _x_axis(panel, "data.alpha", alphas)
    panel.set_ylabel(f"best {AXES[GA]}")
    style.legend(
        figure,
        [(case, {"linestyle": dash}) for case, dash in dashes.items()],
        [(f"N = {comparisons.shown(number)}", {"color": colour}) for number, colour in colours.items()],
    )
    return finish(figure, best, study, remarks, "after " + _rounds(study))


def best_for_alpha(study: Study) -> Picture:
    """The best setting of every method, continued to its last round."""
    if problem := lacking(study, "data.alpha"):
        return style.empty(problem, study)
    study, remarks = comparisons.largest(study, ("data.alpha",))
    best = comparisons.best_of_grid(study, GA, ["data.alpha"])
    alphas = values_of(best, "data.alpha")
    figure, (panel,) = style.picture()
    looks = style.looks_of(best)
    for case, look in looks.items():
        _line(panel, best.loc[best["case"].eq(case)], "data.alpha", alphas, look, "solid", len(looks))
    _x_axis(panel, "data.alpha", alphas)
    panel.set_ylabel(f"best {AXES[GA]}")
    style.legend(figure, style.case_entries(looks))
    return finish(figure, best, study, remarks, "after " + _rounds(study))


def winners(study: Study) -> Picture:
    """Every method at its best setting; colour is α, and the legend names the best. A filled marker is the best, or has
    an interval that reaches that of the best. Centralised training is not compared.

    Another method differs from the best if its interval ends below that of the best. Rows are sorted by the mean over
    all alpha.
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
    for number, (alpha, colour) in enumerate(zip(alphas, palette.sequence(len(alphas)), strict=True)):
        mine = best.loc[best["data.alpha"].eq(alpha)].set_index("case").reindex(order)
        shift = SPREAD * ((number + 0.5) / len(alphas) - 0.5)
        first = _intervals(panel, mine, colour, -shift)
        entries.append((f"α = {comparisons.shown(alpha)} (best: {first})", {"color": colour, "marker": "o"}))
    panel.set_xlabel(AXES[GA])
    panel.set_yticks(range(len(order)), order)
    panel.set_ylim(-0.6, len(order) - 0.4)
    style.legend(figure, entries, columns=2)
    return finish(figure, best, study, remarks, "filled: best or level with it", percent=False)


def _intervals(panel: Axes, rows: pd.DataFrame, colour: str, shift: float) -> str:
    """The means and intervals of one alpha; returns the best case there."""
    comparison = rows.loc[[case not in REFERENCES for case in rows.index]]
    if not comparison["mean"].notna().any():
        return "none"
    first = str(comparison["mean"].idxmax())
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


def over_hyperparameters(study: Study, keys: Sequence[str] = LEARNING) -> Picture:
    """GA over each setting, with the others at their best; colour is the method, dash is α."""
    varied = [key for key in keys if study.varies(key)]
    if not varied:
        return style.empty(f"all runs have the same {', '.join(map(comparisons.symbol, keys))}", study)
    study, remarks = comparisons.largest(study, ("data.alpha",))
    alphas = values_of(study.runs, "data.alpha")
    dashes = palette.dashes(alphas)
    figure, panels = style.picture(len(varied), height=1.9)
    tables = []
    for panel, key in zip(panels, varied, strict=True):
        best = comparisons.best_of_grid(study, GA, ["data.alpha", key])
        looks, values = style.looks_of(best), values_of(study.runs, key)
        for alpha in alphas:
            for case, look in looks.items():
                mine = best.loc[best["case"].eq(case) & best["data.alpha"].eq(alpha)]
                _line(panel, mine, key, values, look, dashes[alpha], len(alphas) * len(looks))
        _x_axis(panel, key, values)
        panel.set_ylabel(AXES[GA])
        tables.append(best)
    alpha_entries = [(f"α = {comparisons.shown(alpha)}", {"linestyle": dash}) for alpha, dash in dashes.items()]
    style.legend(figure, style.case_entries(looks), alpha_entries if len(alphas) > 1 else [])
    others = "the others at their best; " if len(varied) > 1 else ""
    return finish(figure, pd.concat(tables), study, remarks, others + "after " + _rounds(study))


def over_epochs(study: Study, key: str = "training.epochs") -> Picture:
    """GA and LA over the local epochs E; dash is λ. The settings are those of the best GA, also in the panel of LA."""
    if problem := lacking(study, key):
        return style.empty(problem, study)
    study, remarks = comparisons.largest(study)
    values, strengths = values_of(study.runs, key), values_of(study.runs, "method.strength")
    dashes = palette.dashes([None, *strengths] if len(strengths) > 1 else [None])
    figure, panels = style.picture(2, sharex=True)
    # By GA, also for LA: one setting cannot be good in one panel and bad in the other.
    keys = [key, "method.strength"] if "method.strength" in study.runs else [key]
    best = comparisons.best_of_grid(study, GA, keys)
    looks = style.looks_of(best)
    for panel, metric in zip(panels, (GA, LA), strict=True):
        measured = _measured(best, study.runs, metric)
        for case, look in looks.items():
            of_case = measured.loc[measured["case"].eq(case)]
            groups = comparisons.groups(of_case, ["method.strength"] if "method.strength" in of_case else [])
            for mine in groups:
                strength = mine["method.strength"].iloc[0] if "method.strength" in mine else None
                dash = dashes.get(strength, dashes[None])
                _line(panel, mine, key, values, look, dash, len(dashes) * len(looks))
        panel.set_ylabel(AXES[metric])
    _x_axis(panels[-1], key, values)
    strength_entries = [(f"λ = {comparisons.shown(s)}", {"linestyle": d}) for s, d in dashes.items() if s is not None]
    style.legend(figure, style.case_entries(looks), strength_entries)
    return finish(figure, best, study, remarks, "after " + _rounds(study))


def _measured(best: pd.DataFrame, runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The chosen settings with another metric of the same runs."""
    table = runs.set_index("run_id")[metric]
    intervals = [mean_interval(table.reindex(list(ids)).to_numpy()) for ids in best["run_ids"]]
    return best.assign(**{name: [getattr(i, name) for i in intervals] for name in ("mean", "low", "high", "n")})


def _line(panel: Axes, best: pd.DataFrame, key: str, values: Sequence[Any], look: Look, dash: Any, lines: int) -> None:
    """Means with their intervals; NaN, which breaks the line, where there is none."""
    rows = best.drop_duplicates(key).set_index(key).reindex(list(values))
    x = np.arange(len(values))
    mean, low, high = (100 * rows[name].to_numpy(dtype=float) for name in ("mean", "low", "high"))
    strokes.curve(panel, x, mean, look, dash, longest=1)
    if np.nanmax(rows["n"].to_numpy(dtype=float), initial=0) > 1:
        strokes.band(panel, x, low, high, look.colour, lines)
    died = x[(rows["n"].to_numpy(dtype=float) == 0) & (rows["diverged"].to_numpy(dtype=float) > 0)]
    if len(died):
        bottom = panel.get_xaxis_transform()
        panel.plot(died, np.full(len(died), 0.03), "x", color=look.colour, transform=bottom, clip_on=False, ms=4)


def _x_axis(panel: Axes, key: str, values: Sequence[Any]) -> None:
    panel.set_xticks(range(len(values)), [comparisons.shown(value) for value in values])
    panel.set_xlim(-0.3, len(values) - 0.7)
    panel.set_xlabel(LABELS.get(key, comparisons.symbol(key)))


def values_of(table: pd.DataFrame, key: str) -> list[Any]:
    """The values of a setting, in order."""
    return sorted(table[key].dropna().unique()) if key in table else []


def lacking(study: Study, key: str) -> str:
    """Why there is nothing to draw over a setting; empty if there is."""
    runs = study.runs
    if not len(runs):
        return "there are no runs"
    if key not in runs or runs[key].nunique() < 2:
        return f"all runs have the same {comparisons.symbol(key)}"
    return "" if runs["ended"].any() or runs["status"].eq("diverged").any() else "no run has ended"


def _rounds(study: Study) -> str:
    numbers = sorted(study.runs["federation.rounds"].unique())
    return " or ".join(comparisons.shown(number) for number in numbers) + (" round" if numbers == [1] else " rounds")


def finish(
    figure: Picture,
    best: pd.DataFrame,
    study: Study,
    remarks: Sequence[str],
    basis: str,
    percent: bool = True,
) -> Picture:
    """What all figures of best settings say: how many seeds and settings they rest on, and what was left out.

    Args:
        figure: What was drawn.
        best: The best settings, from `comparisons.best_of_grid`.
        study: The runs behind them.
        remarks: What else must be said.
        basis: What the headline begins with.
        percent: Whether accuracies stand along y.
    """
    if percent:
        for panel in figure.axes:
            strokes.percent(panel)
    tried = sorted(set(best["tried"]))
    settings = f"{tried[0]} to {tried[-1]}" if len(tried) > 1 else f"{tried[-1]}"
    choice = f"; best of {settings} settings" if tried[-1] > 1 else ""
    style.headline(figure, f"{basis}; {style.seeds([int(n) for n in best['n']])}{choice}")
    about = [*comparisons.budget_remarks(best), *comparisons.confirmed_remarks(best)]
    figure.remarks = [*study.remarks, *remarks, *about]
    figure.run_ids = list(dict.fromkeys(run_id for ids in best["run_ids"] for run_id in ids))
    return figure
