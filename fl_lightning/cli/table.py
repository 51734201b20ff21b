"""fl-lightning table: one table of the runs, on the terminal or for a paper."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.cli.flags import CommandParser, chosen_by
from fl_lightning.errors import UserError, require, unknown

if TYPE_CHECKING:
    from analysis.study import Study

EXAMPLES = """examples:
  fl-lightning table accuracy --study demo
  fl-lightning table accuracy --study demo --columns case,GA,"rounds to 90%" --thresholds 0.9 --latex > table.tex
  fl-lightning table best --study mnist_first_round --where data.alpha=0.01 --csv"""
SPREADS = ("std", "interval", "none")


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    options = _parser().parse_args(list(arguments))
    if options.spread not in SPREADS:
        raise unknown("--spread", options.spread, SPREADS)
    require(options.scale is None or options.study is not None, "--scale needs --study, the study that has the scale")
    thresholds = levels(options.thresholds)
    where = chosen_by(options.where)
    from analysis import formats  # imports what only tables need
    from analysis.tables import TABLES

    entries = {entry.key: entry for entry in TABLES}
    name = options.name or next(iter(entries))
    if name not in entries:
        raise unknown("table", name, entries)
    part = _only_part(options.runs, options.study, options.scale, where)
    entry = entries[name]
    table = entry.make(part.asked(thresholds) if thresholds else part)
    require(len(table) > 0, f"too few runs have ended for the table {name}; see fl-lightning report")
    columns = [column.strip() for column in (options.columns or "").split(",") if column.strip()]
    table = formats.chosen(table, columns)
    if options.latex:
        title = "" if columns else entry.title
        caption = options.caption or formats.caption_of(title, table, options.spread, not options.no_bold)
        label = options.label or f"tab:{'-'.join(filter(None, (part.name, name)))}"
        text = formats.latex(table, caption, label, options.spread, not options.no_bold, options.wide)
    elif options.csv:
        text = formats.csv(table)
    else:
        text = f"{formats.aligned(table, options.spread, options.markdown)}\n"
    if options.out is None:
        print(text.replace("\r\n", "\n"), end="")
        return 0
    try:
        options.out.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise UserError(f"cannot write to {options.out}: {error.strerror}; choose another --out") from None
    print(f"table  {options.out}", file=sys.stderr)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="fl-lightning table",
        description=__doc__,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "name",
        nargs="?",
        help="accuracy, best, paired, calibration, detection, personal, correlations or costs [accuracy]",
    )
    parser.add_argument("--study", help="name of a study or comparison; needed if the runs have several")
    parser.add_argument("--scale", help="scale of the study; needed if the runs have several")
    parser.add_argument("--where", metavar="KEY=VALUE", action="append", default=[], help="only runs with this setting")
    parser.add_argument("--columns", help="headings, separated by commas; GA is enough for GA (%%) [all]")
    parser.add_argument(
        "--thresholds", help="levels of GA, separated by commas; a column has the first round at each [the study's]"
    )
    parser.add_argument("--spread", default="std", help="spread beside a mean: std, interval or none [std]")
    parser.add_argument("--caption", help="caption in LaTeX [cells and runs of the table]")
    parser.add_argument("--label", help="label in LaTeX [tab:STUDY-NAME]")
    parser.add_argument("--no-bold", action="store_true", help="in LaTeX, do not set the best in bold")
    parser.add_argument("--wide", action="store_true", help="in LaTeX, take both columns of a page")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file of the table [the terminal]")
    parser.add_argument(
        "--runs", "--store", metavar="FOLDER", help="folder of runs, or MLflow URI [$MLFLOW_TRACKING_URI or runs]"
    )
    add_formats(parser)
    return parser


def add_formats(parser: CommandParser) -> None:
    """In which form a table is printed."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="as Markdown")
    form.add_argument("--latex", action="store_true", help="as LaTeX for the package booktabs")
    form.add_argument("--csv", action="store_true", help="as CSV, with all digits")


def levels(text: str | None) -> tuple[float, ...]:
    """Levels of GA, separated by commas; empty without the flag.

    >>> levels("0.8,0.95")
    (0.8, 0.95)
    """
    try:
        found = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UserError(f"--thresholds must be numbers with commas, got {text!r}") from None
    wrong = [level for level in found if not 0 < level <= 1]
    require(not wrong, f"--thresholds must lie in (0, 1], got {wrong[0] if wrong else ''}; 0.8 is 80 %")
    return found


def _only_part(store: str | None, study: str | None, scale: str | None, where: "dict[str, object]") -> "Study":
    """The runs that are meant: accuracies of different studies do not belong into one table."""
    from analysis.runs import NoRuns, studies

    found = list(studies(store, study, scale, where))
    full = [part for part in found if len(part.runs)]
    if not full:
        raise NoRuns("; ".join(remark for part in found for remark in part.remarks))
    names = ", ".join(part.title for part in full)
    require(len(full) == 1, f"there are runs of several kinds: {names}; choose by --study, --scale or --where")
    return full[0]
