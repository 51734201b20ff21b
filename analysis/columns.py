"""The columns of a table of runs: their types, what they are called, and how to choose by them."""

from difflib import get_close_matches
from typing import Any

import pandas as pd

from fl_lightning import discovery
from fl_lightning.data.partition import Split
from fl_lightning.errors import UserError
from fl_lightning.metrics.metric import GA, LA
from fl_lightning.metrics.settings import Evaluation
from fl_lightning.runs.config.schema import fields_of
from fl_lightning.runs.plotting.palette import DISPLAY
from fl_lightning.training import Federation, Training

# FOLA under all its names.
FOLA = ("fola", "fola_extended", "fola_code")
EXAMPLES = ("data.alpha", "training.lr", "method.strength", "seed", GA, LA)


def column(table: pd.DataFrame, name: str) -> pd.Series:
    """A column of a table, or an error that names the nearest one."""
    if name not in table:
        raise no_such("column", name, table)
    return table[name]


def no_such(kind: str, name: str, known: pd.DataFrame) -> UserError:
    near = get_close_matches(name, list(map(str, known)), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"columns are, for example, {', '.join(EXAMPLES)}"
    return UserError(f"no run has a {kind} {name!r}; {hint}")


def with_defaults(settings: pd.DataFrame) -> pd.DataFrame:
    """What a run from before a setting existed did is what its default does now."""
    sections = {"data": Split, "training": Training, "federation": Federation, "evaluation": Evaluation}
    for section, cls in sections.items():
        for name, item in fields_of(cls).items():
            key = f"{section}.{name}"
            if key in settings and item.default is not None and settings[key].isna().any():
                settings[key] = settings[key].map(
                    lambda value, default=item.default: default if pd.isna(value) else value
                )
    return settings


def hashable(value: Any) -> Any:
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def cases_of(frame: pd.DataFrame) -> "pd.Series[Any]":
    """What a run is called: by its study, else by its method and those options that make a variant of it."""
    labels = frame["method"].map(lambda name: DISPLAY.get(name, name))
    for method, mine in frame.groupby("method"):
        for name in [c for c in map(str, frame) if c.startswith("method.") and mine[c].map(_is_variant).any()]:
            default = _default(str(method), name.removeprefix("method."))
            other = mine[name].map(lambda value, default=default: _is_variant(value) and value != default)
            if mine[name].nunique() > 1 or other.any():
                suffix = mine.loc[other, name].map(lambda v, n=name: f" {n.removeprefix('method.')}={v}")
                labels.loc[suffix.index] += suffix
    return frame["case"].map(lambda case: DISPLAY.get(case, case)).fillna(labels)


def _is_variant(value: Any) -> bool:
    """Strings and switches make another variant of a method; numbers are tuned."""
    return isinstance(value, str | bool)


def _default(method: str, option: str) -> Any:
    try:
        cls = discovery.find("methods", method)
        extended = discovery.find("methods", vars(cls).get("extended_by", method))  # of which older runs were a part
        return {**fields_of(extended), **fields_of(cls)}[option].default
    except (UserError, KeyError):  # a plug-in, or a method of another version
        return None


def narrow(table: pd.DataFrame, name: str, value: Any) -> pd.DataFrame:
    values = list(value) if isinstance(value, list | set | frozenset) else [value]
    found = column(table, name)
    chosen = found.map(lambda value: any(value == hashable(one) for one in values)).astype(bool)
    return table.loc[chosen | found.isna() if None in values else chosen]
