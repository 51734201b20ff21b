"""One page of results: a summary in words, all figures and tables they allow, how to repeat it.

The page holds everything it needs and asks no network. Beside it lie the figures as SVG, PDF and PNG, the tables as CSV
and LaTeX, and the paper's claims that the runs can check as Markdown.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from analysis import claims, commands, comparisons, figures, findings, formats, page, style
from analysis.catalogue import Entry
from analysis.figures import FIGURES
from analysis.page import Item, Section
from analysis.runs import NoRuns, Runs, studies
from analysis.study import Study
from analysis.style import Picture
from analysis.tables import TABLES
from fl_lightning.errors import UserError
from fl_lightning.system.atomic import write_atomically

# Ids of runs that are printed below a figure; all of them are in runs.csv.
MOST_IDS = 12
MOST_COMMANDS = 6
# Begins a sentence about an item that is not there because of a mistake.
FAILED = "Could not make"


Watch = Callable[[str], None]


class Written(NamedTuple):
    """A report.

    Attributes:
        page: The HTML page.
        findings: Its summaries, one sentence each.
    """

    page: Path
    findings: list[str]


def write(
    out: Path,
    store: str | Path | None = None,
    study: str | None = None,
    scale: str | None = None,
    watch: Watch = lambda _: None,
    where: Mapping[str, Any] | None = None,
) -> Written:
    """Write the report. What cannot be made for a mistake of ours is named on the page, and the rest is written.

    Args:
        out: Folder of the report.
        store: Folder of runs or MLflow URI.
        study: Only this study; without one all that the store has.
        scale: Of the study.
        watch: Called with the name of what is being drawn.
        where: Only runs with these values of columns, as for `runs.load`.

    Raises:
        UserError: If there is nothing to report, or the folder cannot be written.
    """
    runs = Runs(store)
    found, source = list(studies(runs, study, scale, where)), runs.source
    chosen = [part for part in found if len(part.runs)]
    if not chosen:
        raise NoRuns("; ".join(found[0].remarks))
    try:
        for folder in ("figures", "tables"):
            (out / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from None
    place = source.place
    sections = []
    for part in chosen:
        section = _section(part, place)
        _fill(section, part, out, watch)
        runs_csv = formats.csv(part.runs.drop(columns=["name"], errors="ignore"))
        write_atomically(out / "tables" / f"{section.key}-runs.csv", runs_csv.encode())
        sections.append(section)
    date = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    path = out / "index.html"
    checked = list(claims.check(chosen))
    if checked:
        text = "\n\n".join(map(claims.markdown, checked))
        write_atomically(out / "claims.md", f"# The paper's claims\n\n{claims.VERDICTS}\n\n{text}\n".encode())
    only = " and ".join(f"{key} = {_choice(value)}" for key, value in (where or {}).items())
    write_atomically(path, page.render(sections, checked, _background(out), place, date, only).encode())
    failed = [f"{FAILED} the claim {one.claim.title!r}: {one.finding.why}" for one in checked if one.finding.failed]
    return Written(path, [*(sentence for section in sections for sentence in section.summary), *failed])


def _choice(value: Any) -> str:
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)


def _section(part: Study, place: str) -> Section:
    key = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{part.name}-{part.scale}" if part.name else part.title)
    title = f"{part.title[0].upper()}{part.title[1:]}" if not part.name else part.title
    if part.sweep:
        about = str(part.sweep.content.get("about") or "")
        return Section(key, title, about, [commands.sweep_command(part.sweep, place)])
    made = [commands.run_command(row, place) for _, row in part.runs.head(MOST_COMMANDS).iterrows()]
    rest = len(part.runs) - MOST_COMMANDS
    more = [f"# and {rest} more, see runs.csv"] if rest > 0 else []
    return Section(key, title, "Made by fl-lightning run or compare." if not part.name else "", [*made, *more])


def _fill(section: Section, part: Study, out: Path, watch: Watch) -> None:
    failed: list[str] = []
    with _survived("the summary", failed):
        section.summary = findings.summary(part)
    for entry in FIGURES:
        with _survived(entry.title, failed):
            if entry.fits(part):
                watch(f"{section.title}: {entry.title}")
                figure = entry.make(part)
                if figure.empty:
                    section.absent.append(f"{entry.title}: {figure.remarks[0]}")
                else:
                    section.figures.append(_figure(figure, entry, section, part, out))
    for made in TABLES if part.runs["ended"].any() else ():
        with _survived(made.title, failed):
            if made.fits(part) and len(table := made.make(part)):
                section.tables.append(_table(table, made, section, part, out))
    section.summary += failed


@contextmanager
def _survived(title: str, failed: list[str]) -> Iterator[None]:
    """The page names an item that failed, and has the others."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0]
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        failed.append(f"{FAILED} {title}: {kind}{reason}")


def _table(table: pd.DataFrame, entry: Entry, section: Section, part: Study, out: Path) -> Item:
    name = f"{section.key}-{entry.key}"
    files = formats.save(table, out / "tables" / name, entry.title)
    basis = _basis(part.runs["run_id"], section)
    protocol = comparisons.protocol(part) if entry.of_chosen else ""
    notes = [f"settings were {protocol}"] if protocol else []
    return Item(name, entry.title, entry.about, formats.html(table), notes, basis, _relative(files, out))


def _figure(figure: Picture, entry: Entry, section: Section, part: Study, out: Path) -> Item:
    name = f"{section.key}-{entry.key}"
    files = style.save(figure, out / "figures" / name)
    basis = _basis(figure.run_ids or list(part.runs["run_id"]), section)
    body = _inline(files[0].read_text(encoding="utf-8"), entry.title)
    return Item(name, entry.title, entry.about, body, list(dict.fromkeys(figure.remarks)), basis, _relative(files, out))


def _background(out: Path) -> Item:
    figure = figures.landscape()
    files = style.save(figure, out / "figures" / "landscape")
    about = (
        "Two clients' posteriors over two parameters. The average of their means may fall between the modes; the "
        "product lies on the ridge, where a point that both find likely is. Not from runs: two chosen Gaussians."
    )
    title = "Why a product of posteriors"
    return Item(
        "landscape", title, about, _inline(files[0].read_text(encoding="utf-8"), title), [], "", _relative(files, out)
    )


def _inline(svg: str, title: str) -> str:
    """For a page whose colours follow the reader's: the size from the column, the colours from the style sheet."""
    svg = style.recoloured(svg, lambda light, dark: f"var({page.variable(light)})")
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    label = title.replace('"', "")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _basis(run_ids: Sequence[str] | pd.Series, section: Section) -> str:
    ids = list(dict.fromkeys(run_ids))
    shown = " ".join(run_id[:8] for run_id in ids[:MOST_IDS])
    more = f" and {len(ids) - MOST_IDS} more in tables/{section.key}-runs.csv" if len(ids) > MOST_IDS else ""
    return f"{len(ids)} run{'s' if len(ids) != 1 else ''}: {shown}{more}"


def _relative(files: Sequence[Path], out: Path) -> list[Path]:
    return [path.relative_to(out) for path in files]
