"""What processes do that fault tests start and kill."""

import sys
from pathlib import Path

from tests.support.processes import started

__all__ = ["SETTINGS", "command", "open_store", "run", "started"]

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
