"""What all pictures have in common: the dress of a panel, curves and bands, cells, axes of rounds and of percent."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.mathtext import MathTextParser
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import ArrayLike, NDArray

from fl_lightning.runs.plotting import palette
from fl_lightning.runs.plotting.palette import Look

# Markers of one line, about.
MOST_MARKERS = 8
# Clients or classes; with more of them the lines between cells would hide the cells.
MOST_SEPARATED = 60


def dress(panel: Axes) -> None:
    """Grid, spines and colours of one panel."""
    colours = palette.current()
    panel.set_facecolor(colours.paper)
    panel.grid(color=colours.grid, linewidth=0.5)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(colours.faint)
    panel.tick_params(colors=colours.faint, labelcolor=colours.ink, labelsize=7, length=2.5)
    for axis in (panel.xaxis, panel.yaxis):
        axis.label.set(color=colours.ink, fontsize=8)
    panel.title.set(color=colours.ink, fontsize=8)


def curve(panel: Axes, x: ArrayLike, y: ArrayLike, look: Look, dash: Any = "solid", longest: int = 0) -> None:
    """One line, with its marker now and then.

    Args:
        panel: Where.
        x: Along the axis.
        y: The values.
        look: Colour and marker.
        dash: Of the line.
        longest: Points of the longest line of the picture; all have their markers equally far apart.
    """
    every = max(1, round((longest or np.size(x)) / MOST_MARKERS))
    panel.plot(x, y, color=look.colour, linestyle=dash, lw=1.3, marker=look.marker, ms=3.2, markevery=every)


def band(panel: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, colour: str, lines: int) -> None:
    """The spread around a line; the more lines there are, the less it may hide them."""
    opacity = 0.16 if lines <= 4 else 0.1 if lines <= 8 else 0.05
    panel.fill_between(x, low, high, color=colour, alpha=opacity, linewidth=0)


def rounds(panel: Axes, last: int) -> None:
    """The x axis of a panel counts rounds."""
    panel.set_xticks(round_ticks(last))


def round_ticks(last: int, most: int = 7) -> list[int]:
    """The first round, the last, and round numbers between them.

    >>> round_ticks(20), round_ticks(13), round_ticks(100), round_ticks(1)
    ([1, 5, 10, 15, 20], [1, 2, 4, 6, 8, 10, 13], [1, 20, 40, 60, 80, 100], [1])
    """
    steps = (multiple * 10**power for power in count() for multiple in (1, 2, 5))
    step = next(step for step in steps if last / step <= most)
    between = [number for number in range(step, last, step) if number - 1 >= step / 2 < last - number]
    return sorted({1, *between, last})


def percent(panel: Axes) -> None:
    """The y axis of a panel is a percentage: there is nothing above 100, not even a line of the grid."""
    if panel.get_ylim()[1] > 100:
        panel.set_ylim(top=100)
        for line in panel.lines:
            line.set_clip_on(False)  # or half of a line at 100 would be missing


def cells(panel: Axes, counts: NDArray[Any], scale: LogNorm, ticks: int = 20) -> None:
    """Clients by classes: the colour is the number of samples, blank means 0, a cross marks a client without samples.

    Cells of one colour are one path: an SVG of thousands of them stays small, sharp and free to change its colours.

    Args:
        panel: Where.
        counts: Samples per client (row) and class (column).
        scale: From samples to [0, 1]; logarithmic, so that one sample can be seen beside thousands.
        ticks: More than so many clients or classes are not all numbered.
    """
    colours, shades = palette.current(), palette.shades()
    clients, classes = counts.shape
    separated = max(clients, classes) <= MOST_SEPARATED
    client, label = np.nonzero(counts)
    level = (np.asarray(scale(counts[client, label])) * len(shades)).astype(int).clip(max=len(shades) - 1)
    corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
    edge: dict[str, Any] = {"edgecolor": colours.paper, "linewidth": 0.4} if separated else {"linewidth": 0}
    for place, shade in enumerate(shades):
        centres = np.stack([client, label], axis=1)[level == place]
        if len(centres):
            path = Path.make_compound_path_from_polys(centres[:, None] + corners)
            panel.add_patch(PathPatch(path, facecolor=shade, antialiased=separated, **edge))
    empty = np.flatnonzero(counts.sum(1) == 0)
    panel.scatter(empty, np.full(len(empty), -1.0), marker="x", s=12, color=colours.faint, linewidths=1)
    panel.set(xlim=(-0.5, clients - 0.5), ylim=(-1.5 if len(empty) else -0.5, classes - 0.5))
    panel.set_xticks(_ticks(clients, ticks))
    panel.set_yticks(_ticks(classes, ticks))
    panel.grid(visible=False)
    if separated:
        panel.set_xticks(np.arange(0.5, clients - 1), minor=True)
        panel.set_yticks(np.arange(-0.5 if len(empty) else 0.5, classes - 1), minor=True)
        panel.grid(which="minor", color=colours.grid, linewidth=0.5)
        panel.tick_params(which="minor", length=0)


def samples_scale(largest: int) -> LogNorm:
    """From one sample to the most that any cell has."""
    return LogNorm(1, max(2, largest))


def samples_bar(figure: Figure | SubFigure, panels: Sequence[Axes], scale: LogNorm, size: float = 7) -> None:
    """What the colours of `cells` mean, beside all panels."""
    colours = palette.current()
    shown = ScalarMappable(scale, ListedColormap(palette.shades()))
    bar = figure.colorbar(shown, ax=panels, label="samples", format=StrMethodFormatter("{x:,.0f}"))
    bar.ax.tick_params(labelsize=size - 1, colors=colours.faint, labelcolor=colours.ink, which="both")
    bar.ax.yaxis.label.set(color=colours.ink, fontsize=size)
    bar.outline.set_visible(False)


def _ticks(number: int, most: int) -> list[int]:
    """Of an axis numbered from 0: all numbers of a short one, round ones of a long one."""
    if number <= most:
        return list(range(number))
    found = MaxNLocator(nbins=max(4, most // 2), integer=True).tick_values(0, number - 1)
    return [int(tick) for tick in found if 0 <= tick < number]


def take_literally(figure: Figure) -> None:
    r"""Show every text of a figure that matplotlib cannot read as mathematics as it is written.

    Two dollars make a formula, and a broken one (`$\frac{$`) stops the drawing of everything.
    """
    texts = [*figure.findobj(Text)]
    for panel in figure.axes:  # the labels of ticks are empty until they are asked for
        texts += [text for axis in (panel.xaxis, panel.yaxis) for text in axis.get_ticklabels(which="both")]
    parser = MathTextParser("path")
    for text in texts:
        words = text.get_text()
        try:
            for line in words.split("\n") if words.count("$") > 1 else ():
                parser.parse(line)
        except ValueError:
            text.set_parse_math(False)
