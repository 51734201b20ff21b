"""Processes of their own that cost nothing to start: they are forked from one that has imported everything.

They are as real as any: they can be killed, have an environment of their own, and see no state of the tests. Where the
start of the interpreter, the imports or signals are the subject, `subprocess` is the way.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.support.preloaded"])


class Done(NamedTuple):
    """A process that has ended: what `subprocess.run` would tell."""

    returncode: int
    stdout: str
    stderr: str


def started(target: Callable[..., object], *arguments: object) -> multiprocessing.process.BaseProcess:
    process = context.Process(target=target, args=arguments, daemon=True)  # nobody waits for it at the end
    process.start()
    return process


def fl_lightning(*arguments: object, **environment: str) -> Done:
    """The program, as the shell would run it."""
    return _done(program, arguments, environment)


def contract_tests(*arguments: object, **environment: str) -> Done:
    """python -m fl_lightning.testing."""
    return _done(testing, arguments, environment)


def _done(main: Callable[[list[str]], int], arguments: tuple[object, ...], environment: Mapping[str, str]) -> Done:
    with tempfile.TemporaryDirectory() as folder:
        words, variables = [str(argument) for argument in arguments], {**os.environ, **environment}
        process = started(_told, main, words, variables, folder)
        process.join()
        assert process.exitcode is not None
        return Done(process.exitcode, Path(folder, "out").read_text(), Path(folder, "err").read_text())


def program(words: list[str]) -> int:
    from fl_lightning.__main__ import main

    return main(words)


def testing(words: list[str]) -> int:
    from fl_lightning.testing.__main__ import main

    return main(words)


def _told(main: Callable[[list[str]], int], words: list[str], variables: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    sys.exit(main(words))
