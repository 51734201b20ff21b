"""One look for all figures: colour is the method, dash is the setting; legible in one column, light and dark.

The colours are Okabe and Ito's and, for the rarer methods, Tol's: distinguishable with every kind of colour vision, and
every method has a marker of its own as well. A figure is drawn in light colours; `recoloured` turns its SVG into a dark
one, or into one that follows the page it stands on.
"""

import colorsys
import io
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from analysis.statistics import MIN_FOR_INTERVAL
from fl_lightning.runs.labels import take_literally

# Inches: one column of a two-column paper.
COLUMN = 3.5
# Characters of a label that fit into it.
LEGEND_WIDTH = 62
DASHES = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (9, 3)))
MARKERS = "osD^vP*Xph<>"


class Theme(NamedTuple):
    """Colours of everything but the data."""

    name: str
    paper: str
    ink: str
    faint: str
    grid: str


# No colour of a theme may be a colour of a method: `recoloured` tells them apart by it.
LIGHT = Theme("light", "#ffffff", "#1b1b1f", "#63636b", "#dcdce0")
DARK = Theme("dark", "#16161a", "#ececf1", "#a9a9b3", "#3a3a42")
THEMES = {"light": LIGHT, "dark": DARK}

# By method: colour on a light ground, on a dark ground, marker.
METHODS: Mapping[str, tuple[str, str, str]] = {
    "FedAvg": ("#0072b2", "#4aa8e0", "o"),
    "FOLA": ("#d55e00", "#ff8a3d", "s"),
    "FedCurv": ("#009e73", "#2fd0a2", "^"),
    "FedProx": ("#56b4e9", "#8fd3ff", "v"),
    "SCAFFOLD": ("#cc79a7", "#eaa1cb", "D"),
    "FedNova": ("#e69f00", "#ffdd80", "P"),
    "FedBE": ("#882255", "#d3669f", "X"),
    "FedPA": ("#44aa99", "#7fdccd", "<"),
    "FedSGD": ("#767a1f", "#c2c65a", ">"),
    "data sharing": ("#332288", "#8f82ea", "h"),
    "centralised": ("#77777f", "#b5b5bd", "*"),
}
# For what has no colour yet: other methods, and variants beside the first of a method.
SPARE = (
    ("#5b3a29", "#c59a83"),
    ("#7b61c9", "#b3a1f0"),
    ("#2f6f3e", "#7cc58d"),
    ("#a0304a", "#f0819a"),
    ("#1f8a9c", "#63cfe0"),
    ("#8a6d1a", "#d9bf66"),
    ("#9a4dad", "#d79be6"),
    ("#4a5568", "#a3b1c6"),
)
# An ordered quantity as colour, from small to large: dark enough on white, light enough on black.
SEQUENCE = ("#46327e", "#2c728e", "#27ad81", "#8fb32b", "#d0a70a", "#e8590c", "#c2255c")

_theme: ContextVar[Theme] = ContextVar("theme", default=LIGHT)


@contextmanager
def theme(name: str) -> Iterator[None]:
    """Figures that are made inside are `light` or `dark`."""
    token = _theme.set(THEMES[name])
    try:
        yield
    finally:
        _theme.reset(token)


class Look(NamedTuple):
    """How one contestant is drawn."""

    colour: str
    marker: str


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


def picture(panels: int = 1, height: float = 2.3, width: float = COLUMN, **options: Any) -> tuple[Picture, list[Axes]]:
    """An empty figure with panels above each other.

    Args:
        panels: How many.
        height: Of one panel, in inches.
        width: Of the figure.
        options: Of `Figure.subplots`.
    """
    colours = _theme.get()
    with mpl.rc_context(_settings(colours)):
        figure = Picture(figsize=(width, panels * height + 0.35), layout="constrained", facecolor=colours.paper)
        axes = list(figure.subplots(panels, 1, squeeze=False, **options).flat)
    for panel in axes:
        dress(panel)
    return figure, axes


def dress(panel: Axes) -> None:
    """Grid, spines and colours of one panel."""
    colours = _theme.get()
    panel.set_facecolor(colours.paper)
    panel.grid(color=colours.grid, linewidth=0.5)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(colours.faint)
    panel.tick_params(colors=colours.faint, labelcolor=colours.ink, labelsize=7, length=2.5)
    for axis in (panel.xaxis, panel.yaxis):
        axis.label.set(color=colours.ink, fontsize=8)
    panel.title.set(color=colours.ink, fontsize=8)


def empty(reason: str, table: pd.DataFrame | None = None) -> Picture:
    """A figure that says why there is none; an empty table knows better."""
    if table is not None and not len(table) and table.attrs.get("remarks"):
        reason = "; ".join(table.attrs["remarks"])
    figure, (panel,) = picture(height=1.0)
    panel.set_axis_off()
    text = textwrap.fill(f"Nothing to show: {reason}", 58)
    panel.text(0.5, 0.5, text, ha="center", va="center", fontsize=7, color=_theme.get().faint)
    figure.remarks, figure.empty = [reason], True
    return figure


