"""fl-lightning sweep: a whole study on all cores, or on a Ray cluster; the same command resumes it."""

import json
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.cli.flags import CommandParser, add_runs, add_workers, flags_to_settings, number_of_workers
from fl_lightning.cli.hints import GA_AND_LA, look, shown
from fl_lightning.cli.progress import ProgressLine
from fl_lightning.errors import require
from fl_lightning.runs.identity import identity

if TYPE_CHECKING:
    from analysis.report import Written
    from tune.study import Study
    from tune.sweep import Options, Outcome

EPILOG = """Any setting of `fl-lightning run` may follow, as --key value. It holds for all runs, and fixes a key that
the study varies. Your own study is a YAML or Python file: docs/sweeps.md.

examples:
  fl-lightning list studies
  fl-lightning sweep mnist_first_round --scale small --dry-run
  fl-lightning sweep mnist_first_round --scale small --data.root data --max-concurrent 2"""


def main(arguments: Sequence[str]) -> int:
    """Sweep the study that is named."""
    parser = CommandParser(prog="fl-lightning sweep", description=__doc__, epilog=EPILOG)
    parser.add_argument("study", nargs="?", help="name of a study, or a YAML or Python file")
    parser.add_argument("--scale", help="smoke, small, medium or paper, if the study has it [small]")
    parser.add_argument("--cases", metavar="LABEL,...", help="only these cases of the study, by their labels [all]")
    parser.add_argument("--dry-run", action="store_true", help="only count the runs, and estimate time and disk")
    add_runs(parser)
    add_workers(parser, "a trial trains its clients")
    parser.add_argument("--max-concurrent", type=int, default=0, metavar="N", help="most trials at once [all cores]")
    parser.add_argument("--fresh", action="store_true", help="delete earlier results and compute again")
    parser.add_argument("--json", action="store_true", help="print the best settings as JSON in the last line")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    options, flags = parser.parse_known_args(list(arguments))
    require(options.study is not None, "expected a study; fl-lightning list studies shows those that come with it")
    require(options.max_concurrent >= 0, f"--max-concurrent must be >= 0, got {options.max_concurrent}")
    from fl_lightning.engines.parallel.ray_cluster import Resources
    from tune.study_file import load, workers_of
    from tune.sweep import Options

    study = load(options.study, options.scale, flags_to_settings(flags))
    resources = Resources(getattr(options, "resources.cpu"), getattr(options, "resources.gpu"))
    said = workers_of(options.study, options.scale)
    workers = number_of_workers(options.workers or (None if said is None else str(said)))
    how = Options(
        options.out.resolve(), options.address, resources, options.max_concurrent, options.fresh, workers=workers
    )
    if options.cases is not None:
        study = study.only([label.strip() for label in options.cases.split(",")])
    if options.dry_run:
        dry_run(study, how)
        return 0
    return show(study, how, options)


def show(study: "Study", how: "Options", options: Namespace, curves: bool = False) -> int:
    """Sweep with a progress line, then print the table, and draw the curves if asked to."""
    from fl_lightning.runs.provenance import notice

    start = time.monotonic()
    with ProgressLine(study.metric, options.quiet) as line:
        line.show_work("loading")
        from analysis import formats
        from analysis.sweep_table import DIGITS, best_settings, sweep_table
        from tune.outcome import protocol_of, without_result
        from tune.sweep import sweep  # imports what only a sweep needs

        outcome = sweep(study, how._replace(summary=best_settings), line.show)
    report, findings = _report(study, how, outcome) if study.report else (None, [])
    table, protocol = sweep_table(outcome.cells, study), protocol_of(outcome.cells, study)
    if options.json:
        best = formats.readable(table, "std", DIGITS).to_dict("records")
        print(json.dumps(_summary(outcome, best, protocol)))
        return 0 if not outcome.failures else 1
    if len(table):
        print(formats.aligned(table, "std", digits=DIGITS))
        print(f"\n{GA_AND_LA}")
        if protocol:
            print(textwrap.fill(protocol, 120))
    for name, reason in outcome.failures.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    for name in without_result(outcome.cells):
        print(f"diverged: {name}: every run of it, so that the table has no row for it", file=sys.stderr)
    for sentence in findings:
        print(textwrap.fill(f"- {sentence}", 100, subsequent_indent="  "))
    print(f"\n{_counted(study, outcome)}, in {_duration(time.monotonic() - start)}")
    if note := notice([config for cell in outcome.cells for config in cell.cell.configs], how.out):
        print(note)
    if report is not None:
        print(f"report   {shown(report)}")
    if curves and len(table):
        print(f"curves   {shown(_draw(outcome, how.out / f'{study.name}.png'))}")
    print(f"tables   {shown(outcome.folder)}")
    print(f"mlflow   {look(how.out)}")
    return 0 if not outcome.failures else 1


