"""What processes do that fault tests start and kill."""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.processes import started

__all__ = ["SETTINGS", "command", "killed_after", "killed_at_the_name", "open_store", "run", "started"]

SETTINGS = {
    "data": "digits",
    "data.subset": 0.2,
    "data.clients": 3,
    "model": "softmax",
    "federation.rounds": 2,
    "engine": "functional",
    "engine.chunk": 1,
}


def open_store(out: str) -> None:
    from fl_lightning.runs.tracking.store import store_uri
    from fl_lightning.runs.tracking.sync import open_place

    open_place(store_uri(Path(out)), Path(out))


def run(out: str, seed: int) -> None:
    from fl_lightning import experiment
    from fl_lightning.runs.config.run_config import configure

    experiment.run(configure({**SETTINGS, "seed": seed}), out)


def command(*arguments: str) -> None:
    """The program itself, as the shell would start it."""
    from fl_lightning.__main__ import main

    sys.exit(main(arguments))


def killed_after(statements: int, do: Callable[..., None], *arguments: str) -> None:
    """Do something, and be killed in its midst: after so many statements that SQLAlchemy has sent to a database."""
    from sqlalchemy import Engine, event

    number = itertools.count(1)

    def executed(*_: object) -> None:
        if next(number) == statements:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(Engine, "after_cursor_execute", executed)
    do(*arguments)


def killed_at_the_name(late: bool, do: Callable[..., None], *arguments: str) -> None:
    """The same, before a file is given its name or after it."""
    replace = os.replace

    def killing(source: str, target: str) -> None:
        if late:
            replace(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    os.replace = killing
    do(*arguments)
