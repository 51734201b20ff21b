"""One look for all figures: colour is the method, dash is the setting; legible in one column, light and dark.

Colours and strokes are those of every picture (`palette` and `strokes` of `fl_lightning.runs.plotting`). A figure is
drawn in light colours; `recoloured` turns its SVG into a dark one, or into one that follows the page it stands on.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from analysis.statistics import MIN_FOR_INTERVAL
from analysis.study import Study
from fl_lightning.runs.plotting import palette
from fl_lightning.runs.plotting.palette import DISPLAY, Look, Theme
from fl_lightning.runs.plotting.palette import theme as theme  # for users, beside the figures
from fl_lightning.runs.plotting.strokes import dress, take_literally

# Inches: one column of a two-column paper, and both.
COLUMN, PAGE = 3.5, 7.16
# Characters of a label that fit into a column.
LEGEND_WIDTH = 62
# So many lines of a legend find room in the height of a figure; each further one needs so many inches.
LEGEND_LINES, LEGEND_LINE = 5, 0.15


class Picture(Figure):
    """A figure that knows what must be said about it.

    Attributes:
        remarks: What was left out, is partial or uncertain.
        empty: Whether there was nothing to draw; the first remark says why.
        run_ids: The runs behind it.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.remarks: list[str] = []
        self.empty = False
        self.run_ids: list[str] = []

    def savefig(self, *arguments: Any, **options: Any) -> None:
        """Labels are a user's words, which need not be mathematics."""
        take_literally(self)
        super().savefig(*arguments, **options)

    def _repr_png_(self) -> bytes:
        """For notebooks, which show a figure only if pyplot made it."""
        FigureCanvasAgg(self)
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=160)
        return content.getvalue()


