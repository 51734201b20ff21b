"""Tables of numbers as text: for a page, for a paper, for a spreadsheet.

A table of `analysis.tables` has `X low`, `X high` and perhaps `X std` beside a column `X`: they become one cell.
`reached 80%` says how many of `n` runs are behind `rounds to 80%`, and joins it.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from analysis import comparisons
from analysis.statistics import MIN_FOR_INTERVAL
from fl_lightning.errors import unknown
from fl_lightning.metrics.metric import METRICS, sign
from fl_lightning.system.atomic import write_atomically
from fl_lightning.system.text import as_csv, render
from tune.best import OPTIMISM

Spread = Literal["std", "interval", "none"]
SPREADS: tuple[Spread, ...] = ("std", "interval", "none")
# Columns that say something only if some number is another.
QUIET = {"ties": 0, "diverged seeds": 0, "diverged settings": 0, "incomplete settings": 0, "settings tried": 1}
ENDS = (" low", " high", " std")
NOTHING = "–"
# The column n where it is not asked for: it says which cells are intervals, and of how many runs.
HIDDEN = "n, not shown"
# By the beginning of a column's name: whether the smallest or the largest of its numbers is the best.
BETTER = {"expected best": "max", "rounds to": "min", "accuracy": "max"}
BETTER |= {one.column or one.name: "max" if sign(one.name) > 0 else "min" for one in METRICS if one.due != "always"}
# Has what the others may not have, and is not in the comparison.
OUTSIDE = ("centralised",)
SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "±": r"$\pm$",
    "–": "--",
    "−": "$-$",
    "<": "$<$",
    ">": "$>$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "ρ": r"$\rho$",
}


class Text(NamedTuple):
    """A column as text.

    Attributes:
        name: Heading.
        cells: One per row.
        numeric: Whether it stands at the right.
        best: Rows that are the best of their comparison.
    """

    name: str
    cells: list[str]
    numeric: bool
    best: frozenset[int]


def readable(table: pd.DataFrame, spread: Spread = "interval", digits: int = 1) -> pd.DataFrame:
    """The table as text: intervals in one cell, numbers with the digits that mean something, no empty columns."""
    return pd.DataFrame({text.name: text.cells for text in _texts(table, spread, digits)})


def chosen(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Some columns of a table in this order, each with what belongs to it.

    Args:
        table: Of `analysis.tables`.
        names: As in the heading, without what stands in brackets (GA), or the dotted key of a setting.
    """
    if not names:
        return table
    shown: list[str] = []
    for name in names:
        found = _named(table, name)
        shown += [found, *(f"{found}{end}" for end in ENDS if f"{found}{end}" in table)]
        if found.startswith("rounds to "):
            shown.append(found.replace("rounds to", "reached"))
    hidden = [name for name in ("n",) if name in table and name not in shown]
    return table[[*dict.fromkeys(shown), *hidden]].rename(columns=dict.fromkeys(hidden, HIDDEN))


def latex(
    table: pd.DataFrame,
    caption: str = "",
    label: str = "",
    spread: Spread = "interval",
    bold: bool = True,
    wide: bool = False,
) -> str:
    """A table that goes into a paper as it is; it needs the package booktabs.

    Args:
        table: Of `analysis.tables`.
        caption: Above it; where it says the n that all rows share, they do not. Without one there is only the tabular.
        label: To refer to it by.
        spread: What stands beside a mean.
        bold: Whether the best of every comparison is bold.
        wide: Over both columns of a paper.
    """
    texts = [text for text in _texts(table, spread) if text.name != "n" or not _said(caption, text.cells)]
    shown = [
        [
            rf"\textbf{{{escaped(cell)}}}" if bold and row in text.best else escaped(cell)
            for row, cell in enumerate(text.cells)
        ]
        for text in texts
    ]
    lines = [
        rf"\begin{{tabular}}{{{''.join('r' if text.numeric else 'l' for text in texts)}}}",
        r"\toprule",
        " & ".join(escaped(text.name) for text in texts) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in zip(*shown, strict=True)),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    if caption:
        named = [rf"\label{{{label}}}"] if label else []
        place = "table*" if wide else "table"
        head = [rf"\begin{{{place}}}[t]", r"\centering", rf"\caption{{{escaped(caption)}}}", *named, r"\smallskip"]
        lines = [*head, *lines, rf"\end{{{place}}}"]
    return "\n".join([r"% \usepackage{booktabs}", *lines, ""])


