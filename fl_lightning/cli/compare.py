"""fl-lightning compare: several methods on the same problem, with a table and a picture."""

import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning import config as configuration
from fl_lightning.cli.flags import CommandParser, add_workers, number_of_workers, split_off_stop, with_files
from fl_lightning.cli.hints import GA_AND_LA, command, is_server, look, shown
from fl_lightning.cli.table import add_formats
from fl_lightning.errors import UserError, require
from fl_lightning.runs.store import store_uri
from fl_lightning.system.text import render

if TYPE_CHECKING:
    from tune.comparison import Outcome

EPILOG = """All settings of `fl-lightning run` may follow, except method and seed; see fl-lightning run --help.
Example: fl-lightning compare --methods fedavg,fola,offline:fola+curvature=offline --seeds 0,1,2 --data.alpha 0.01"""


def main(arguments: Sequence[str]) -> int:
    """Compare the methods that the flags name."""
    parser = CommandParser(prog="fl-lightning compare", description=__doc__, epilog=EPILOG)
    parser.add_argument("--methods", required=True, help="names with commas, each as [label:]name[+option=value...]")
    parser.add_argument("--seeds", default="0", help="with commas [0]")
    parser.add_argument("--threshold", type=float, default=0.8, help="GA whose round of arrival is reported [0.8]")
    parser.add_argument("--config", action="append", default=[], help="YAML file with settings; flags override it")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of everything that runs leave [runs]")
    parser.add_argument("--name", help="to select its runs by, as fl-lightning report --study NAME [from the methods]")
    parser.add_argument("--picture", type=Path, help="where to save the learning curves [OUT/comparison-NAME.png]")
    add_formats(parser)
    add_workers(parser)
    parser.add_argument("--max-concurrent", type=int, default=0, metavar="N", help="runs at once, at most [all cores]")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.add_argument("--fresh", action="store_true", help="compute again what an earlier process has computed")
    options, flags = with_files(parser, arguments)
    from tune import study_file  # which imports this package
    from tune.comparison import name_of

    require(0 < options.threshold <= 1, f"--threshold must lie in (0, 1], got {options.threshold:g}; 0.8 is 80 %")
    options.workers = number_of_workers(options.workers)
    require(options.max_concurrent >= 0, f"--max-concurrent must be >= 0, got {options.max_concurrent}")
    variants = [variant for variant in options.methods.split(",") if variant]
    require(bool(variants), "--methods needs at least one name; see fl-lightning list methods")
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    except ValueError:
        raise UserError(f"--seeds must be whole numbers with commas, got {options.seeds!r}") from None
    require(
        options.name is None or re.fullmatch(r"[A-Za-z0-9_.=+-]+", options.name) is not None,
        f"--name takes letters, digits and any of _ . = + -, got {options.name!r}",
    )
    require(
        options.name not in study_file.names(),
        f"--name {options.name} is the name of a study; choose another, so that the two can be told apart",
    )
    options.stop, flags = split_off_stop(flags)
    settings = configuration.flags_to_settings(flags)
    for key in ("method", "seed"):
        require(key not in settings, f"--{key} is what a comparison varies; use --{key}s")
    options.name = options.name or name_of(settings, variants)
    options.picture = writable_picture(options.picture or options.out / f"comparison-{options.name}.png")
    return show(settings, variants, seeds, options)


def writable_picture(path: Path) -> Path:
    """The path, if a picture can be written there: better refused now than after hours."""
    require(path.suffix == ".png", f"--picture must end in .png, got {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}; choose another --picture or --out") from None
    return path


def show(settings: Mapping[str, Any], variants: Sequence[str], seeds: Sequence[int], options: Namespace) -> int:
    """Run the comparison with a progress line, then print table and picture."""
    from fl_lightning.cli.sweep import ProgressLine

    with ProgressLine("GA", options.quiet) as line:
        line.tell("loading")
        from fl_lightning.cluster.connection import Resources
        from tune import comparison  # imports what only runs need
        from tune.sweep import Options

        study = comparison.study_of(settings, variants, seeds, options.name, options.stop)
        resources = Resources(getattr(options, "resources.cpu"), getattr(options, "resources.gpu"))
        how = Options(
            options.out.resolve(),
            options.address,
            resources,
            options.max_concurrent,
            options.fresh,
            workers=options.workers,
        )
        outcomes, failures = comparison.compare(study, how, line.show)
    for_file = options.latex or options.csv
    if outcomes and for_file:
        print(written(outcomes, options).replace("\r\n", "\n"), end="")
    elif outcomes:
        print(render(comparison.table(outcomes, options.threshold), options.markdown))
        print(f"\n{GA_AND_LA}")
    beside = sys.stderr if for_file else sys.stdout  # so that > table.tex holds nothing but the table
    for outcome in outcomes:
        if outcome.result.status != "finished":
            print(f"{outcome.variant} seed {outcome.seed}: {outcome.result.message}", file=beside)
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    print(file=beside)
    if (picture := draw(outcomes, options.picture)) is not None:
        print(f"curves   {shown(picture)}", file=beside)
    print(f"report   {command('report', '--study', study.name, *_store(options.out))}", file=beside)
    print(f"compare  {look(options.out)}", file=beside)
    return 0 if not failures else 1


def written(outcomes: Sequence["Outcome"], options: Namespace) -> str:
    """The table for a paper or for a program."""
    from analysis import formats, results, tables
    from analysis.figures.curves import finals

    rounds = results.rounds((outcome.variant, outcome.config, outcome.result) for outcome in outcomes)
    require(len(rounds) > 0, "no run has measured a round, so there is no table")
    table = tables.accuracy_and_rounds(finals(rounds), rounds, (options.threshold,))
    if options.csv:
        return formats.csv(table)
    caption = formats.caption_of("Accuracies and rounds to a threshold", table, "std")
    return formats.latex(table, caption, f"tab:{options.name}", "std")


def draw(outcomes: Sequence["Outcome"], path: Path) -> Path | None:
    """The learning curves with their spread over the seeds; None if no run has measured a round."""
    from analysis import figures, results  # matplotlib: not for errors and help
    from fl_lightning.runs.pictures import save

    rounds = results.rounds((outcome.variant, outcome.config, outcome.result) for outcome in outcomes)
    return save(figures.learning_curves(rounds, wide=True), path) if len(rounds) else None


def _store(out: Path) -> list[str | Path]:
    """Where a report finds the runs, if it is not where it looks by itself."""
    return [] if is_server(store_uri(out)) or out == Path("runs") else ["--runs", out]
