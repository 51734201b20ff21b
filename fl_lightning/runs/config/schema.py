"""Which settings a run has: their keys, types, defaults and explanations, and values of these types.

Settings come from the command line as text, from YAML, Python and search spaces as values. `typed` takes both, once;
from there on a setting is a value of its type.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

import yaml
from docstring_parser import parse as parse_docstring

from fl_lightning import discovery
from fl_lightning.data.partition import Split
from fl_lightning.errors import UserError
from fl_lightning.metrics.settings import Evaluation, Probe
from fl_lightning.metrics.uncertainty.settings import Uncertainty
from fl_lightning.models.tuning import Lora, Tuning
from fl_lightning.runs.config.compute import Compute
from fl_lightning.training import Federation, Training

# The named parts: key, folder of `discovery`, default, help.
PARTS = {
    "method": ("methods", "fola", "Federated method."),
    "data": ("data", "digits", "Dataset."),
    "model": ("models", "mlp", "Network of every client."),
    "engine": ("engines", "lightning", "How local training is carried out; the numbers are the same up to rounding."),
}
# Settings beside those of the class; where a model of a user has one of the same name, its own counts.
SHARED: dict[str, tuple[type[Any], ...]] = {"data": (Split,), "model": (Tuning,)}
# The settings that every run has, whatever its parts; they are attributes of a configuration under the same names.
SECTIONS: dict[str, type[Any]] = {
    "training": Training,
    "federation": Federation,
    "model.lora": Lora,
    "compute": Compute,
    "evaluation": Evaluation,
    "probe": Probe,
    "uncertainty": Uncertainty,
}


# Python's numbers; YAML's 1.1 takes 1e-3 for text and 010 for 8.
NUMERAL = re.compile(r"\s*[-+]?[\d._]+([eE][-+]?\d+)?\s*")


class Field(NamedTuple):
    """One setting: type, default and explanation."""

    type: Any
    default: Any
    help: str


def schema_of(names: Mapping[str, str]) -> Mapping[str, Field]:
    """Every setting of a run with these parts, in the order of the help text."""
    parts = tuple(discovery.find(kind, names[part]) for part, (kind, _, _) in PARTS.items())
    return _schema(parts, tuple(SECTIONS.values()))


# A run asks for it several times.
@functools.lru_cache(maxsize=1024)
def _schema(parts: tuple[type[Any], ...], sections: tuple[type[Any], ...]) -> Mapping[str, Field]:
    schema: dict[str, Field] = {}
    for cls, (part, (_, default, text)) in zip(parts, PARTS.items(), strict=True):
        schema[part] = Field(str, default, text)
        fields = dict(fields_of(cls))
        for section in SHARED.get(part, ()):
            fields |= {name: item for name, item in fields_of(section).items() if name not in fields}
        schema |= {f"{part}.{name}": item for name, item in fields.items()}
    for prefix, section in zip(SECTIONS, sections, strict=True):
        schema |= {f"{prefix}.{name}": item for name, item in fields_of(section).items()}
    schema["seed"] = Field(int, 0, "Key of every random draw: weights, partition, cohorts, batches.")
    return schema


def _fields_of(cls: type[Any]) -> Mapping[str, Field]:
    """The settings of a class: the arguments of its constructor that have a default, explained by its docstring."""
    # A preset explains only what it changes; the rest is explained by what it is made of.
    docs = [inspect.cleandoc(one.__doc__ or "") for one in reversed(cls.__mro__)]
    texts = {param.arg_name: param.description or "" for doc in docs for param in parse_docstring(doc).params}
    hints = get_type_hints(cls.__init__)
    hidden = getattr(cls, "python_only", ())
    return {
        name: Field(hints.get(name, Any), parameter.default, " ".join(texts.get(name, "").split()))
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is not inspect.Parameter.empty and name not in hidden
    }


# Docstrings are slow to parse.
fields_of = cast("Callable[[type[Any]], Mapping[str, Field]]", functools.cache(_fields_of))


def owners(key: str) -> list[str]:
    """The methods, datasets, models or engines that have a setting of this key."""
    part, _, name = key.partition(".")
    found = discovery.discover(PARTS[part][0]) if part in PARTS and name else {}
    return [owner for owner, cls in found.items() if name in fields_of(cls)]


def typed(key: str, kind: Any, value: Any) -> Any:
    """A value of a setting's type, from text as on the command line, or from a value as in YAML and Python.

    >>> typed("training.lr", float, "1e-3"), typed("training.lr", float, 1), typed("model.hidden", tuple[int, ...], [5])
    (0.001, 1.0, (5,))
    """
    try:
        return _fit(kind, value, as_text(key, value) if str in (kind, *get_args(kind)) else None)
    except (ValueError, OverflowError):
        text = as_text(key, value)
        raise UserError(f"{key} must be {type_in_words(kind)}, got {' '.join(text.split()) or repr(text)}") from None


def as_text(key: str, value: Any) -> str:
    """A value as it is written on the command line."""
    try:
        return value if isinstance(value, str) else json.dumps(plain(value))
    except TypeError:
        raise UserError(
            f"{key} must be a name, a number or a list of them, so that the run can be repeated, got an object of the "
            f"type {type(value).__name__}; give objects of your own to `federate`, or put the class into a file of the "
            "plug-in folder and name that (docs/extending.md)"
        ) from None


def plain(value: Any) -> Any:
    """As JSON and YAML have it."""
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


def frozen(value: Any) -> Any:
    """The inverse of `plain`: settings are dataclasses that can be hashed and compared."""
    return tuple(map(frozen, value)) if isinstance(value, tuple | list) else value


def _fit(kind: Any, given: Any, text: str | None = None) -> Any:
    """What is given, as a value of a type; a type that is not known here takes everything.

    Args:
        kind: The type.
        given: Text, or a value.
        text: The value as a setting of text has it; numbers in a list are none.

    Raises:
        ValueError: If it is none of this type.
    """
    value, text = (meaning(given), given) if isinstance(given, str) else (given, text)
    if kind is str:
        if text is not None:
            return text
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            return float(value)
    elif kind in (int, bool, NoneType):
        if type(value) is kind:
            return value
    elif (origin := get_origin(kind)) in (Union, UnionType):
        for option in sorted(get_args(kind), key=lambda option: option is not NoneType):  # null is text at the last
            with suppress(ValueError):
                return _fit(option, given, text)
    elif origin is Literal:
        for option in get_args(kind):
            if option == text or (option == value and type(option) is type(value)):
                return option
    elif origin in (tuple, list):
        if isinstance(value, str) and "," in value and value[:1] not in "[(":
            value = [item.strip() for item in value.split(",")]
        if isinstance(value, tuple | list):
            kinds = get_args(kind)
            if origin is list or ... in kinds:
                kinds = kinds[:1] * len(value)
            return tuple(_fit(one, item) for one, item in zip(kinds, value, strict=True))
    else:
        return value
    raise ValueError


@functools.lru_cache(maxsize=4096)
def meaning(text: str) -> Any:
    """What text means: a number, or what YAML makes of it. Text and dates stay as they are written.

    >>> meaning("1e-3"), meaning("[1, 2]"), meaning("null"), meaning("'a'")
    (0.001, [1, 2], None, "'a'")
    """
    for number in (int, float) if NUMERAL.fullmatch(text) else ():
        with suppress(ValueError):
            return number(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, str | date) or not text.strip() else value


def type_in_words(kind: Any) -> str:
    """A type in plain words.

    >>> type_in_words(float | None), type_in_words(Literal["a", "b"]), type_in_words(tuple[int, ...])
    ('a number or null', 'one of a, b', 'a list of whole numbers, such as [1, 2]')
    """
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if kind in words:
        return words[kind]
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}" if len(get_args(kind)) > 1 else str(get_args(kind)[0])
    if get_origin(kind) in (tuple, list):
        return _list_in_words(get_args(kind)[0])
    return " or ".join(type_in_words(option) for option in get_args(kind)) or str(kind)


def _list_in_words(item: Any) -> str:
    lists: dict[Any, str] = {int: "whole numbers, such as [1, 2]", str: "texts, such as [a, b]"}
    return f"a list of {lists.get(item) or type_in_words(item).replace('one of', 'any of')}"