def caption_of(title: str, table: pd.DataFrame, spread: Spread, bold: bool = True) -> str:
    """What a reader of a paper must know: what the cells are, of how many runs; by default called by its columns."""
    texts = _texts(table, spread)
    names = [text.name.partition(" (")[0] for text in texts if text.numeric and text.name != "n"]
    title = title or " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    numbers = sorted({int(n) for name in ("n", HIDDEN) if name in table for n in table[name]})
    runs = f" over n = {numbers[0]}{f' to {numbers[-1]}' if len(numbers) > 1 else ''} runs" if numbers else ""
    cells = " ".join(cell for text in texts for cell in text.cells)
    kinds = [
        words
        for mark, words in (
            (r" ± ", "standard deviation"),
            (r" \[-?\d", "95 % bootstrap interval in square brackets"),
            (r" \(-?[\d.]+ to ", "range in brackets"),
        )
        if re.search(mark, cells)
    ]
    text = f"{title}. Mean{' ± ' if ' ± ' in cells else ' and ' if kinds else ''}{' and '.join(kinds)}{runs}."
    shares = " In brackets, how many of the runs get there." if re.search(r"\(\d+/\d+\)", cells) else ""
    return text + shares + (" The best is bold." if bold and any(text.best for text in texts) else "")


def html(table: pd.DataFrame) -> str:
    """The readable table for a page."""
    return readable(table).to_html(index=False, border=0, classes="numbers", justify="left")


def aligned(table: pd.DataFrame, spread: Spread = "interval", markdown: bool = False, digits: int = 1) -> str:
    """The readable table for a terminal, or as Markdown, with so many digits of percentages and rounds."""
    texts = _texts(table, spread, digits)
    return render([{text.name: text.cells[row] for text in texts} for row in range(len(table))], markdown)


def csv(table: pd.DataFrame) -> str:
    """All digits, for programs."""
    return as_csv(table.drop(columns=HIDDEN, errors="ignore"))


def save(table: pd.DataFrame, stem: Path, title: str = "") -> list[Path]:
    """Write CSV with all digits, and LaTeX with caption and label."""
    paths = [stem.with_suffix(".csv"), stem.with_suffix(".tex")]
    write_atomically(paths[0], as_csv(table).encode())
    caption = caption_of(title, table, "interval") if title else ""
    paths[1].write_text(latex(table, caption, f"tab:{stem.name}"), encoding="utf-8")
    return paths


def escaped(text: str) -> str:
    r"""Text as LaTeX takes it.

    >>> escaped("GA (%) ± a_b"), escaped("non-IID (-1.5)")
    ('GA (\\%) $\\pm$ a\\_b', 'non-IID ($-$1.5)')
    """
    signed = re.sub(r"(?<![\w-])-(?=\d)", "−", " ".join(text.split()))
    return "".join(SPECIAL.get(character, character) for character in signed)


def cell(name: str, value: Any, digits: int = 1) -> str:
    """A number with the digits that its column deserves."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return NOTHING
    if not isinstance(value, float | np.floating):
        return comparisons.shown(value)
    known = {"p": ".3g", "p (Holm)": ".3g", "effect": ".2f", "seconds per round": ".3g"}
    if name in known:
        return format(value, known[name])
    if name.endswith((" r", " ρ")):
        return f"{value:.2f}"
    if "(%)" in name or "points" in name or name.startswith("rounds to"):
        return f"{value:{'+' if name.startswith(OPTIMISM) else ''}.{digits}f}"
    return f"{value:.4g}"


def _texts(table: pd.DataFrame, spread: Spread, digits: int = 1) -> list[Text]:
    """The columns that a reader sees."""
    names = [str(name) for name in table if name != HIDDEN]
    table = table.rename(columns={HIDDEN: "n"})
    names = [name for name in names if not _joins(table, name) and _says_something(table, name)]
    return [_text(table, name, spread, digits) for name in names]


def _said(caption: str, numbers: Sequence[str]) -> bool:
    """Whether a caption has the number of runs that all rows have."""
    return len(set(numbers)) == 1 and f"n = {numbers[0]} " in caption


def _joins(table: pd.DataFrame, name: str) -> bool:
    """Whether a column is a part of another one's cells."""
    of = next((name.removesuffix(end) for end in ENDS if name.endswith(end)), name.replace("reached", "rounds to"))
    return of != name and of in table


