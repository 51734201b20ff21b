"""Pictures that a run leaves: learning curves, the classes of the clients, calibration."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.metrics.metric import AXES, GA, LA
from fl_lightning.runs.plotting import calibration_panel, palette, strokes
from fl_lightning.system.atomic import write_atomically

# Of more clients than that a picture shows some, evenly spread: it has no room for more, and drawing takes long.
MOST_CLIENTS = 500
TITLES = {name: AXES[name] for name in (GA, LA)}


def learning_curves(method: str, rounds: Sequence[Mapping[str, float]], title: str = "") -> Figure:
    """GA and LA over the rounds of one run, in the colour that its method has in all pictures.

    Args:
        method: Its name.
        rounds: The metrics of every round, with `GA` and `LA` where they were measured.
        title: Above both panels.
    """
    shown = palette.DISPLAY.get(method, method)
    look = palette.looks([shown], {})[shown]
    figure = Figure(figsize=(7.0, 2.6), layout="constrained")
    measured = [metric for metric in TITLES if any(metric in metrics for metrics in rounds)]
    panels = figure.subplots(1, len(measured), sharex=True, squeeze=False)[0]
    for panel, metric in zip(panels, measured, strict=True):
        strokes.dress(panel)
        known = [(number, 100 * r[metric]) for number, r in enumerate(rounds, start=1) if metric in r]
        strokes.curve(panel, [number for number, _ in known], [value for _, value in known], look)
        strokes.rounds(panel, len(rounds))
        strokes.percent(panel)
        panel.set(xlabel="communication round", ylabel=TITLES[metric])
    if title:
        figure.suptitle(title, fontsize=8)
    return figure


def partition(counts: Tensor, title: str = "", examples: Mapping[str, Tensor] | None = None) -> Figure:
    """Clients by classes: the colour is the number of samples.

    Args:
        counts: Samples per client (row) and class (column).
        title: Above the picture.
        examples: Images of shape (channels, height, width) below it, by what to call them.
    """
    return partitions({title: counts}, examples)


def partitions(splits: Mapping[str, Tensor], examples: Mapping[str, Tensor] | None = None) -> Figure:
    """Several partitions side by side, all in one scale of colours.

    Args:
        splits: For every title the samples per client (row) and class (column).
        examples: Images of shape (channels, height, width) below them, by what to call them.
    """
    steps = {title: -(-len(counts) // MOST_CLIENTS) for title, counts in splits.items()}
    clients = max(len(counts) // steps[title] for title, counts in splits.items())
    classes = max(counts.shape[1] for counts in splits.values())
    alone = len(splits) == 1
    # Inches of a panel: cells as large as fit, and as many panels in a row as fit a screen.
    width = max(5.5 if alone else 3.0, min(12.0 if alone else 6.0, 1.0 + 0.3 * clients))
    height = max(2.4, min(12.0 if alone else 6.0, 1.0 + 0.25 * classes))
    columns = min(len(splits), max(1, int(15 / width)))
    rows = -(-len(splits) // columns)
    size = (columns * width + 1.0, rows * height)
    strip = 1.2 if examples else 0.0
    whole = Figure(figsize=(size[0], size[1] + strip), layout="constrained")
    figure: Figure | SubFigure = whole
    if examples:
        figure, below = whole.subfigures(2, 1, squeeze=False, height_ratios=[size[1], strip])[:, 0]
        _thumbnails(below, examples)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    scale = strokes.samples_scale(max(int(counts.max()) for counts in splits.values()))
    for panel, (title, counts) in zip(panels, splits.items(), strict=False):
        strokes.dress(panel)
        step, empty = steps[title], int((counts.sum(1) == 0).sum())
        strokes.cells(panel, counts[::step].numpy(), scale)
        shown = "client" if step == 1 else f"client, one in {step} of {len(counts):,}"
        panel.set(xlabel=shown + (f"\nwithout samples (crosses): {empty:,}" if empty else ""), ylabel="class")
        if step > 1:
            ticks = [int(tick) for tick in panel.get_xticks()]
            panel.set_xticks(ticks, labels=[f"{tick * step:,}" for tick in ticks])
        panel.set_title(textwrap.fill(title, int(13 * width)), fontsize=9)
    for panel in panels[len(splits) :]:
        panel.set_visible(False)
    strokes.samples_bar(figure, panels, scale)
    return whole


def uncertainty(arrays: Mapping[str, NDArray[Any]], metrics: Mapping[str, float], title: str = "") -> Figure:
    """Reliability, risk and coverage, and entropies in and out of distribution, of all kinds of prediction of a run.

    Args:
        arrays: The curves, `fl_lightning.metrics.uncertainty.evaluate.Findings.arrays`.
        metrics: The numbers, for the legend.
        title: Above the panels.
    """
    kinds = calibration_panel.kinds_of(arrays)
    shown = "probit" if "probit" in kinds else kinds[-1]
    strange = [name.split("/")[2] for name in arrays if name.startswith(f"{shown}/entropy/")]
    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    reliability, risk, entropies = figure.subplots(1, 3)
    for panel in (reliability, risk, entropies):
        strokes.dress(panel)
    looks = calibration_panel.looks_of(kinds)
    calibration_panel.reliability(reliability, arrays, looks)
    calibration_panel.risk(risk, arrays, looks)
    calibration_panel.entropies(entropies, arrays, shown, strange)
    for kind, look in looks.items():
        label = f"{kind}: ECE {metrics[f'{kind}/ECE']:.3f}, NLL {metrics[f'{kind}/NLL']:.3f}"
        risk.plot([], [], color=look.colour, marker=look.marker, ms=3.2, lw=1.3, label=label)
    risk.legend(fontsize=6, frameon=False, loc="upper left")
    if title:
        figure.suptitle(title, fontsize=8)
    return figure


def _thumbnails(figure: SubFigure, images: Mapping[str, Tensor]) -> None:
    """Images in a row, each in its own range of brightness."""
    for panel, (name, image) in zip(figure.subplots(1, len(images), squeeze=False).flat, images.items(), strict=True):
        pixels = image.movedim(0, -1).float()
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-9)
        panel.imshow((pixels if pixels.shape[-1] == 3 else pixels[..., 0]).numpy(), cmap="gray")
        panel.set_title(name, fontsize="x-small")
        panel.set_axis_off()


def save(figure: Figure, path: Path) -> Path:
    """Write a picture as PNG."""
    strokes.take_literally(figure)
    FigureCanvasAgg(figure)
    content = io.BytesIO()
    figure.savefig(content, dpi=180)
    write_atomically(path, content.getvalue())
    return path
