"""The report as one HTML page without scripts, fonts or pictures from elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader

from analysis import formats
from analysis.claims.claim import Checked
from analysis.claims.writing import VERDICTS, origin, overview
from fl_lightning.runs.plotting import palette

TEMPLATES = Path(__file__).parent / "templates"


class Item(NamedTuple):
    """A figure or a table on the page.

    Attributes:
        key: Of its files and its anchor.
        title: Heading.
        about: What it shows, in a sentence.
        body: HTML: inline SVG, or a table.
        notes: What a reader must know.
        basis: The runs behind it, in words.
        files: Beside the page.
    """

    key: str
    title: str
    about: str
    body: str
    notes: list[str]
    basis: str
    files: list[Path]


@dataclass
class Section:
    """A study at one scale, or the runs without a study.

    Attributes:
        key: Anchor.
        title: Heading.
        about: The study in its own words.
        commands: How to make these runs again.
        summary: Findings, one sentence each.
        figures: Those that the runs allow.
        tables: Likewise.
        absent: What they do not allow, and why.
    """

    key: str
    title: str
    about: str
    commands: list[str]
    summary: list[str] = field(default_factory=list)
    figures: list[Item] = field(default_factory=list)
    tables: list[Item] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def render(
    sections: Sequence[Section], claims: Sequence[Checked], background: Item, place: str, date: str, only: str = ""
) -> str:
    """The page.

    Args:
        sections: Studies.
        claims: Of the paper, those that the runs can check.
        background: The picture that explains the idea.
        place: Where the runs are.
        date: Of the report.
        only: What the runs were chosen by, in words.
    """
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    environment.globals |= {"kind": _kind, "html": formats.html, "origin": origin}
    template = environment.get_template("report.html")
    names = {name: variable(getattr(palette.LIGHT, name)) for name in ("paper", "ink", "faint", "grid")}
    pairs = palette.pairs()
    return template.render(
        sections=sections,
        claims=claims,
        overview=formats.html(overview(claims)),
        verdicts=VERDICTS,
        only=only,
        background=background,
        place=place,
        date=date,
        light=" ".join(f"{variable(light)}: {light};" for light in pairs),
        dark=" ".join(f"{variable(light)}: {dark};" for light, dark in pairs.items()),
        **names,
    )


def variable(colour: str) -> str:
    """The name under which the style sheet has a colour.

    >>> variable("#d55e00")
    '--c-d55e00'
    """
    return f"--c-{colour.removeprefix('#')}"


def _kind(path: object) -> str:
    name = str(path)
    return "SVG (dark)" if name.endswith("-dark.svg") else name.rpartition(".")[2].upper()