def _says_something(table: pd.DataFrame, name: str) -> bool:
    nothing = table[name].eq(QUIET[name]) if name in QUIET else table[name].map(lambda value: value in ("", None))
    return not nothing.all()


def _text(table: pd.DataFrame, name: str, spread: Spread, digits: int) -> Text:
    values = table[name]
    cells = [cell(name, value, digits) for value in values]
    best = _best(table, name, cells)
    beside = [_spread(name, row, spread, digits) for row in table.to_dict("records")]
    numeric = all(isinstance(value, int | float | np.number) and not isinstance(value, bool) for value in values)
    arrivals = table.get(name.replace("rounds to", "reached")) if name.startswith("rounds to") else None
    if arrivals is not None and "n" in table:
        shares = [(int(reached), int(n)) for reached, n in zip(arrivals, table["n"], strict=True)]
        beside = [f"{b} ({k}/{n})" if 0 < k < n else b for b, (k, n) in zip(beside, shares, strict=True)]
        cells = ["never" if k == 0 < n else text for text, (k, n) in zip(cells, shares, strict=True)]
    return Text(name, [text + more for text, more in zip(cells, beside, strict=True)], numeric, best)


def _spread(name: str, row: dict[Any, Any], spread: Spread, digits: int) -> str:
    """What stands beside a number; intervals in place of a missing standard deviation."""
    value, std, low, high = (row.get(f"{name}{end}", np.nan) for end in ("", " std", " low", " high"))
    if spread == "none" or not isinstance(value, float) or np.isnan(value):
        return ""
    if spread == "std" and not np.isnan(std):
        return f" ± {cell(name, std, digits)}"
    n = row.get("n", MIN_FOR_INTERVAL)
    if np.isnan(low) or n < 2:
        return ""
    ends = cell(name, low, digits), cell(name, high, digits)
    return f" [{ends[0]}, {ends[1]}]" if n >= MIN_FOR_INTERVAL else f" ({ends[0]} to {ends[1]})"


def _best(table: pd.DataFrame, name: str, cells: Sequence[str]) -> frozenset[int]:
    """The rows of the best case under each of the conditions, which stand before the case; equal text is equal."""
    direction = next((how for start, how in BETTER.items() if name.startswith(start)), None)
    if direction is None or "case" not in table:
        return frozenset()
    conditions = [str(c) for c in table][: list(table).index("case")]
    rows = table.reset_index(drop=True).assign(text=list(cells))
    rows = rows.loc[~rows["case"].isin(OUTSIDE)]
    arrivals = name.replace("rounds to", "reached")
    best: set[int] = set()
    for comparison in comparisons.groups(rows, conditions):
        known = comparison.loc[comparison[name].notna()]
        if arrivals != name and arrivals in known:  # more runs that reach it come first, then the earlier round
            known = known.loc[known[arrivals].eq(known[arrivals].max())]
        if len(comparison) > 1 and len(known):
            winner = known.loc[known[name].agg(f"idx{direction}"), "text"]
            best |= set(known.index[known["text"].eq(winner)])
    return frozenset(best)


def _named(table: pd.DataFrame, name: str) -> str:
    """The column that a name means."""
    names = [str(column) for column in table if not _joins(table, str(column))]
    wanted = {name.lower(), comparisons.symbol(name).lower()}
    for column in names:
        if {column.lower(), column.partition(" (")[0].lower()} & wanted:
            return column
    raise unknown("column", name, names)
