"""The flags of a command."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from fl_lightning.errors import UserError, require
from fl_lightning.stopping import Stop, stop_of

# Options that a configuration file may hold beside the settings of a run: who computes, which changes no number.
COMPUTING = ("workers", "address", "resources.cpu", "resources.gpu")


class CommandParser(ArgumentParser):
    """A parser that refuses as all of the program does: in one line, without the usage text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def add_workers(parser: ArgumentParser, what: str = "the clients of a round train") -> None:
    """The flags that say who computes; none of them changes a number."""
    parser.add_argument("--workers", metavar="N", help=f"processes in which {what}, or auto [1]")
    parser.add_argument("--address", help="of a Ray cluster, or auto; without it this machine computes")
    parser.add_argument("--resources.cpu", type=float, default=1.0, metavar="N", help="CPUs of one process [1]")
    parser.add_argument("--resources.gpu", type=float, default=0.0, metavar="N", help="GPUs, or part of one [0]")


def with_files(parser: ArgumentParser, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The options of a command, and the settings of the run; flags override those of --config files."""
    from fl_lightning.config import read_yaml  # only who runs something waits for it

    options, _ = parser.parse_known_args(list(arguments))
    from_files = [flag for path in options.config for flag in read_yaml(path)]
    computing = [flag for flag in from_files if flag.removeprefix("--").partition("=")[0] in COMPUTING]
    options, flags = parser.parse_known_args([*computing, *arguments])
    return options, [flag for flag in from_files if flag not in computing] + flags


def split_off_stop(flags: Sequence[str]) -> tuple[Stop | None, list[str]]:
    """The rule by which runs stop early, and the other flags; it is no setting, for no number of a round depends on it.

    >>> split_off_stop(["--data.alpha", "0.1", "--stop.patience", "5"])
    (Stop(metric='GA', at_least=inf, patience=5), ['--data.alpha', '0.1'])
    """
    parser = CommandParser(add_help=False)
    for name in ("metric", "at_least", "patience"):
        parser.add_argument(f"--stop.{name}")
    found, rest = parser.parse_known_args(list(flags))
    given = {name.removeprefix("stop."): value for name, value in vars(found).items() if value not in (None, "null")}
    for name, kind, words in (("at_least", float, "a number"), ("patience", int, "a number of rounds >= 1")):
        if name in given:
            try:
                given[name] = kind(given[name])
            except ValueError:
                raise UserError(f"stop.{name} must be {words}, got {given[name]!r}") from None
    return stop_of(given), rest


def number_of_workers(text: str | None) -> "int | Literal['auto']":
    """What `--workers` says.

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
    """What --where asks for; a key that is given several times allows each of its values.

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
