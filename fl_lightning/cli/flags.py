"""The flags of a command."""

import json
import re
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, NoReturn, get_args, get_origin

from fl_lightning import discovery
from fl_lightning.errors import UserError, require
from fl_lightning.metrics.early_stopping import Stop, stop_of

INDENT = 8 * " "
# The setting that may name a run, and what an MLflow id looks like.
START, RUN_ID = "model.weights", re.compile("[0-9a-f]{6,32}")
# Options that a configuration file may hold beside the settings of a run: where it computes, which changes no number.
COMPUTING = ("workers", "address", "resources.cpu", "resources.gpu")


class CommandParser(ArgumentParser):
    """A parser that refuses in one line, without the usage text, and keeps the lines of an epilog."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's own hides that the disk is full


def add_runs(parser: ArgumentParser) -> None:
    """`--runs` is the folder of the runs in every command; `--out`, where there is one, is what a command writes."""
    folder = Path("runs")
    text = "folder of all runs [runs]"
    parser.add_argument("--runs", dest="out", type=Path, default=folder, metavar="FOLDER", help=text)


def add_workers(parser: ArgumentParser, what: str = "the clients of a round train") -> None:
    """The flags that choose processes and machines; none of them changes a number."""
    workers = f"processes in which {what}, or auto; the numbers stay the same [1]"
    parser.add_argument("--workers", metavar="N", help=workers)
    parser.add_argument("--address", help="a Ray cluster, or auto [this machine]")
    parser.add_argument("--resources.cpu", type=float, default=1.0, metavar="N", help="CPUs of a process [1]")
    gpus = "GPUs of a process; 0.5 puts two processes on each GPU [0]"
    parser.add_argument("--resources.gpu", type=float, default=0.0, metavar="N", help=gpus)


def with_files(parser: ArgumentParser, arguments: Sequence[str]) -> tuple[Namespace, dict[str, Any]]:
    """The options of a command, and the settings of the run; flags override those of --config files."""
    from fl_lightning.runs.config.run_config import read_yaml  # torch: lists and tables need none
    from fl_lightning.runs.config.schema import as_text

    options, flags = parser.parse_known_args(list(arguments))
    from_files = {key: value for path in options.config for key, value in read_yaml(path).items()}
    computing = [f"--{key}={as_text(key, from_files.pop(key))}" for key in COMPUTING if key in from_files]
    options, flags = parser.parse_known_args([*computing, *arguments])
    return options, _with_start({**from_files, **flags_to_settings(flags)}, options)


def _with_start(settings: dict[str, Any], options: Namespace) -> dict[str, Any]:
    """The settings with the folder of a run in the place of its MLflow id, where a network starts from one."""
    start = str(settings.get(START))
    if START not in settings or not RUN_ID.fullmatch(start) or Path(start).exists():
        return settings
    from fl_lightning.runs.locate import folder_of_run

    return {**settings, START: str(folder_of_run(start, options.out))}


def flags_to_settings(flags: Sequence[str]) -> dict[str, str]:
    """Flags as dotted keys and their text.

    >>> flags_to_settings(["--training.lr", "0.1", "--data=mnist"])
    {'training.lr': '0.1', 'data': 'mnist'}
    """
    settings: dict[str, str] = {}
    lacking, rest = [], list(flags)
    while rest:
        flag = rest.pop(0)
        require(flag.startswith("--"), f"expected a setting as --key value, got {flag!r}; a list is written a,b")
        key, equals, value = flag.removeprefix("--").partition("=")
        if equals or (rest and not rest[0].startswith("--")):
            settings[key] = value if equals else rest.pop(0)
        else:
            lacking.append(key)
    if lacking:
        from fl_lightning.runs.config.run_config import check_keys, chosen_names
        from fl_lightning.runs.config.schema import schema_of

        names = chosen_names(settings)
        check_keys([key for key in lacking if not key.startswith("stop.")], schema_of(names), names)
        raise UserError(f"--{lacking[0]} needs a value")
    return settings


def split_off_stop(settings: Mapping[str, Any]) -> tuple[Stop | None, dict[str, Any]]:
    """The rule by which runs stop early, and the settings. No number of a round depends on the rule.

    >>> split_off_stop({"data.alpha": "0.1", "stop.patience": "5"})
    (Stop(metric='GA', at_least=inf, patience=5), {'data.alpha': '0.1'})
    """
    from fl_lightning.runs.config.schema import meaning

    rest = dict(settings)
    rule = {name: rest.pop(f"stop.{name}", None) for name in ("metric", "at_least", "patience")}
    return stop_of({name: meaning(value) if isinstance(value, str) else value for name, value in rule.items()}), rest


def explained(names: Mapping[str, str], only: Collection[str] = ()) -> str:
    """The settings of a run with these parts for a help text, with their meaning and default.

    Args:
        names: Of the parts: method, data, model, engine.
        only: The sections that are wanted, instead of all.
    """
    from fl_lightning.runs.config.schema import PARTS, as_text, schema_of

    settings = schema_of(names)
    heads = list(dict.fromkeys(key.partition(".")[0] for key in settings))
    lines, section = [], ""
    for key, item in sorted(settings.items(), key=lambda setting: heads.index(setting[0].partition(".")[0])):
        head = key.partition(".")[0]
        if only and head not in only:
            continue
        if head != section and not only:
            lines += ["", _heading(head, names)]
        section = head
        choice = f" One of {', '.join(discovery.names(PARTS[key][0]))}." if key in PARTS else ""
        text = f"{item.help}{choice} [{as_text(key, item.default)}]"
        lines += [f"  --{key} {type_name(item.type)}", fill(text, 110, initial_indent=INDENT, subsequent_indent=INDENT)]
    return "\n".join(lines)


def _heading(section: str, names: Mapping[str, str]) -> str:
    from fl_lightning.runs.config.schema import PARTS

    if section not in PARTS:
        return "run" if section == "seed" else section
    kind, name = PARTS[section][0], names[section]
    heading = f"{section} {name}: {discovery.summary(discovery.find(kind, name))}"
    ingredients = discovery.made_of(kind, name)
    return f"{heading} Made of {ingredients}." if ingredients else heading


def number_of_workers(text: str | None) -> "int | Literal['auto']":
    """The value of `--workers`.

    >>> number_of_workers("8"), number_of_workers("auto"), number_of_workers(None)
    (8, 'auto', 1)
    """
    text = text or "1"
    require(
        text == "auto" or (text.isdecimal() and int(text) >= 1),
        f"--workers must be a whole number from 1 on, or auto, got {text!r}",
    )
    return "auto" if text == "auto" else int(text)


def chosen_by(flags: Sequence[str]) -> dict[str, Any]:
    """The conditions of --where; a key that is given several times allows each of its values.

    >>> chosen_by(["data.alpha=0.01", "method=fola", "method=fedavg"])
    {'data.alpha': 0.01, 'method': ['fola', 'fedavg']}
    """
    found: dict[str, list[Any]] = {}
    for flag in flags:
        key, equals, text = flag.partition("=")
        require(bool(key and equals), f"--where is written key=value, such as data.alpha=0.01, got {flag!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        found.setdefault(key, []).append(tuple(value) if isinstance(value, list) else value)
    return {key: values if len(values) > 1 else values[0] for key, values in found.items()}


def writable_picture(path: Path) -> Path:
    """The path, if a picture can be written there: better refused now than after hours."""
    require(path.suffix == ".png", f"--picture must end in .png, got {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}; choose another --picture") from None
    return path


def type_name(kind: Any) -> str:
    """A type as a placeholder in a help text.

    >>> type_name(float), type_name(int | None), type_name(Literal["a", "b"])
    ('NUMBER', 'INTEGER|null', '{a,b}')
    """
    names = {int: "INTEGER", float: "NUMBER", bool: "{true,false}", str: "NAME", type(None): "null"}
    if kind in names:
        return names[kind]
    if get_origin(kind) is Literal:
        options = get_args(kind)
        return f"{{{','.join(map(str, options))}}}" if len(options) > 1 else str(options[0])
    if get_origin(kind) in (tuple, list):
        return f"[{type_name(get_args(kind)[0])},...]"
    return "|".join(type_name(option) for option in get_args(kind)) or "VALUE"
