"""Processes that fault tests start and kill, forked from one that has imported MLflow: a start costs nothing."""

import multiprocessing
import sys
from pathlib import Path

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.faults.preloaded"])

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
    from fl_lightning.runs import track
    from fl_lightning.runs.store import store_uri

    track.open_place(store_uri(Path(out)), Path(out))


def run(out: str, seed: int) -> None:
    from fl_lightning import experiment
    from fl_lightning.config import configure

    experiment.run(configure({**SETTINGS, "seed": seed}), out)


def command(*arguments: str) -> None:
    """The program itself, as the shell would start it."""
    from fl_lightning.__main__ import main

    sys.exit(main(arguments))


def started(target, *arguments):
    process = context.Process(target=target, args=arguments)
    process.start()
    return process