def picture(
    panels: int = 1, height: float = 2.3, wide: bool = False, across: int = 1, **options: Any
) -> tuple[Picture, list[Axes]]:
    """An empty figure with panels above each other, or side by side.

    Args:
        panels: How many.
        height: Of one panel, in inches.
        wide: Over both columns of a paper, with the panels side by side.
        across: So many in a row otherwise; more than one go over both columns of a paper, too.
        options: Of `Figure.subplots`.
    """
    colours = palette.current()
    rows, columns = (1, panels) if wide else (-(-panels // across), across)
    with mpl.rc_context(_settings(colours)):
        size = (PAGE if columns > 1 or wide else COLUMN, rows * height + 0.35)
        figure = Picture(figsize=size, layout="constrained", facecolor=colours.paper)
        axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in axes[panels:]:
        panel.remove()
    for panel in axes[:panels]:
        dress(panel)
    return figure, axes[:panels]


def empty(reason: str, study: Study | None = None) -> Picture:
    """A figure that says why there is none; an empty study knows better."""
    if study is not None and not len(study.runs) and study.remarks:
        reason = "; ".join(study.remarks)
    figure, (panel,) = picture(height=1.0)
    panel.set_axis_off()
    text = textwrap.fill(f"Nothing to show: {reason}", 58)
    panel.text(0.5, 0.5, text, ha="center", va="center", fontsize=7, color=faint())
    figure.remarks, figure.empty = [reason], True
    return figure


def logarithmic(panel: Axes) -> None:
    """A logarithmic x axis with plain numbers, also where it spans less than a decade."""
    low, high = panel.get_xlim()
    narrow = low > 0 and math.log10(high / low) < 2
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def legend(figure: Picture, *groups: Sequence[tuple[str, Mapping[str, Any]]], columns: int = 0) -> None:
    """Below the panels, so that it never hides data; every group starts in a new row unless all fit in one.

    Args:
        figure: Where.
        groups: Labels and the line properties that stand for them.
        columns: How many side by side; 0 finds out.
    """
    groups = tuple(group for group in groups if group)
    if not groups:
        return
    colours = palette.current()
    longest = max(len(label) for group in groups for label, _ in group)
    total = sum(map(len, groups))
    columns = columns or max(1, min(total, 4, int(62 / (longest + 7))))
    nothing: tuple[str, Mapping[str, Any]] = ("", {"linestyle": "none"})
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for group in groups:
        rows += [*group, *[nothing] * (-len(group) % columns if total > columns else 0)]
    # Matplotlib fills columns first; we read rows.
    entries = [rows[i] for first in range(columns) for i in range(first, len(rows), columns)]
    labels = [textwrap.fill(label, LEGEND_WIDTH) for label, _ in entries]
    lines = sum(label.count("\n") + 1 for label in labels) / columns
    # The panels keep their height however many entries there are.
    figure.set_size_inches(figure.get_figwidth(), figure.get_figheight() + max(0, lines - LEGEND_LINES) * LEGEND_LINE)
    figure.legend(
        [Line2D([], [], **{"color": colours.faint, "lw": 1.3, "ms": 4, **look}) for _, look in entries],
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=7,
        labelcolor=colours.ink,
        handlelength=2.6,
        columnspacing=1.2,
        handletextpad=0.5,
        borderaxespad=0.1,
    )


def seeds(numbers: Sequence[int], banded: bool = True) -> str:
    """How many seeds a figure rests on, and what its bands are, if it has some.

    >>> seeds([3, 3]), seeds([1]), seeds([5, 30])
    ('mean of n = 3 seeds, band: their range', 'n = 1 seed', 'mean of n = 5 to 30 seeds, band: 95 % interval')
    """
    known = sorted({number for number in numbers if number > 0})
    if not known:
        return "no run has ended"
    if known == [1]:
        return "n = 1 seed"
    n = f"{known[0]} to {known[-1]}" if len(known) > 1 else f"{known[0]}"
    band = f", band: {'95 % interval' if known[0] >= MIN_FOR_INTERVAL else 'their range'}"
    return f"mean of n = {n} seeds{band if banded else ''}"


def looks_of(table: pd.DataFrame) -> dict[str, Look]:
    """Colour and marker of every case of a table that has the columns `case` and `method`."""
    methods = {case: DISPLAY.get(name, name) for case, name in zip(table["case"], table["method"], strict=True)}
    return palette.looks(list(dict.fromkeys(table["case"])), methods)


def case_entries(looks: Mapping[str, Look]) -> list[tuple[str, dict[str, Any]]]:
    """The cases as entries of a legend."""
    return [(case, {"color": look.colour, "marker": look.marker}) for case, look in looks.items()]


def headline(figure: Picture, text: str) -> None:
    """What the figure rests on, in small print above it: how many seeds, which settings."""
    figure.suptitle(textwrap.fill(text, 70), fontsize=6.5, color=faint(), x=0.02, ha="left")


def ink() -> str:
    """The colour of text."""
    return palette.current().ink


def faint() -> str:
    """The colour of what is less important."""
    return palette.current().faint


def paper() -> str:
    """The colour of the background."""
    return palette.current().paper


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a light figure as SVG, PDF and PNG, and as SVG for dark pages."""
    svg = as_svg(figure, stem.name)
    figure.set_layout_engine("none")  # it has its places now; finding them again takes most of the time
    paths = [stem.with_suffix(f".{kind}") for kind in ("svg", "pdf", "png")]
    dark = stem.with_name(f"{stem.name}-dark.svg")
    paths[0].write_text(svg, encoding="utf-8")
    dark.write_text(recoloured(svg, lambda light, dark: dark), encoding="utf-8")
    figure.savefig(paths[1], metadata={"CreationDate": None})
    FigureCanvasAgg(figure)
    figure.savefig(paths[2], dpi=300)
    return [*paths, dark]


def as_svg(figure: Figure, name: str) -> str:
    """SVG with real text and ids of its own, so that several can stand on one page."""
    text = io.StringIO()
    fonts = "DejaVu Sans, Verdana, Arial, sans-serif"
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace("'DejaVu Sans'", fonts)
    # Ids such as figure_1 and axes_1 are the same in every file.
    return re.sub(r'(id="|xlink:href="#|url\(#)', lambda found: f"{found[1]}{name}-", svg)


def recoloured(svg: str, choose: Callable[[str, str], str]) -> str:
    """An SVG of a light figure in other colours.

    Args:
        svg: The light one.
        choose: Given the light colour and the dark one, what to write.
    """
    partners = palette.pairs()
    known = re.compile("|".join(partners))
    return known.sub(lambda found: choose(found[0], partners[found[0]]), svg)


def _settings(colours: Theme) -> Any:
    return {
        "font.size": 8,
        "axes.edgecolor": colours.faint,
        "axes.labelcolor": colours.ink,
        "text.color": colours.ink,
        "figure.constrained_layout.h_pad": 0.03,
        "figure.constrained_layout.w_pad": 0.03,
    }
