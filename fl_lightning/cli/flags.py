"""The flags of a command."""

from argparse import ArgumentParser
from typing import Any, NoReturn

from fl_lightning.errors import UserError


class CommandParser(ArgumentParser):
    """A parser that refuses as all of the program does: in one line, without the usage text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)