def looks(cases: Sequence[str], methods: Mapping[str, str]) -> dict[str, Look]:
    """Colour and marker of every case. A method keeps its colour in all figures; further variants get others.

    Args:
        cases: In the order in which they are drawn.
        methods: How the method of each case is displayed.
    """
    place = 0 if _theme.get() is LIGHT else 1
    spare, markers, found = cycle(SPARE), cycle("hp<>*X"), {}
    taken: set[str] = set()
    # The case that is called like its method comes first, or "FOLA offline" could take the colour from "FOLA".
    for case in sorted(cases, key=lambda case: case != methods.get(case, case)):
        method = methods.get(case, case)
        if method in METHODS and method not in taken:
            found[case] = Look(METHODS[method][place], METHODS[method][2])
            taken.add(method)
        else:
            found[case] = Look(next(spare)[place], next(markers))
    return {case: found[case] for case in cases}


def dashes(values: Sequence[Any]) -> dict[Any, Any]:
    """The dash of every value of a setting, in order."""
    return {value: DASHES[i % len(DASHES)] for i, value in enumerate(values)}


def sequence(number: int) -> list[str]:
    """Colours for an ordered quantity."""
    chosen = [SEQUENCE[round(i * (len(SEQUENCE) - 1) / max(number - 1, 1))] for i in range(number)]
    return chosen if _theme.get() is LIGHT else [lighter(colour) for colour in chosen]


def lighter(colour: str) -> str:
    """A colour for a dark ground: the same hue, at least 65 % light."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    mixed = colorsys.hls_to_rgb(hue, max(light, 0.65), saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in mixed)


def whole_numbers(panel: Axes) -> None:
    """Rounds are whole."""
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def opacity(lines: int) -> float:
    """Of the bands: many of them must not hide the lines."""
    return 0.16 if lines <= 4 else 0.1 if lines <= 8 else 0.05


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
    colours = _theme.get()
    longest = max(len(label) for group in groups for label, _ in group)
    total = sum(map(len, groups))
    columns = columns or max(1, min(total, 4, int(62 / (longest + 7))))
    nothing: tuple[str, Mapping[str, Any]] = ("", {"linestyle": "none"})
    rows: list[tuple[str, Mapping[str, Any]]] = []
    for group in groups:
        rows += [*group, *[nothing] * (-len(group) % columns if total > columns else 0)]
    # Matplotlib fills columns first; we read rows.
    entries = [rows[i] for first in range(columns) for i in range(first, len(rows), columns)]
    figure.legend(
        [Line2D([], [], **{"color": colours.faint, "lw": 1.3, "ms": 4, **look}) for _, look in entries],
        [textwrap.fill(label, LEGEND_WIDTH) for label, _ in entries],
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


def seeds(numbers: Sequence[int]) -> str:
    """How many seeds a figure rests on, and what its bands are.

    >>> seeds([3, 3]), seeds([1]), seeds([5, 30])
    ('mean of n = 3 seeds, band: their range', 'n = 1 seed', 'mean of n = 5 to 30 seeds, band: 95 % interval')
    """
    known = sorted({number for number in numbers if number > 0})
    if not known:
        return "no run has ended"
    if known == [1]:
        return "n = 1 seed"
    n = f"{known[0]} to {known[-1]}" if len(known) > 1 else f"{known[0]}"
    return f"mean of n = {n} seeds, band: {'95 % interval' if known[0] >= MIN_FOR_INTERVAL else 'their range'}"


def headline(figure: Picture, text: str) -> None:
    """What the figure rests on, in small print above it: how many seeds, which settings."""
    figure.suptitle(textwrap.fill(text, 70), fontsize=6.5, color=_theme.get().faint, x=0.02, ha="left")


def ink() -> str:
    """The colour of text."""
    return _theme.get().ink


def faint() -> str:
    """The colour of what is less important."""
    return _theme.get().faint


def paper() -> str:
    """The colour of the ground."""
    return _theme.get().paper


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


def recoloured(svg: str, choose: Any) -> str:
    """An SVG of a light figure in other colours.

    Args:
        svg: The light one.
        choose: Given the light colour and the dark one, what to write.
    """
    for light, dark in pairs().items():
        svg = svg.replace(light, choose(light, dark))
    return svg


def pairs() -> dict[str, str]:
    """The dark colour for every light one."""
    themes = dict(zip(LIGHT[1:], DARK[1:], strict=True))
    methods = {light: dark for light, dark, _ in METHODS.values()}
    return {**themes, **methods, **dict(SPARE), **{colour: lighter(colour) for colour in SEQUENCE}}


def _settings(colours: Theme) -> Any:
    return {
        "font.size": 8,
        "axes.edgecolor": colours.faint,
        "axes.labelcolor": colours.ink,
        "text.color": colours.ink,
        "figure.constrained_layout.h_pad": 0.03,
        "figure.constrained_layout.w_pad": 0.03,
    }
