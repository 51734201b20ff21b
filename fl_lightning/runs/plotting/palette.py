"""The colours of all pictures, of one run or of many: a method looks the same everywhere, on light and on dark ground.

The colours are Okabe and Ito's and, for the rarer methods, Tol's: distinguishable with every kind of colour vision, and
every method has a marker of its own as well. A user's method gets its colour from its name.
"""

import colorsys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from fl_lightning import discovery

# How methods are written in papers.
DISPLAY = discovery.display_names("methods")


class Theme(NamedTuple):
    """Colours of everything but the data."""

    name: str
    paper: str
    ink: str
    faint: str
    grid: str


# All colours of this file differ: a light figure is made dark by replacing each by its partner.
LIGHT = Theme("light", "#ffffff", "#1b1b1f", "#63636b", "#dcdce0")
DARK = Theme("dark", "#16161a", "#ececf1", "#a9a9b3", "#3a3a42")
THEMES = {"light": LIGHT, "dark": DARK}

# By method as it is displayed: colour on a light ground, on a dark ground, marker.
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
# For what has no colour of its own: other methods, and variants beside the first of a method.
SPARE = (
    ("#5b3a29", "#c59a83", "p"),
    ("#7b61c9", "#b3a1f0", "d"),
    ("#2f6f3e", "#7cc58d", "8"),
    ("#a0304a", "#f0819a", "H"),
    ("#1f8a9c", "#63cfe0", "p"),
    ("#8a6d1a", "#d9bf66", "d"),
    ("#9a4dad", "#d79be6", "8"),
    ("#4a5568", "#a3b1c6", "H"),
)
# An ordered quantity as colour, from small to large: dark enough on white, light enough on black.
SEQUENCE = ("#46327e", "#2c728e", "#27ad81", "#8fb32b", "#d0a70a", "#e8590c", "#c2255c")
# From few samples to many, on a light ground and on a dark one: the fewest differ from the ground, which means 0.
SHADES = (
    ("#d6efb3", "#2354a3"),
    ("#c2e7b4", "#216aad"),
    ("#9ed9b8", "#1f82b9"),
    ("#7acbbc", "#2397c1"),
    ("#5bc0c0", "#34a9c3"),
    ("#3fb4c4", "#48b9c3"),
    ("#2da2c2", "#65c3bf"),
    ("#1d8ebf", "#83cebb"),
    ("#2075b3", "#a5dcb7"),
    ("#225da8", "#c6e9b4"),
    ("#24489d", "#d7efb3"),
    ("#243392", "#e9f7b1"),
    ("#162874", "#f4fbc0"),
    ("#081d58", "#fcfed3"),
)
# For labels that name no method; equal places in two figures need not mean the same.
MARKERS = "osD^vP*Xph<>"
DASHES = ("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (9, 3)))

_theme: ContextVar[Theme] = ContextVar("theme", default=LIGHT)


@contextmanager
def theme(name: str) -> Iterator[None]:
    """Figures that are made inside are `light` or `dark`."""
    token = _theme.set(THEMES[name])
    try:
        yield
    finally:
        _theme.reset(token)


def current() -> Theme:
    """The theme of the figures that are being made."""
    return _theme.get()


class Look(NamedTuple):
    """How one case is drawn."""

    colour: str
    marker: str


def looks(cases: Sequence[str], methods: Mapping[str, str]) -> dict[str, Look]:
    """Colour and marker of every case. A method keeps its colour in all figures; further variants get others.

    What has no colour of its own gets one by its name, so that it is the same in every figure; only where two names of
    one figure fall on the same colour, the later one in the alphabet moves on to the next.

    Args:
        cases: In the order in which they are drawn.
        methods: How the method of each case is displayed.
    """
    found: dict[str, Look] = {}
    nameless: dict[str, str] = {}
    taken: set[str] = set()
    # The case that is called like its method comes first, or "FOLA offline" could take the colour from "FOLA".
    for case in sorted(cases, key=lambda case: case != methods.get(case, case)):
        method = methods.get(case, case)
        if method in taken:
            nameless[case] = case
        elif method in METHODS:
            found[case] = _look(METHODS[method])
        else:
            nameless[method] = case
        taken.add(method)
    places: set[int] = set()
    for name in sorted(nameless):
        place = zlib.crc32(name.encode()) % len(SPARE)
        while place in places and len(places) < len(SPARE):
            place = (place + 1) % len(SPARE)
        places.add(place)
        found[nameless[name]] = _look(SPARE[place])
    return {case: found[case] for case in cases}


def _look(entry: tuple[str, str, str]) -> Look:
    return Look(entry[0 if current() is LIGHT else 1], entry[2])


def dashes(values: Sequence[Any]) -> dict[Any, Any]:
    """The dash of every value of a setting, in order."""
    return {value: DASHES[i % len(DASHES)] for i, value in enumerate(values)}


def sequence(number: int) -> list[str]:
    """Colours for an ordered quantity."""
    chosen = [SEQUENCE[round(i * (len(SEQUENCE) - 1) / max(number - 1, 1))] for i in range(number)]
    return chosen if current() is LIGHT else [lighter(colour) for colour in chosen]


def shades() -> list[str]:
    """Colours of cells, from few to many."""
    return [pair[0 if current() is LIGHT else 1] for pair in SHADES]


def lighter(colour: str) -> str:
    """A colour for a dark ground: the same hue, at least 65 % light."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    mixed = colorsys.hls_to_rgb(hue, max(light, 0.65), saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in mixed)


def pairs() -> dict[str, str]:
    """The dark colour for every light one."""
    themes = dict(zip(LIGHT[1:], DARK[1:], strict=True))
    cases = {light: dark for light, dark, _ in (*METHODS.values(), *SPARE)}
    return {**themes, **cases, **dict(SHADES), **{colour: lighter(colour) for colour in SEQUENCE}}
