"""fl-lightning run: one experiment from settings to results."""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fl_lightning.cli import flags
from fl_lightning.cli.hints import look
from fl_lightning.errors import require
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.metrics.metric import GA, LA
from fl_lightning.runs.config.run_config import RunConfig, chosen_names, configure
from fl_lightning.runs.folder import Result

DIVERGED = 3
# The numbers of the last round that a user wants to see first.
SHOWN = (GA, LA, "PA_before", "PA_after")
DESCRIPTION = "Run one experiment. The same command resumes it, or shows it again once it has finished."
STOPPING = """  --stop.patience ROUNDS, --stop.at_least VALUE
        Stop when --stop.metric [GA] has not improved for so many rounds, or has reached the value. Stopping changes
        no number: without it, the same command continues the run."""


def main(arguments: Sequence[str]) -> int:
    """Run the experiment that the flags describe."""
    parser = _parser()
    options, settings = flags.with_files(parser, arguments)
    stop, settings = flags.split_off_stop(settings)
    if options.help:
        names = chosen_names(settings)
        chosen = ", ".join(f"{part} {name}" for part, name in names.items())
        other = f"Settings for {chosen}.\nOther choices have other settings: fl-lightning run --method NAME --help"
        parser.epilog = f"{STOPPING}\n\n{other}\n{flags.explained(names)}"
        parser.print_help()
        return 0
    config = configure(settings)
    if options.print_config:
        print(config.yaml() + ("" if stop is None else _in_yaml(stop)), end="")
        return 0
    result = _run(config, options, stop)
    if result.status == "diverged":
        print(f"fl-lightning: {result.message}; rounds before it are saved in {result.folder}", file=sys.stderr)
    elif not options.quiet and not options.json:
        _show(config, result, options.out)
    if options.json:
        print(json.dumps(result.summary()))
    return DIVERGED if result.status == "diverged" else 0


def _parser() -> flags.CommandParser:
    parser = flags.CommandParser(
        prog="fl-lightning run",
        usage="fl-lightning run [--config FILE.yaml] [--KEY VALUE ...]",
        description=DESCRIPTION,
        add_help=False,
    )
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="this text; with --method NAME, the settings of that method")
    files = "YAML file of settings, and of --workers if you like; flags override it; may be repeated"
    add("--config", action="append", default=[], metavar="FILE", help=files)
    add("--print_config", "--print-config", action="store_true", help="print all settings as YAML, and stop")
    flags.add_runs(parser)
    add("--fresh", action="store_true", help="delete earlier results and compute again")
    add("--name", default="", help="name of the run in tables, figures and MLflow [its method and options]")
    note = "a tag in MLflow, by which `runs` and `report` select; may be repeated"
    add("--tag", action="append", default=[], metavar="KEY=VALUE", help=note)
    flags.add_workers(parser)
    add("--json", action="store_true", help="print the final GA, LA, round and run_id as JSON in the last line")
    add("--quiet", action="store_true", help="no progress bar, no summary")
    add("--verbose", action="store_true", help="all metrics of every round, and the traceback if a plug-in fails")
    return parser


def _run(config: RunConfig, options: Namespace, stop: Stop | None) -> Result:
    """Compute it, with a progress bar."""
    tags, number = tags_of(options), flags.number_of_workers(options.workers)
    require(
        number != 1 or (options.address is None and not getattr(options, "resources.gpu")),
        "--address and --resources.gpu need --workers 2 or more, or auto, got 1",
    )
    from fl_lightning.cli.progress import Progress
    from fl_lightning.penalty import overshoot_warning

    advice = partial(overshoot_warning, config.method.traits.overshoot_advice)
    with Progress(config.federation.rounds, _label(config), options.quiet, options.verbose, advice) as progress:
        from fl_lightning.engines.parallel.executor import Workers
        from fl_lightning.engines.parallel.ray_cluster import Resources
        from fl_lightning.experiment import run  # imports what only a run needs

        resources = Resources(getattr(options, "resources.cpu"), getattr(options, "resources.gpu"))
        workers = Workers(number, options.address, resources)
        return run(config, options.out, options.fresh, progress.show, tags, workers, stop)


def _show(config: RunConfig, result: Result, out: Path) -> None:
    """The numbers of the last round, and where to look."""
    from fl_lightning.runs.provenance import notice

    final = result.final
    errors = "".join(f", {name} {final[name]:.3g}" for name in ("AE", "LF") if name in final)
    numbers = ", ".join(f"{name} {final[name]:.2%}" for name in SHOWN if name in final)
    print(f"{_label(config)}: {numbers}{errors} after round {len(result.history)}")
    if result.status == "stopped":
        print(f"{result.message}; without that rule it goes on to round {config.federation.rounds}")
    if note := notice([config], out):
        print(note)
    if result.reused:
        print("this run had finished before and was not computed again; --fresh does that")
    print(f"files    {result.folder}")
    print(f"mlflow   {look(out)}")


def tags_of(options: Namespace) -> dict[str, str]:
    """The user's name and tags of the run, for MLflow and `--where`."""
    from fl_lightning.runs.tracking.description import PROGRAM_PREFIXES, PROGRAM_TAGS, check_tags

    tags = {"case": options.name} if options.name else {}
    for text in options.tag:
        key, equals, value = text.partition("=")
        require(
            bool(equals and value) and re.fullmatch(r"[\w.-]+", key) is not None,
            f"--tag is written key=value, with a key of letters, digits and . _ -, got {text!r}",
        )
        require(
            key not in PROGRAM_TAGS and not key.startswith(PROGRAM_PREFIXES),
            f"the tag {key} is one that the program itself writes; choose another key"
            + "; --name names a run" * (key == "case"),
        )
        tags[key] = value
    check_tags(tags)
    return tags


def _in_yaml(stop: Stop) -> str:
    given = {"metric": stop.metric, "at_least": stop.at_least, "patience": stop.patience}
    lines = [f"  {name}: {value}" for name, value in given.items() if value != float("inf")]
    return "\n".join(["", "stop:", *lines]) + "\n"


def _label(config: RunConfig) -> str:
    return f"{config.names['method']} on {config.names['data']}"
