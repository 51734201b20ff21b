"""Pictures that a run leaves: learning curves, and who holds which classes."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from torch import Tensor

from fl_lightning.runs.labels import take_literally
from fl_lightning.system.atomic import write_atomically

# Okabe and Ito's palette: distinguishable with every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")

# From few to many. The palest colours are left out: a single sample must differ from white, which is none.
BLUES = ListedColormap(colormaps["YlGnBu"](np.linspace(0.2, 1.0, 256)))


def learning_curves(curves: Mapping[str, Sequence[Mapping[str, float]]], title: str = "") -> Figure:
    """GA and LA over the rounds, one colour per label.

    Args:
        curves: For every label the metrics of its rounds, with `GA` and `LA`.
        title: Above both panels.
    """
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True)
    for panel, metric, name in zip(
        panels, ("GA", "LA"), ("GA: the aggregated model", "LA: the clients' models"), strict=True
    ):
        for colour, (label, rounds) in zip(_cycle(len(curves)), curves.items(), strict=True):
            numbers = range(1, len(rounds) + 1)
            marker = "o" if len(rounds) <= 30 else ""
            panel.plot(
                numbers, [100 * r[metric] for r in rounds], marker=marker, ms=3, lw=1.5, color=colour, label=label
            )
        panel.set(xlabel="round", ylabel="test accuracy (%)", title=name)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    if title:
        figure.suptitle(title)
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
    clients, classes = (max(counts.shape[axis] for counts in splits.values()) for axis in (0, 1))
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
    largest = max(2, *(int(counts.max()) for counts in splits.values()))
    # Logarithmic, so that one sample can be seen beside thousands; white is none.
    scale = LogNorm(1, largest)
    for panel, (title, counts) in zip(panels, splits.items(), strict=False):
        held = np.ma.masked_equal(counts.numpy().T, 0)
        cells = panel.imshow(held, cmap=BLUES, norm=scale, aspect="auto", origin="lower", interpolation="none")
        empty = np.flatnonzero(counts.numpy().sum(1) == 0)
        panel.scatter(empty, np.full(len(empty), -1.0), marker="x", s=12, color=COLOURS[1], linewidths=1)
        note = f"\nwithout samples (crosses): {len(empty)}" if len(empty) else ""
        panel.set(xlabel=f"client{note}", ylabel="class")
        panel.set_title(textwrap.fill(title, int(11 * width)), fontsize="medium")
        panel.set(xlim=(-0.5, len(counts) - 0.5), ylim=(-1.5 if len(empty) else -0.5, counts.shape[1] - 0.5))
        panel.set_xticks(_ticks(len(counts)))
        panel.set_yticks(_ticks(counts.shape[1]))
        if max(counts.shape) <= 60:  # more lines between the cells would hide them
            panel.set_xticks(np.arange(0.5, len(counts) - 1), minor=True)
            panel.set_yticks(np.arange(0.5, counts.shape[1] - 1), minor=True)
            panel.grid(which="minor", color="0.9", linewidth=0.5)
            panel.tick_params(which="minor", length=0)
    for panel in panels[len(splits) :]:
        panel.set_visible(False)
    figure.colorbar(cells, ax=panels, label="samples", format=StrMethodFormatter("{x:,.0f}"))
    return whole


def _thumbnails(figure: SubFigure, images: Mapping[str, Tensor]) -> None:
    """Images in a row, each in its own range of brightness."""
    for panel, (name, image) in zip(figure.subplots(1, len(images), squeeze=False).flat, images.items(), strict=True):
        pixels = image.movedim(0, -1).float()
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp(min=1e-9)
        panel.imshow((pixels if pixels.shape[-1] == 3 else pixels[..., 0]).numpy(), cmap="gray")
        panel.set_title(name, fontsize="x-small")
        panel.set_axis_off()


def _ticks(number: int) -> list[int]:
    """Of an axis numbered from 0: all numbers of a short one, round ones of a long one."""
    if number <= 20:
        return list(range(number))
    return [int(tick) for tick in MaxNLocator(nbins=10, integer=True).tick_values(0, number - 1) if 0 <= tick < number]


def save(figure: Figure, path: Path) -> Path:
    """Write a picture as PNG."""
    take_literally(figure)
    FigureCanvasAgg(figure)
    content = io.BytesIO()
    figure.savefig(content, dpi=150)
    write_atomically(path, content.getvalue())
    return path


def _cycle(number: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(number)]
