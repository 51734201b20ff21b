"""One page that tells what runs have shown: a summary in words, all figures and tables they allow, how to repeat it.

The page holds everything it needs and asks no network. Beside it lie the figures as SVG, PDF and PNG, the tables as CSV
and LaTeX, and the paper's claims that the runs can check as Markdown.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis import arrays, claims, commands, contests, figures, page, style, tables, words
from analysis.parts import Part, parts
from analysis.runs import NoRuns
from analysis.statistics import MIN_FOR_CORRELATION
from analysis.style import Picture
from fl_lightning.errors import UserError
from fl_lightning.system.atomic import write_atomically

# Ids of runs that are printed below a figure; all of them are in runs.csv.
MOST_IDS = 12
MOST_COMMANDS = 6


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


class Entry(NamedTuple):
    """An item of the paper: when it makes sense, and how it is drawn."""

    key: str
    title: str
    about: str
    fits: Callable[[Part], bool]
    draw: Callable[[Part], Picture]


_CURVES = ("curves_by_clients", "curves_by_alpha", "prior_and_product", "online_against_offline", "curvatures")
CATALOGUE: tuple[Entry, ...] = (
    Entry(
        "best_for_alpha_and_clients",
        "Best GA for each α and N",
        "The best setting of every method under every condition. Colour is N; FedAvg is solid, FOLA dashed.",
        lambda m: m.varies("data.alpha") and (m.varies("data.clients") or not m.lasts),
        lambda m: figures.best_for_alpha_and_clients(m.runs),
    ),
    Entry(
        "best_for_alpha",
        "Best GA for each α",
        "The best setting of every method, continued to its last round.",
        lambda m: m.varies("data.alpha") and m.lasts,
        lambda m: figures.best_for_alpha(m.runs),
    ),
    Entry(
        "over_hyperparameters",
        "GA over lr, E and B",
        "Each with the others at their best. Colour is the method, dash is α.",
        lambda m: any(m.varies(key) for key in ("training.lr", "training.epochs", "training.batch_size")),
        lambda m: figures.over_hyperparameters(m.runs),
    ),
    Entry(
        "over_epochs",
        "GA and LA over E and λ",
        "The settings are those of the best GA, also in the panel of LA.",
        lambda m: m.varies("training.epochs") and m.lasts,
        lambda m: figures.over_epochs(m.runs),
    ),
    Entry(
        "curves_by_clients",
        "Learning curves by N",
        "Colour is the method, dash the number of clients.",
        lambda m: m.lasts and m.varies("data.clients"),
        lambda m: figures.curves_by_clients(m.rounds),
    ),
    Entry(
        "curves_by_alpha",
        "Learning curves by α",
        "Colour is the method, dash the heterogeneity; every method at its best setting.",
        lambda m: m.lasts and m.varies("data.alpha"),
        lambda m: figures.curves_by_alpha(m.rounds),
    ),
    Entry(
        "prior_and_product",
        "Ablation: product and prior loss",
        "Product of posteriors or plain average; dash is the strength λ of the prior loss, 0 is none.",
        lambda m: m.lasts and "method.strength" in contests.conditions(m.runs),
        lambda m: figures.prior_and_product(m.rounds),
    ),
    Entry(
        "online_against_offline",
        "Ablation: online and offline curvature",
        "The Fisher taken along the local path, or once at its end.",
        lambda m: m.lasts and m.varies("method.curvature") and not m.varies("data.clients") and not m.has_curvatures,
        lambda m: figures.online_against_offline(m.rounds),
    ),
    Entry(
        "learning_curves",
        "Learning curves",
        "GA is the accuracy of the server's model, LA the mean accuracy of the clients' models, on the same test set.",
        lambda m: m.lasts and not any(entry.fits(m) for entry in CATALOGUE if entry.key in _CURVES),
        lambda m: figures.learning_curves(m.rounds),
    ),
    Entry(
        "curvatures",
        "GA and LA of the curvatures",
        "Colour is the form of the curvature, dash how it is evaluated.",
        lambda m: m.lasts and m.has_curvatures,
        lambda m: figures.curvatures(m.rounds),
    ),
    Entry(
        "ridge_curves",
        "Accuracy along the ridge between two clients",
        "From client 2's model to client 1's, on the ridge of their posteriors or on the straight line.",
        lambda m: m.has_curvatures,
        lambda m: figures.ridge_curves(m.ridges),
    ),
    Entry(
        "precision_matrix",
        "The precision of a client",
        "What a diagonal leaves out: entries away from the diagonal couple parameters. Scaled to lie between 0 and 1.",
        lambda m: m.has_curvatures,
        lambda m: figures.precision_matrix(*arrays.precision_matrix(m.store, m.runs)),
    ),
    Entry(
        "cosine_of_precisions",
        "How alike the clients' precisions are",
        "The paper's normalisation decides the answer for full matrices, so both are shown.",
        lambda m: m.lasts and m.has_curvatures,
        lambda m: figures.cosine_of_precisions(m.rounds),
    ),
    Entry(
        "errors_behind_accuracies",
        "GA and AE, LA and LF",
        "Distances from a reference posterior: AE of the server's model, LF of the clients' models.",
        lambda m: "AE" in m.runs and bool(m.runs["AE"].notna().any()),
        lambda m: figures.errors_behind_accuracies(m.runs, m.references),
    ),
    Entry(
        "global_against_local",
        "GA and LA",
        "One point per run, under equal conditions; lines are least squares.",
        lambda m: int(m.runs["ended"].sum()) >= MIN_FOR_CORRELATION,
        lambda m: figures.global_against_local(m.runs),
    ),
    Entry(
        "against_bytes",
        "GA over bytes",
        "What the server and all clients have sent: a method that sends twice as much per round is twice as far right.",
        lambda m: m.lasts,
        lambda m: figures.against_bytes(m.rounds),
    ),
    Entry(
        "against_seconds",
        "GA over seconds",
        "Time of training and aggregation on the machine that ran them, which may have been busy; the first round "
        "after a start also loads code and data.",
        lambda m: m.lasts,
        lambda m: figures.against_seconds(m.rounds),
    ),
    Entry(
        "partitions",
        "Who holds which classes",
        "The partitions of these runs; the ground is no sample, a cross a client without any.",
        lambda m: True,
        lambda m: figures.partitions(arrays.partitions(m.runs)),
    ),
)

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
) -> Written:
    """Write the report.

    Args:
        out: Folder of the report.
        store: Folder of runs, database file or MLflow URI.
        study: Only this study; without one all that the store has.
        scale: Of the study.
        watch: Told what is being drawn.

    Raises:
        UserError: If there is nothing to report, or the folder cannot be written.
    """
    chosen = [part for part in parts(store, study, scale) if len(part.runs) or study]
    if study is not None and not any(len(part.runs) for part in chosen):
        raise NoRuns("; ".join(chosen[0].runs.attrs.get("remarks", ())))
    try:
        for folder in ("figures", "tables"):
            (out / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from None
    place = chosen[0].store.store.place
    sections = []
    for part in chosen:
        section = _section(part, place)
        _fill(section, part, out, watch)
        part.runs.drop(columns=["name"], errors="ignore").to_csv(
            out / "tables" / f"{section.key}-runs.csv", index=False
        )
        sections.append(section)
    date = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    path = out / "index.html"
    checked = list(claims.check(chosen))
    if checked:
        text = "\n\n".join(map(claims.markdown, checked))
        write_atomically(out / "claims.md", f"# The paper's claims\n\n{text}\n".encode())
    write_atomically(path, page.render(sections, checked, _background(out), place, date).encode())
    return Written(path, [sentence for section in sections for sentence in section.summary])


def _section(part: Part, place: str) -> Section:
    key = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{part.study}-{part.scale}" if part.study else part.title)
    title = f"{part.title[0].upper()}{part.title[1:]}" if not part.study else part.title
    if part.sweep:
        about = str(part.sweep.content.get("about") or "")
        return Section(key, title, about, [commands.sweep_command(part.sweep, place)])
    made = [commands.run_command(row, place) for _, row in part.runs.head(MOST_COMMANDS).iterrows()]
    rest = len(part.runs) - MOST_COMMANDS
    more = [f"# and {rest} more, see runs.csv"] if rest > 0 else []
    return Section(key, title, "Made by fl-lightning run or compare." if not part.study else "", [*made, *more])


def _fill(section: Section, part: Part, out: Path, watch: Watch) -> None:
    section.summary = words.summary(part.runs, part.rounds, part.thresholds)
    for entry in CATALOGUE:
        if not entry.fits(part):
            continue
        watch(f"{section.title}: {entry.title}")
        figure = entry.draw(part)
        if figure.empty:
            section.absent.append(f"{entry.title}: {figure.remarks[0]}")
            continue
        section.figures.append(_figure(figure, entry, section, part, out))
    for key, title, about, table in _tables(part):
        if not len(table):
            continue
        files = tables.save(table, out / "tables" / f"{section.key}-{key}", title)
        basis = _basis(part.runs["run_id"], section)
        name = f"{section.key}-{key}"
        section.tables.append(Item(name, title, about, tables.html(table), [], basis, _relative(files, out)))


def _tables(part: Part) -> Iterator[tuple[str, str, str, pd.DataFrame]]:
    runs, rounds = part.runs, part.rounds
    if not runs["ended"].any():
        return
    yield (
        "accuracy",
        "GA, LA and rounds to thresholds",
        f"At the best setting of every case. {tables.NOTE}",
        tables.accuracy_and_rounds(runs, rounds, part.thresholds),
    )
    if contests.tuned(runs):
        yield (
            "best",
            "Best settings",
            "Chosen and reported on the same seeds and test set, so a little too good for every case alike. With "
            "unequal numbers of settings compare what to expect of the best of equally many.",
            tables.best_settings(runs),
        )
    yield (
        "paired",
        "Paired comparison",
        "Differences of GA on equal seeds and partitions; Wilcoxon's signed-rank test, with Holm's correction for all "
        "tests of this table; effect: rank-biserial correlation from -1 to 1.",
        tables.paired_comparison(runs),
    )
    yield (
        "correlations",
        "Correlations",
        "Over runs; intervals from resampled runs.",
        tables.correlations(runs),
    )
    yield (
        "costs",
        "What a round costs",
        "Traffic of the server and all clients together; the last GA that each case reaches within the traffic that "
        "all of them use.",
        tables.costs(runs, rounds),
    )


def _figure(figure: Picture, entry: Entry, section: Section, part: Part, out: Path) -> Item:
    name = f"{section.key}-{entry.key}"
    files = style.save(figure, out / "figures" / name)
    basis = _basis(figure.run_ids or list(part.runs["run_id"]), section)
    body = _inline(files[0].read_text(), entry.title)
    return Item(name, entry.title, entry.about, body, list(dict.fromkeys(figure.remarks)), basis, _relative(files, out))


def _background(out: Path) -> Item:
    figure = figures.landscape()
    files = style.save(figure, out / "figures" / "landscape")
    about = (
        "Two clients' posteriors over two parameters. The average of their means may fall between the modes; the "
        "product lies on the ridge, where a point that both find likely is. Not from runs: two chosen Gaussians."
    )
    title = "Why a product of posteriors"
    return Item("landscape", title, about, _inline(files[0].read_text(), title), [], "", _relative(files, out))


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
