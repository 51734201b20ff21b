"""Pictures that a run leaves: learning curves, and who holds which classes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

# Okabe and Ito's palette: distinguishable with every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


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


def partition(counts: Tensor, title: str = "") -> Figure:
    """Clients by classes: the area of a dot is the number of samples.

    Args:
        counts: Samples per client (row) and class (column).
        title: Above the picture.
    """
    clients, classes = counts.shape
    shown = counts.numpy()
    figure = Figure(figsize=(min(12, 1.5 + 0.4 * clients), min(12, 1.5 + 0.35 * classes)), layout="constrained")
    panel = figure.subplots()
    x, y = np.meshgrid(np.arange(clients), np.arange(classes), indexing="ij")
    largest = max(int(shown.max()), 1)
    panel.scatter(x, y, s=260 * shown / largest * min(1, 25 / clients), color=COLOURS[0], linewidths=0)
    panel.set(xlabel="client", ylabel="class", xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3), title=title)
    panel.xaxis.set_major_locator(MaxNLocator(nbins=min(clients, 25), integer=True))
    panel.yaxis.set_major_locator(MaxNLocator(nbins=min(classes, 25), integer=True))
    panel.grid(alpha=0.2)
    panel.set_axisbelow(True)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a picture as PNG."""
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150)
    return path


def _cycle(number: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(number)]
