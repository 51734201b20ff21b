"""Where lines are not counted: inside other packages, whose Python counting slows down though nobody asks for it.

Before Python 3.12, while lines are counted everything that is written in Python takes about twice as long. What the
functions below call is none of our code, so counting pauses there.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def places() -> Iterator[tuple[Any, str]]:
    """Functions of other packages that take long and call nothing of ours."""
    from jsonargparse import ArgumentParser
    from matplotlib.figure import Figure
    from mlflow import MlflowClient
    from pandas import DataFrame
    from pytorch_lightning import Trainer

    yield from ((ArgumentParser, name) for name in ("__init__", "add_argument_group", "parse_args"))
    yield from ((Figure, name) for name in ("draw", "savefig", "subplots"))
    yield DataFrame, "to_parquet"
    yield Trainer, "__init__"
    for name, value in vars(MlflowClient).items():
        if callable(value) and (name == "__init__" or not name.startswith("_")):
            yield MlflowClient, name


@contextmanager
def uncounted() -> Iterator[None]:
    """Other packages at their own speed."""
    if sys.gettrace() is None:  # nobody counts, or Python does so at no cost
        yield
        return
    originals = [(owner, name, getattr(owner, name)) for owner, name in places()]
    for owner, name, original in originals:
        setattr(owner, name, _pausing(original))
    yield
    for owner, name, original in originals:
        setattr(owner, name, original)


def _pausing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        counter = sys.gettrace()
        sys.settrace(None)
        try:
            return function(*arguments, **named)
        finally:
            sys.settrace(counter)

    return call
