"""fl-lightning compare: several methods on the same problem, with a table and a picture."""

import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.cli.flags import (
    CommandParser,
    add_runs,
    add_workers,
    number_of_workers,
    split_off_stop,
    with_files,
    writable_picture,
)
from fl_lightning.cli.hints import GA_AND_LA, command, look, shown
from fl_lightning.cli.progress import ProgressLine
from fl_lightning.cli.table import add_formats
from fl_lightning.errors import require
from fl_lightning.metrics.metric import GA
from fl_lightning.runs.config.schema import as_text
from fl_lightning.runs.tracking.store import is_server, store_uri

if TYPE_CHECKING:
    from analysis.study import Study
    from tune.outcome import CellOutcome
    from tune.study import Study as SweptStudy

EPILOG = """All settings of `fl-lightning run` may follow, except method and seed; see fl-lightning run --help.

examples:
  fl-lightning compare --methods fedavg,fola --seeds 3 --data.alpha 0.01
  fl-lightning compare --methods fola,offline:fola+curvature=offline --seeds 0-4 --threshold 0.9"""


def main(arguments: Sequence[str]) -> int:
    """Compare the methods that the flags name."""
    parser = CommandParser(prog="fl-lightning compare", description=__doc__, epilog=EPILOG)
    names = "methods, separated by commas, each as [label:]name[+option=value...]"
    parser.add_argument("--methods", required=True, help=names)
    parser.add_argument("--seeds", default="1", help="number of seeds, such as 3, or a list such as 0,4 or 0-4 [1]")
    first = "level of GA; the table has the first round that reaches it [0.8]"
    parser.add_argument("--threshold", type=float, default=0.8, help=first)
    parser.add_argument("--config", action="append", default=[], help="YAML file with settings; flags override it")
    add_runs(parser)
    parser.add_argument("--name", help="name for fl-lightning report --study NAME [made of the methods]")
    parser.add_argument("--picture", type=Path, help="file of the learning curves [RUNS/comparison-NAME.png]")
    add_formats(parser)
    add_workers(parser)
    parser.add_argument("--max-concurrent", type=int, default=0, metavar="N", help="most runs at once [all cores]")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.add_argument("--fresh", action="store_true", help="delete earlier results and compute again")
    options, settings = with_files(parser, arguments)
    from tune import study_file  # which imports this package
    from tune.comparison import name_of

    require(0 < options.threshold <= 1, f"--threshold must lie in (0, 1], got {options.threshold:g}; 0.8 is 80 %")
    options.workers = number_of_workers(options.workers)
    require(options.max_concurrent >= 0, f"--max-concurrent must be >= 0, got {options.max_concurrent}")
    variants = [variant for variant in options.methods.split(",") if variant]
    require(bool(variants), "--methods needs at least one name; see fl-lightning list methods")
    require(
        options.name is None or re.fullmatch(r"[A-Za-z0-9_.=+-]+", options.name) is not None,
        f"--name takes letters, digits and any of _ . = + -, got {options.name!r}",
    )
    require(
        options.name not in study_file.names(),
        f"--name {options.name} is the name of a study; choose another",
    )
    options.stop, settings = split_off_stop(settings)
    for key in ("method", "seed"):
        require(key not in settings, f"--{key} is what a comparison varies; use --{key}s")
    texts = {key: as_text(key, value) for key, value in settings.items()}
    options.name = options.name or name_of(texts, variants)
    options.picture = writable_picture(options.picture or options.out / f"comparison-{options.name}.png")
    return show(settings, variants, study_file.seeds_of("--seeds", options.seeds), options)


def show(settings: Mapping[str, Any], variants: Sequence[str], seeds: Sequence[int], options: Namespace) -> int:
    """Run the comparison with a progress line, then print table and picture."""
    with ProgressLine(GA, options.quiet) as line:
        line.show_work("loading")
        from analysis.sweep_table import best_settings
        from fl_lightning.engines.parallel.ray_cluster import Resources
        from tune import best, comparison  # imports what only runs need
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
            summary=best_settings,
        )
        outcomes, failures = comparison.compare(study, how, line.show)
    for_file = options.latex or options.csv
    if outcomes and for_file:
        print(written(outcomes, options).replace("\r\n", "\n"), end="")
    elif outcomes:
        print(printed(outcomes, replace(study, thresholds=(options.threshold,)), options.markdown))
        print(f"\n{GA_AND_LA}")
    beside = sys.stderr if for_file else sys.stdout  # so that > table.tex holds nothing but the table
    for outcome in outcomes:
        for config, result in outcome.runs:
            if result.status != "finished":
                print(f"{outcome.cell.case} seed {config.seed}: {result.message}", file=beside)
    for warning in overshooting(outcomes):
        print(warning, file=sys.stderr)
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    print(file=beside)
    if (picture := draw(outcomes, options.picture)) is not None:
        print(f"curves   {shown(picture)}", file=beside)
    print(f"seeds    {best.listed(study.seeds)}", file=beside)
    print(f"report   {command('report', '--study', study.name, *_store(options.out))}", file=beside)
    print(f"mlflow   {look(options.out)}", file=beside)
    return 0 if not failures else 1


def overshooting(outcomes: Sequence["CellOutcome"]) -> list[str]:
    """One line per method whose prior loss is too stiff for its learning rate, as a single run has it."""
    from fl_lightning.penalty import overshoot_warning

    lines: dict[str, str] = {}
    for outcome in outcomes:
        for config, result in outcome.runs:
            advice = config.method.traits.overshoot_advice
            for number, measurement in enumerate(result.history, start=1):
                if warning := overshoot_warning(advice, measurement.metrics):
                    where = f"{outcome.cell.case}, seed {config.seed}, after round {number}"
                    lines.setdefault(outcome.cell.case, f"warning: {where}: {warning}")
    return list(lines.values())


def printed(outcomes: Sequence["CellOutcome"], study: "SweptStudy", markdown: bool) -> str:
    """The table for a reader: one row per variant."""
    from analysis import formats
    from analysis.sweep_table import sweep_table

    return formats.aligned(sweep_table(outcomes, study).rename(columns={"case": "method"}), "std", markdown)


def written(outcomes: Sequence["CellOutcome"], options: Namespace) -> str:
    """The table for a paper or for a program."""
    from analysis import formats, tables

    study = as_study(outcomes).asked([options.threshold])
    require(len(study.runs) > 0, "the table needs at least one run with a measured round")
    table = tables.accuracy_and_rounds(study)
    if options.csv:
        return formats.csv(table)
    caption = formats.caption_of("Accuracies and rounds to a threshold", table, "std")
    return formats.latex(table, caption, f"tab:{options.name}", "std")


def draw(outcomes: Sequence["CellOutcome"], path: Path) -> Path | None:
    """The learning curves with their spread over the seeds; None if no run has measured a round."""
    from analysis import figures  # matplotlib: not for errors and help
    from fl_lightning.runs.plotting.run_figures import save

    study = as_study(outcomes)
    return save(figures.learning_curves(study, wide=True), path) if len(study.runs) else None


def as_study(outcomes: Sequence["CellOutcome"]) -> "Study":
    """The comparison as tables and figures take it."""
    from analysis.runs import of_results

    return of_results((outcome.cell.case, *run) for outcome in outcomes for run in outcome.runs)


def _store(out: Path) -> list[str | Path]:
    """The flag with which a report finds the runs; empty in the default place."""
    return [] if is_server(store_uri(out)) or out == Path("runs") else ["--runs", out]
