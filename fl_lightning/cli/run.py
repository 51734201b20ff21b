"""fl-lightning run: one experiment from settings to results."""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

from fl_lightning import config as configuration
from fl_lightning import discovery
from fl_lightning.cli.flags import CommandParser, add_workers, number_of_workers, split_off_stop, with_files
from fl_lightning.cli.hints import look
from fl_lightning.config import PARTS, Field, RunConfig
from fl_lightning.errors import require
from fl_lightning.stopping import Stop
from fl_lightning.type_words import type_name

DIVERGED = 3
# The numbers of the last round that a user wants to see first.
SHOWN = ("GA", "LA", "PA_before", "PA_after")


def main(arguments: Sequence[str]) -> int:
    """Run the experiment that the flags describe."""
    options, flags = read(arguments)
    stop, flags = split_off_stop(flags)
    if options.help:
        print(help_text(flags))
        return 0
    config = configuration.parse(flags)
    if options.print_config:
        print(config.yaml() + ("" if stop is None else _in_yaml(stop)), end="")
        return 0
    tags = tags_of(options)
    number = number_of_workers(options.workers)
    require(
        number != 1 or (options.address is None and not getattr(options, "resources.gpu")),
        "--address and --resources.gpu say where workers compute, and one worker is this process; give --workers 2 or "
        "more, or auto",
    )
    from fl_lightning.cli.progress import Progress
    from fl_lightning.cli.versions import notice

    advice = config.method.advice
    with Progress(config.federation.rounds, _label(config), options.quiet, options.verbose, advice) as progress:
        from fl_lightning.cluster.connection import Resources
        from fl_lightning.experiment import run  # imports what only a run needs
        from fl_lightning.workers.crew import Workers

        resources = Resources(getattr(options, "resources.cpu"), getattr(options, "resources.gpu"))
        workers = Workers(number, options.address, resources)
        result = run(config, options.out, options.fresh, progress.show, tags, workers, stop)
    if result.status == "diverged":
        print(f"fl-lightning: {result.message}; rounds before it are saved in {result.folder}", file=sys.stderr)
    elif not options.quiet and not options.json:
        final = result.final
        errors = "".join(f", {name} {final[name]:.3g}" for name in ("AE", "LF") if name in final)
        numbers = ", ".join(f"{name} {final[name]:.2%}" for name in SHOWN if name in final)
        print(f"{_label(config)}: {numbers}{errors} after round {len(result.history)}")
        if result.status == "stopped":
            print(f"{result.message}; without that rule it goes on to round {config.federation.rounds}")
        if note := notice([config], options.out):
            print(note)
        if result.reused:
            print("this run had finished before and was not computed again; --fresh does that")
        print(f"files    {result.folder}")
        print(f"compare  {look(options.out)}")
    if options.json:
        print(json.dumps(result.summary()))
    return DIVERGED if result.status == "diverged" else 0


def read(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Split the options of the command from the settings of the run; settings of files come first."""
    parser = CommandParser(add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--name", default="")
    parser.add_argument("--tag", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    add_workers(parser)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--print_config", "--print-config", action="store_true")
    return with_files(parser, arguments)


def tags_of(options: Namespace) -> dict[str, str]:
    """What the user says about the run, for MLflow and `--where`."""
    from fl_lightning.runs.recording import OWN_PREFIXES, OWN_TAGS

    tags = {"case": options.name} if options.name else {}
    for text in options.tag:
        key, equals, value = text.partition("=")
        require(
            bool(equals and value) and re.fullmatch(r"[\w.-]+", key) is not None,
            f"--tag is written key=value, with a key of letters, digits and . _ -, got {text!r}",
        )
        require(
            key not in OWN_TAGS and not key.startswith(OWN_PREFIXES),
            f"the tag {key} is one that the program itself writes; choose another key"
            + "; --name names a run" * (key == "case"),
        )
        tags[key] = value
    return tags


def help_text(flags: Sequence[str]) -> str:
    """The help of `run`: its own options, then every setting of the chosen parts."""
    names = configuration.chosen_names(flags)
    chosen = ", ".join(f"{part} {name}" for part, name in names.items())
    lines = [
        "Run one experiment; the same command resumes it, or only shows it if it has finished.",
        "",
        "usage: fl-lightning run [--config FILE.yaml] [--KEY VALUE ...]",
        "",
        "options",
        *_entry(
            "--config FILE",
            "YAML file with settings, and `workers: N` if you like; flags override it. May be given several times.",
        ),
        *_entry("--print_config", "Write the complete configuration as YAML and stop."),
        *_entry("--out FOLDER", "Folder of everything that runs leave, and of the MLflow store. [runs]"),
        *_entry("--fresh", "Forget what an earlier process has computed for these settings."),
        *_entry("--name NAME", "What tables, figures and MLflow call the run; by default its method and options."),
        *_entry(
            "--tag KEY=VALUE", "A note in MLflow, by which `runs` and `report` select. May be given several times."
        ),
        *_entry(
            "--workers N",
            "Processes in which the clients of a round train, to the same numbers; auto takes what is faster. [1]",
        ),
        *_entry("--address ADDRESS", "Of a Ray cluster for the workers, or auto; without it they are on this machine."),
        *_entry("--resources.cpu N, --resources.gpu N", "CPUs and GPUs of one worker; 0.5 puts two on each. [1, 0]"),
        *_entry(
            "--stop.patience ROUNDS, --stop.at_least VALUE",
            "Stop when --stop.metric [GA] has not improved for so many rounds, or has reached the value. No number "
            "depends on it: without the rule, the same run goes on.",
        ),
        *_entry("--json", "Print the final GA, LA, round and run_id as JSON in the last line."),
        *_entry("--quiet", "No progress bar, no summary."),
        *_entry("--verbose", "All metrics of every round."),
        "",
        f"Settings for {chosen}. Another choice has other settings:",
        "fl-lightning run --method NAME --help.",
    ]
    section = ""
    for key, item in configuration.schema_of(names).items():
        head = key.partition(".")[0]
        if head != section:
            section = head
            lines += ["", "run" if head == "seed" else _heading(head, names)]
        lines += _entry(f"--{key} {_metavar(item)}", _with_default(key, item, names))
    return "\n".join(lines)


def _in_yaml(stop: Stop) -> str:
    given = {"metric": stop.metric, "at_least": stop.at_least, "patience": stop.patience}
    lines = [f"  {name}: {value}" for name, value in given.items() if value != float("inf")]
    return "\n".join(["", "stop:", *lines]) + "\n"


def _heading(section: str, names: Mapping[str, str]) -> str:
    if section not in PARTS:
        return section
    kind, name = PARTS[section][0], names[section]
    heading = f"{section} {name}: {discovery.summary(discovery.find(kind, name))}"
    ingredients = discovery.made_of(kind, name)
    return f"{heading} Made of {ingredients}." if ingredients else heading


def _entry(flag: str, text: str) -> list[str]:
    return [f"  {flag}", fill(text, 110, initial_indent=" " * 8, subsequent_indent=" " * 8)]


def _with_default(key: str, item: Field, names: Mapping[str, str]) -> str:
    text = item.help
    if key in PARTS:
        text += f" One of {', '.join(discovery.names(PARTS[key][0]))}."
    default = json.dumps(item.default) if not isinstance(item.default, str) else item.default
    return f"{text} [{default}]"


def _metavar(item: Field) -> str:
    return type_name(item.type)


def _label(config: RunConfig) -> str:
    return f"{config.names['method']} on {config.names['data']}"
