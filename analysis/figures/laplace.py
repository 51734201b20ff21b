"""The study of curvatures: full matrix, eigenvalues, diagonal, each online and offline, beside the plain average.

Colour is the form of the curvature, dash whether it was taken along the path (online) or at its end (offline).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from analysis import columns, comparisons, style
from analysis.statistics import mean_band
from analysis.study import Study
from analysis.style import Picture
from fl_lightning.metrics.metric import AXES
from fl_lightning.runs.plotting import palette, strokes
from fl_lightning.runs.plotting.palette import Look

# The diagonal is FOLA itself and keeps its colour; the plain average is FedAvg's.
FORMS: Mapping[str, tuple[str, str]] = {
    "full": ("full matrix", "FedCurv"),
    "e_full": ("eigenvalues (e-full)", "SCAFFOLD"),
    "diagonal": ("diagonal Fisher", "FOLA"),
    "none": ("average (FedAvg)", "FedAvg"),
}
STYLES = {"online": palette.DASHES[0], "offline": palette.DASHES[1], "none": palette.DASHES[0]}


class Kind(NamedTuple):
    """A form of curvature and how it is evaluated."""

    form: str
    evaluation: str


def curvatures(study: Study) -> Picture:
    """GA and LA over the rounds; colour is the form of the curvature, dash how it is evaluated."""
    return _over_rounds(study, AXES, 100)


def cosine_of_precisions(study: Study) -> Picture:
    """The paper's normalisation decides the answer for full matrices, so both are shown."""
    names = {"precision_cosine_minmax": "cosine, minimum subtracted (paper)", "precision_cosine": "cosine similarity"}
    if not any(name in study.rounds and study.rounds[name].notna().any() for name in names):
        return style.empty("no run has measured the cosine between its clients' precisions; FOLA does", study)
    return _over_rounds(study, names, 1)


def ridge_curves(study: Study) -> Picture:
    """From client 2's model to client 1's, on the ridge of their posteriors or on the straight line.

    Args:
        study: From `arrays.ridges`: with the further columns `round`, `share` (pi_1), `accuracy`, and `path`, which is
            `ridge` or `line` (the straight line of FedAvg).
    """
    ridges = study.runs
    if not len(ridges):
        return style.empty("no run has probed the ridge; set probe.ridge_rounds, as the study laplace does", study)
    probed = sorted(ridges["round"].unique())
    figure, panels = style.picture(len(probed), sharex=True, height=2.1)
    shown: dict[Kind, Any] = {}
    numbers: set[int] = set()
    for panel, number in zip(panels, probed, strict=True):
        now = ridges.loc[ridges["round"].eq(number)]
        for kind, mine in _kinds(now):
            path = "line" if kind.form == "none" else "ridge"
            wide = mine.loc[mine["path"].eq(path)].pivot(index="run_id", columns="share", values="accuracy")
            if len(wide):
                shown[kind] = None
                numbers.add(len(wide))
                _curve(panel, wide.columns.to_numpy(), 100 * wide.to_numpy(), kind)
        panel.set_ylabel(f"accuracy (%), round {number}")
        strokes.percent(panel)
    panels[-1].set_xlabel("share $π_1$ of client 1 (0: client 2's model, 1: client 1's)")
    _legend(figure, list(shown))
    style.headline(figure, style.seeds(sorted(numbers)))
    figure.remarks = list(study.remarks)
    figure.run_ids = list(dict.fromkeys(ridges["run_id"]))
    return figure


def precision_matrix(matrix: ArrayLike, name: str = "") -> Picture:
    """What a diagonal leaves out: entries away from the diagonal couple parameters. Scaled to lie between 0 and 1.

    Args:
        matrix: Rows and columns of the first parameters, or only their diagonal.
        name: Whose precision it is.
    """
    values = np.asarray(matrix, dtype=float)
    if not values.size:
        return style.empty("no run has saved a picture of its precision; set probe.ridge_rounds")
    if values.ndim == 1:
        figure, (panel,) = style.picture()
        panel.plot(values, color=palette.looks(["FOLA"], {})["FOLA"].colour, lw=0.6)
        panel.set(xlabel="parameter", ylabel="normalised precision")
        style.headline(figure, name)
        return figure
    figure, (panel,) = style.picture(height=2.9)
    panel.grid(visible=False)
    # Most entries are tiny: the ends of the colours are where 98 % of what differs from the usual entry lies.
    usual = float(np.median(values))
    reach = float(np.quantile(np.abs(values - usual), 0.98)) or 1.0
    low, high = max(values.min(), usual - reach), min(values.max(), usual + reach)
    scale = TwoSlopeNorm(usual, min(low, usual - 1e-9), max(high, usual + 1e-9))
    cells = panel.imshow(values, cmap="RdBu_r", norm=scale, interpolation="nearest")
    panel.set(xlabel="parameter", ylabel="parameter")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    bar = figure.colorbar(cells, ax=panel, label="normalised precision", extend="both", shrink=0.9)
    bar.ax.tick_params(labelsize=7, colors=style.faint(), labelcolor=style.ink())
    bar.ax.yaxis.label.set(color=style.ink(), fontsize=8)
    bar.ax.yaxis.get_offset_text().set(color=style.ink(), fontsize=7)
    bar.outline.set_visible(False)
    style.headline(figure, f"{name}; colours centred on the median entry, {usual:.3g}")
    return figure