def dry_run(study: "Study", how: "Options") -> None:
    """Print the cost of a sweep without running it."""
    from fl_lightning.engines.parallel.executor import check_held
    from fl_lightning.engines.parallel.ray_cluster import local_nodes
    from tune.best import listed, named
    from tune.estimate import forecast
    from tune.grid import cells, environments, started
    from tune.outcome import expected
    from tune.sweep import fitting, local_slots, missing

    each = 1 if how.workers == "auto" else how.workers
    if how.address is None:
        check_held(each, local_nodes(), how.resources)
    comparisons = len(study.cases) * len(environments(study))
    fresh_seeds = sum(len(study.confirming_seeds(case.label)) for case in study.cases)
    confirming = len(environments(study)) * fresh_seeds
    if study.search.algorithm == "optuna":
        number = comparisons * (study.search.samples or 0)
        runs = number * len(study.seeds)
        print(f"{number} settings in {comparisons} comparisons, {runs} runs at most; Optuna chooses them as it goes")
        _say_workers(how)
        if study.confirm is not None:
            print(f"then {confirming} runs that confirm the best settings on {named(study.confirm.seeds)}")
        return
    tried = started(study, cells(study), how.out)
    configs = list({identity(config): config for cell in tried for config in cell.configs}.values())
    todo = configs if how.fresh else missing(configs, how.out, study.stop)
    print(f"study       {' '.join(filter(None, (study.name, study.scale)))}: {study.about}")
    print(f"settings    {len(tried)}, each with {len(study.seeds)} seeds")
    print(f"runs        {len(configs)}, of which {len(configs) - len(todo)} are there already")
    later = [config for cell in expected(study, tried, how.out) for config in cell.configs]
    left = later if how.fresh else missing(later, how.out, study.stop)
    if study.confirm is not None:
        length = f", with {study.continue_to} rounds" if study.continue_to is not None else ""
        print(
            f"confirming  {confirming} more: the best setting of each case and environment on fresh seeds, "
            f"{listed(study.confirm.seeds)}{length}; {len(later) - len(left)} are there already"
        )
    elif study.continue_to is not None:
        print(f"then        the best setting of each case and environment goes on to {study.continue_to} rounds")
    todo = [*todo, *left]
    if not todo:
        return
    room = max(1, local_slots(how.resources) // each)
    slots = min(how.max_concurrent or sys.maxsize, room, fitting(study.memory))
    print("measuring a small round of every kind of run ...", file=sys.stderr, flush=True)
    keeps = study.keep_checkpoints or study.continue_to is not None
    cost = forecast(todo, slots, keeps, None if how.fresh else how.out)
    print(f"time        about {_duration(cost.seconds)} with {slots} at once on this machine")
    _say_workers(how)
    print(f"disk        about {_size(cost.bytes)} in {shown(how.out)}")
    if study.reference is not None:
        print(f"before      {_references(study)} reference runs, not counted above")
    if study.pretrain is not None:
        print(f"before      {_pretraining(study)}, from which all start, not counted above")


def _say_workers(how: "Options") -> None:
    if how.workers == "auto":
        print("workers     auto: each trial gets what too few trials leave free; the time is without them")
    elif how.workers > 1:
        print(f"workers     {how.workers} in each trial; the time is without them, at best they divide it by as many")


def _counted(study: "Study", outcome: "Outcome") -> str:
    """The number of runs, their kinds and seeds, and how many of them are new."""
    from tune.best import named

    ended = sum(len(cell.runs) for cell in outcome.cells)
    early = sum(len(cell.cell.seeds) for cell in outcome.cells) - ended - len(outcome.failures)
    kinds = [f"{ended} runs"]
    if study.search.scheduler != "none" and early > 0:
        kinds.append(f"{early} that the search stopped early")
    if study.reference is not None:
        kinds.append(f"{_references(study)} references")
    if study.pretrain is not None:
        kinds.append(_pretraining(study))
    seeds = named({seed for cell in outcome.cells for seed in cell.cell.seeds})
    return f"{' and '.join(kinds)} on {seeds}, {outcome.computed} of them computed now"


def _references(study: "Study") -> int:
    """The number of reference runs."""
    from tune.grid import reference_cells

    return sum(len(cell.seeds) for cell in reference_cells(study))


def _pretraining(study: "Study") -> str:
    """The number of runs that pretrain."""
    from tune.grid import pretrain_cells

    number = len({identity(cell.config) for cell in pretrain_cells(study)})
    return f"{number} {'run' if number == 1 else 'runs'} of pretraining"


def _report(study: "Study", how: "Options", outcome: "Outcome") -> "Written":
    """Figures, tables and findings of the study, also as artifacts of the sweep."""
    from analysis import report
    from tune.sweep_run import open_sweep

    written = report.write(outcome.folder / "report", str(how.out), study.name, study.scale or None)
    parent = open_sweep(study, how.out, outcome.folder)
    parent.store([outcome.folder / "report"])
    parent.finish()
    return written


def _draw(outcome: "Outcome", path: Path) -> Path:
    """The learning curves of every case's best setting, with their spread over the seeds."""
    from analysis import figures
    from analysis.runs import of_results
    from fl_lightning.runs.plotting.run_figures import save
    from tune.outcome import best_of

    study = of_results((best.cell.case, *run) for best in best_of(outcome.cells) for run in best.runs)
    return save(figures.learning_curves(study, wide=True), path)


def _summary(outcome: "Outcome", best: Sequence[dict[Any, str]], protocol: str) -> dict[str, Any]:
    return {
        "runs": sum(len(cell.runs) for cell in outcome.cells),
        "computed": outcome.computed,
        "failures": outcome.failures,
        "best": list(best),
        "protocol": protocol,
        "run_id": outcome.run_id,
        "folder": str(outcome.folder),
    }


def _duration(seconds: float) -> str:
    """In words.

    >>> _duration(42), _duration(600), _duration(7260), _duration(260000)
    ('42 s', '10 min', '2.0 h', '3.0 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def _size(number: float) -> str:
    """Bytes in words.

    >>> _size(2.5e6), _size(3e9)
    ('2.5 MB', '3.0 GB')
    """
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
