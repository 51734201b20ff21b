"""The flags of a command."""

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any, NoReturn

from fl_lightning.errors import UserError, require


class CommandParser(ArgumentParser):
    """A parser that refuses as all of the program does: in one line, without the usage text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


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