def _over_rounds(study: Study, metrics: Mapping[str, str], scale: float) -> Picture:
    if not len(study.rounds):
        return style.empty("there are no runs", study)
    study, remarks = comparisons.largest(study)
    rounds = study.rounds
    measured = [metric for metric in metrics if metric in rounds]
    figure, panels = style.picture(len(measured), sharex=True)
    shown: dict[Kind, Any] = {}
    numbers: set[int] = set()
    for panel, metric in zip(panels, measured, strict=True):
        for kind, mine in _kinds(rounds.loc[rounds[metric].notna()]):
            ended = mine.loc[mine["ended"]]
            wide = ended.pivot(index="run_id", columns="round", values=metric)
            wide = wide[wide.columns[wide.notna().all()]]
            if wide.size:
                shown[kind] = None
                numbers.add(len(wide))
                _curve(panel, wide.columns.to_numpy(), scale * wide.to_numpy(), kind)
            for _, run in mine.loc[~mine["ended"]].groupby("run_id"):
                shown[kind] = None
                panel.plot(run["round"], scale * run[metric], color=_look(kind.form).colour, lw=0.6, alpha=0.7)
                panel.plot(
                    run["round"].iloc[-1:], scale * run[metric].iloc[-1:], "X", color=_look(kind.form).colour, ms=4
                )
        panel.set_ylabel(metrics[metric])
        if metric in AXES:
            strokes.percent(panel)
    panels[-1].set_xlabel("communication round")
    strokes.rounds(panels[-1], int(rounds["round"].max()))
    _legend(figure, list(shown))
    style.headline(figure, style.seeds(sorted(numbers)))
    figure.remarks = [*study.remarks, *remarks]
    figure.run_ids = list(dict.fromkeys(rounds["run_id"]))
    return figure


def _kinds(table: pd.DataFrame) -> Iterator[tuple[Kind, pd.DataFrame]]:
    """The runs of every curvature, in the order of `FORMS`; methods without one count as average."""
    bayes = table["method"].isin(columns.FOLA) & ~table.get("method.aggregation", pd.Series("", table.index)).eq(
        "average"
    )
    form = table.get("method.curvature_form", pd.Series("diagonal", table.index)).where(bayes, "none").fillna("none")
    evaluation = table.get("method.curvature", pd.Series("online", table.index)).where(bayes, "none").fillna("none")
    for name in FORMS:
        for way in STYLES:
            mine = table.loc[form.eq(name) & evaluation.eq(way)]
            if len(mine):
                yield Kind(name, way), mine


def _curve(panel: Axes, x: Any, values: Any, kind: Kind) -> None:
    band = mean_band(values)
    look = _look(kind.form)
    strokes.curve(panel, x, band.mean, look, STYLES[kind.evaluation])
    if band.n > 1:
        strokes.band(panel, x, band.low, band.high, look.colour, len(FORMS))


def _look(form: str) -> Look:
    name = FORMS[form][1]
    return palette.looks([name], {})[name]


def _legend(figure: Picture, kinds: Sequence[Kind]) -> None:
    forms = [form for form in FORMS if any(kind.form == form for kind in kinds)]
    entries: list[tuple[str, Mapping[str, Any]]] = [
        (FORMS[form][0], {"color": _look(form).colour, "marker": _look(form).marker}) for form in forms
    ]
    ways = [way for way in ("online", "offline") if any(kind.evaluation == way for kind in kinds)]
    style.legend(figure, entries, [(way, {"linestyle": STYLES[way]}) for way in ways])
