"""Final accuracy over conditions and hyperparameters.

Values stand at equal distances along x, each with its label: the paper's grids are neither linear nor logarithmic.
A gap in a line is a value without result; a cross at the bottom one where every setting diverged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import comparisons, style
from analysis.runs import Study
from analysis.style import Look, Picture
from fl_lightning.metrics.metric import AXES, GA, LA
from fl_lightning.runs.plotting import strokes
from fl_lightning.runs.plotting.palette import DISPLAY

LEARNING = ("training.lr", "training.epochs", "training.batch_size")
LABELS = {
    "training.lr": "learning rate lr",
    "training.epochs": "local epochs E",
    "training.batch_size": "batch size B",
    "data.alpha": "Dirichlet α (small: heterogeneous)",
}


def best_for_alpha_and_clients(study: Study) -> Picture:
    """Best GA for each alpha and N: colour is N; the first case (FedAvg) is solid, the next (FOLA) dashed."""
    if problem := lacking(study, "data.alpha"):
        return style.empty(problem, study)
    study, remarks = comparisons.largest(study, ("data.alpha", "data.clients"))
    best = comparisons.best_of_grid(study, GA, ["data.alpha", "data.clients"])
    alphas, numbers = values_of(best, "data.alpha"), values_of(best, "data.clients")
    cases = sorted(best["case"].unique(), key=lambda case: (case != "FedAvg", case != "FOLA"))
    colours, dashes = dict(zip(numbers, style.sequence(len(numbers)), strict=True)), style.dashes(cases)
    figure, (panel,) = style.picture()
    for number in numbers:
        for case in cases:
            mine = best.loc[best["case"].eq(case) & best["data.clients"].eq(number)]
            _line(
                panel, mine, "data.alpha", alphas, Look(colours[number], "o"), dashes[case], len(numbers) * len(cases)
            )
    _x_axis(panel, "data.alpha", alphas)
    panel.set_ylabel("best GA (%)")
    style.legend(
        figure,
        [(case, {"linestyle": dash}) for case, dash in dashes.items()],
        [(f"N = {comparisons.shown(number)}", {"color": colour}) for number, colour in colours.items()],
    )
    return finish(figure, best, study, remarks, "after " + _rounds(study))


def best_for_alpha(study: Study) -> Picture:
    """Best accuracy of every case for each alpha."""
    if problem := lacking(study, "data.alpha"):
        return style.empty(problem, study)
    study, remarks = comparisons.largest(study, ("data.alpha",))
    best = comparisons.best_of_grid(study, GA, ["data.alpha"])
    alphas = values_of(best, "data.alpha")
    figure, (panel,) = style.picture()
    looks = looks_of(best)
    for case, look in looks.items():
        _line(panel, best.loc[best["case"].eq(case)], "data.alpha", alphas, look, "solid", len(looks))
    _x_axis(panel, "data.alpha", alphas)
    panel.set_ylabel("best GA (%)")
    style.legend(figure, _case_entries(looks))
    return finish(figure, best, study, remarks, "after " + _rounds(study))


def over_hyperparameters(study: Study, keys: Sequence[str] = LEARNING) -> Picture:
    """GA over lr, E and B, each with the others at their best; colour is the case, dash alpha."""
    varied = [key for key in keys if study.varies(key)]
    if not varied:
        return style.empty(f"all runs have the same {', '.join(map(comparisons.symbol, keys))}", study)
    study, remarks = comparisons.largest(study, ("data.alpha",))
    alphas = values_of(study.runs, "data.alpha")
    dashes = style.dashes(alphas)
    figure, panels = style.picture(len(varied), height=1.9)
    tables = []
    for panel, key in zip(panels, varied, strict=True):
        best = comparisons.best_of_grid(study, GA, ["data.alpha", key])
        looks, values = looks_of(best), values_of(study.runs, key)
        for alpha in alphas:
            for case, look in looks.items():
                mine = best.loc[best["case"].eq(case) & best["data.alpha"].eq(alpha)]
                _line(panel, mine, key, values, look, dashes[alpha], len(alphas) * len(looks))
        _x_axis(panel, key, values)
        panel.set_ylabel("GA (%)")
        tables.append(best)
    alpha_entries = [(f"α = {comparisons.shown(alpha)}", {"linestyle": dash}) for alpha, dash in dashes.items()]
    style.legend(figure, _case_entries(looks), alpha_entries if len(alphas) > 1 else [])
    others = "the others at their best; " if len(varied) > 1 else ""
    return finish(figure, pd.concat(tables), study, remarks, others + "after " + _rounds(study))


def over_epochs(study: Study, key: str = "training.epochs") -> Picture:
    """GA and LA over the local epochs E; colour is the case, dash the weight lambda of its prior loss."""
    if problem := lacking(study, key):
        return style.empty(problem, study)
    study, remarks = comparisons.largest(study)
    values, strengths = values_of(study.runs, key), values_of(study.runs, "method.strength")
    dashes = style.dashes([None, *strengths] if len(strengths) > 1 else [None])
    figure, panels = style.picture(2, sharex=True)
    # By GA, also for LA: one setting cannot be good in one panel and bad in the other.
    keys = [key, "method.strength"] if "method.strength" in study.runs else [key]
    best = comparisons.best_of_grid(study, GA, keys)
    looks = looks_of(best)
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
    style.legend(figure, _case_entries(looks), strength_entries)
    return finish(figure, best, study, remarks, "after " + _rounds(study))


def _measured(best: pd.DataFrame, runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The chosen settings with another metric of the same runs."""
    from analysis.statistics import mean_interval

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
        ground = panel.get_xaxis_transform()
        panel.plot(died, np.full(len(died), 0.03), "x", color=look.colour, transform=ground, clip_on=False, ms=4)


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


def looks_of(best: pd.DataFrame) -> dict[str, Look]:
    """Colour and marker of every case."""
    methods = {case: DISPLAY.get(m, m) for case, m in zip(best["case"], best["method"], strict=True)}
    return style.looks(list(dict.fromkeys(best["case"])), methods)


def _case_entries(looks: Mapping[str, Look]) -> list[tuple[str, dict[str, Any]]]:
    return [(case, {"color": look.colour, "marker": look.marker}) for case, look in looks.items()]


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
