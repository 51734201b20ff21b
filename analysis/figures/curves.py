"""Accuracy over rounds, bytes and seconds.

A line is the mean over seeds of the best setting of a case, its band the confidence interval, or with fewer than five
seeds their range. A panel with more than four lines has no bands, which would hide each other. Runs that diverged or
have not ended are thin lines of their own, with a cross or a ring at the end.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from analysis import comparisons, style
from analysis.statistics import Band, mean_band
from analysis.study import Study
from analysis.style import Picture
from fl_lightning.metrics.metric import AXES, GA, LA
from fl_lightning.runs.plotting import palette, strokes
from fl_lightning.runs.plotting.palette import Look

# More curves of runs without a result would hide the others.
MAX_LOOSE = 10
# With more lines in a panel, bands hide each other and the lines.
MOST_BANDS = 4


class Line(NamedTuple):
    """The runs behind one line.

    Attributes:
        case: Whose.
        value: Of the setting that the dash shows.
        results: Rounds of the runs that ended.
        loose: Rounds of runs that did not, or diverged.
    """

    case: str
    value: Any
    results: pd.DataFrame
    loose: pd.DataFrame


def learning_curves(
    study: Study, by: str | None = None, metrics: Sequence[str] = (GA, LA), wide: bool = False
) -> Picture:
    """GA is the accuracy of the server's model, LA the mean of the clients' models, weighted by their data.

    Args:
        study: The runs.
        by: The setting that the dash shows; by default a condition that varies, if one does.
        metrics: One panel each.
        wide: Over both columns of a paper, with the panels side by side.
    """
    return _draw(study, by, metrics, _rounds_axis, wide)


def curves_by_clients(study: Study) -> Picture:
    """GA over the rounds; colour is the method, dash the number of clients N, or one panel for each with many lines."""
    return _draw(study, "data.clients", (GA,), _rounds_axis)


def curves_by_alpha(study: Study) -> Picture:
    """GA over the rounds at the best setting of each method; colour is the method, dash the heterogeneity α, or one
    panel for each with many lines.
    """
    return _draw(study, "data.alpha", (GA,), _rounds_axis)


def online_against_offline(study: Study) -> Picture:
    """GA and LA over the rounds, with the Fisher taken along the local path, or once at its end."""
    return _draw(study, None, (GA, LA), _rounds_axis)


def prior_and_product(study: Study) -> Picture:
    """GA and LA over the rounds, for the product of posteriors and the plain average; dash is the strength λ of the
    prior loss, 0 is none.
    """
    return _draw(study, "method.strength", (GA, LA), _rounds_axis)


def personal_curves(study: Study) -> Picture:
    """Accuracy on the clients' own test sets: of the server's model before local training, of each client's model after
    it; the mean over clients.
    """
    return _draw(study, None, ("PA_before", "PA_after"), _rounds_axis, chosen_by=GA)


def against_bytes(study: Study, by: str | None = None, metrics: Sequence[str] = (GA,)) -> Picture:
    """What the server and all clients have sent: a method that sends twice as much per round is twice as far right."""
    return _draw(study, by, metrics, _bytes_axis)


def against_seconds(study: Study, by: str | None = None, metrics: Sequence[str] = (GA,)) -> Picture:
    """Time of training and aggregation on the machine that ran them, which may have been busy; the first round after a
    start also loads code and data.
    """
    return _draw(study, by, metrics, _seconds_axis)


class Axis(NamedTuple):
    """What runs along x.

    Attributes:
        values: x of every row of a table of rounds.
        label: With its unit.
        whole: Whether only whole numbers make sense.
    """

    values: "pd.Series[float]"
    label: str
    whole: bool = False


def _rounds_axis(rounds: pd.DataFrame) -> Axis:
    return Axis(rounds["round"].astype(float), "communication round", whole=True)


def _bytes_axis(rounds: pd.DataFrame) -> Axis:
    total = (rounds["bytes_down"] + rounds["bytes_up"]).groupby(rounds["run_id"]).cumsum()
    scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")) if total.max() >= s)
    return Axis(total / scale, f"communication ({unit})")


def _seconds_axis(rounds: pd.DataFrame) -> Axis:
    seconds = (rounds["seconds_local"] + rounds["seconds_server"]).groupby(rounds["run_id"]).cumsum()
    return Axis(seconds, "training and aggregation time (s)")


def _draw(
    study: Study,
    by: str | None,
    metrics: Sequence[str],
    axis_of: Callable[[pd.DataFrame], Axis],
    wide: bool = False,
    chosen_by: str | None = None,
) -> Picture:
    metrics, nothing = _measured(study.rounds, metrics, axis_of)
    if nothing:
        return style.empty(nothing, study)
    study = study.of(study.runs.loc[study.runs["run_id"].isin(study.rounds["run_id"])])
    by = by or _dash_setting(study)
    study, remarks = comparisons.largest(study, [by] if by else [])
    if axis_of is _bytes_axis:
        study, silent = _without_silent(study)
        remarks += silent
        if not len(study.rounds):
            return style.empty("these methods send nothing", study)
    axis = axis_of(study.rounds)
    rounds = study.rounds.assign(x=axis.values)
    chosen_by = chosen_by or metrics[0]
    lines, best = _lines(study, rounds, by, chosen_by)
    looks, dashes = _strokes_of(lines, best)
    parts = _parts(lines, dashes, metrics, by)
    most = max(len(part.lines) for part in parts)
    figure, panels = style.picture(len(parts), height=_height(len(parts), most), wide=wide, sharex=True)
    longest = int(rounds["round"].max())
    bands: list[Band] = []
    for panel, part in zip(panels, parts, strict=True):
        for line in part.lines:
            dash = "solid" if part.title else dashes[line.value]
            bands += _curve(panel, line, part.metric, looks[line.case], dash, longest, len(part.lines))
        panel.set_ylabel(AXES.get(part.metric, part.metric))
        panel.set_title(part.title, fontsize=7, color=style.ink(), loc="left")
        if part.metric in AXES:
            strokes.percent(panel)
    _label(panels if wide else panels[-1:], axis, rounds)
    _legend(figure, looks, {} if parts[0].title else dashes, by)
    loose = _loose_remarks(lines)
    basis = _basis(bands, best, chosen_by, most <= MOST_BANDS)
    style.headline(figure, basis + ("; " + "; ".join(loose) if loose else ""))
    about = [*comparisons.budget_remarks(best), *comparisons.confirmed_remarks(best)]
    figure.remarks = [*study.remarks, *remarks, *about, *loose]
    figure.run_ids = [
        str(run_id) for line in lines for part in (line.results, line.loose) for run_id in part["run_id"].unique()
    ]
    return figure


class Part(NamedTuple):
    """What one panel shows; without a title it shows all values, by their dashes."""

    metric: str
    lines: list[Line]
    title: str = ""


def _parts(lines: list[Line], dashes: Mapping[Any, Any], metrics: Sequence[str], by: str | None) -> list[Part]:
    """One panel for each metric; many lines of one metric go into a panel for each value instead."""
    if by is None or len(metrics) > 1 or len(lines) <= MOST_BANDS or len(dashes) < 2:
        return [Part(metric, lines) for metric in metrics]
    return [
        Part(metrics[0], mine, _in_words(by, value))
        for value in dashes
        if (mine := [line for line in lines if line.value is value or line.value == value])
    ]


def _height(panels: int, lines: int) -> float:
    """Of one panel, in inches."""
    return 1.7 if panels > 2 else 2.3 if lines <= 6 else 3.0


def _in_words(by: str, value: Any) -> str:
    return comparisons.in_words({by: value}) or f"no {comparisons.symbol(by)}"


def _measured(
    rounds: pd.DataFrame, metrics: Sequence[str], axis_of: Callable[[pd.DataFrame], Axis]
) -> tuple[list[str], str]:
    """The metrics that there are, and why there is nothing to draw; empty if there is something."""
    known = [metric for metric in metrics if metric in rounds and rounds[metric].notna().any()]
    if not len(rounds):
        return known, "no round has been measured yet"
    if not known:
        return known, f"no run has measured {', '.join(metrics)}"
    if axis_of is _bytes_axis and "bytes_down" not in rounds:
        return known, "no run has counted bytes"
    return known, ""


def _strokes_of(lines: Sequence[Line], best: pd.DataFrame) -> tuple[dict[str, Look], dict[Any, Any]]:
    """The look of every case, and the dash of every value."""
    values = sorted(dict.fromkeys(line.value for line in lines), key=comparisons.order)
    return style.looks_of(best), palette.dashes(values)


def _label(panels: Sequence[Axes], axis: Axis, rounds: pd.DataFrame) -> None:
    """What runs along x, below these panels; they share it."""
    label = axis.label
    if axis.whole:
        strokes.rounds(panels[-1], int(rounds["round"].max()))
    elif _far_apart(rounds):
        panels[-1].set_xscale("log")
        style.logarithmic(panels[-1])
        label = f"{label}, log scale"
    for panel in panels:
        panel.set_xlabel(label)


def _legend(figure: Picture, looks: Mapping[str, Look], dashes: Mapping[Any, Any], by: str | None) -> None:
    """Colours and markers of the cases, dashes of the values."""
    values = (
        []
        if by is None or len(dashes) < 2
        else [(_in_words(by, value), {"linestyle": dash}) for value, dash in dashes.items()]
    )
    style.legend(figure, style.case_entries(looks), values)


def _without_silent(study: Study) -> tuple[Study, list[str]]:
    """Without cases that send nothing, such as centralised training."""
    rounds = study.rounds
    sent = (rounds["bytes_down"] + rounds["bytes_up"]).groupby(rounds["case"]).transform("sum")
    silent = list(rounds.loc[sent.eq(0), "case"].unique())
    sending = study.of(study.runs.loc[~study.runs["case"].isin(silent)])
    return sending, [f"{', '.join(silent)} sends nothing and is not shown"] if silent else []


def _far_apart(rounds: pd.DataFrame) -> bool:
    """Whether some cases would be a vertical line at the left of the others."""
    ends = rounds.groupby(["case", "run_id"])["x"].max().groupby("case").mean()
    return bool(rounds["x"].min() > 0 and ends.max() > 20 * ends.min())


def _dash_setting(study: Study) -> str | None:
    candidates = [key for key in comparisons.conditions(study) if key != "federation.rounds"]
    return next((key for key in ("data.alpha", "data.clients") if key in candidates), next(iter(candidates), None))


def _lines(study: Study, rounds: pd.DataFrame, by: str | None, metric: str) -> tuple[list[Line], pd.DataFrame]:
    table = study.runs
    keys = [by] if by is not None and by in table else []
    best = comparisons.best_of_grid(study, metric, keys)
    settings = [key for key in comparisons.tuned(study) if key not in keys]
    lines = []
    for _, row in best.iterrows():
        mine = table.loc[table["case"].eq(row["case"])]
        for key in (*keys, *settings):
            same = mine[key].isna() if row[key] is None or row[key] != row[key] else mine[key].eq(row[key])
            mine = mine.loc[same]
        # A seed that ended more than once counts once; its other runs are left out.
        is_loose = ~mine["run_id"].isin(row["run_ids"]) & ~mine["ended"]
        loose = mine.loc[is_loose, "run_id"].iloc[:MAX_LOOSE]
        lines.append(
            Line(
                row["case"],
                row[keys[0]] if keys else None,
                rounds.loc[rounds["run_id"].isin(row["run_ids"])],
                rounds.loc[rounds["run_id"].isin(loose)],
            )
        )
    return lines, best


def _curve(panel: Axes, line: Line, metric: str, look: Look, dash: Any, longest: int, lines: int) -> Iterator[Band]:
    if len(line.results):
        wide = line.results.pivot(index="run_id", columns="round", values=metric)
        # A study may stop some seeds earlier than others, and not every round need be measured.
        wide = wide[wide.columns[wide.notna().all()]]
        if len(wide.columns):
            x = line.results.groupby("round")["x"].mean().reindex(wide.columns)
            band = mean_band(100 * wide.to_numpy())
            strokes.curve(panel, x, band.mean, look, dash, longest)
            if band.n > 1 and lines <= MOST_BANDS:
                strokes.band(panel, x, band.low, band.high, look.colour, lines)
            yield band
    for _, run in line.loose.dropna(subset=[metric]).groupby("run_id"):
        panel.plot(run["x"], 100 * run[metric], color=look.colour, linestyle=dash, lw=0.7, alpha=0.7)
        died = run["status"].iloc[0] == "diverged"
        face = look.colour if died else style.paper()
        panel.plot(run["x"].iloc[-1:], 100 * run[metric].iloc[-1:], "X" if died else "o", color=look.colour, mfc=face)


def _loose_remarks(lines: Sequence[Line]) -> list[str]:
    loose = pd.concat([line.loose for line in lines]).drop_duplicates("run_id") if lines else pd.DataFrame()
    if not len(loose):
        return []
    died = int(loose["status"].eq("diverged").sum())
    rest = len(loose) - died
    words = [f"{died} diverged (thin, to the cross)"] if died else []
    return [", ".join([*words, *([f"{rest} not ended (thin, to the ring)"] if rest else [])])]


def _basis(bands: Sequence[Band], best: pd.DataFrame, metric: str, banded: bool) -> str:
    """How many seeds, and what was chosen."""
    text = style.seeds([band.n for band in bands], banded)
    tried = sorted(set(best["tried"]))
    if tried[-1] > 1:
        settings = f"{tried[0]} to {tried[-1]}" if len(tried) > 1 else f"{tried[0]}"
        text += f"; best of {settings} settings by final {metric}"
    return text
