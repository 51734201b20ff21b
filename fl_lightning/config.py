"""The settings of a run: nested dataclasses in Python, flat dotted keys everywhere else.

One key is the command-line flag, the YAML key, the search-space key, the MLflow param and the column of a table:
`method.strength`, `data.alpha`, `training.lr`. The keys `method`, `data`, `model` and `engine` hold the names of what
was discovered; the settings below them follow from that choice.
"""

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast, get_type_hints

import yaml
from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentError, ArgumentParser

from fl_lightning import discovery
from fl_lightning.computing import Compute, Model
from fl_lightning.data.dataset import Source
from fl_lightning.data.partition import Split
from fl_lightning.engines.engine import Engine
from fl_lightning.errors import UserError, require
from fl_lightning.federation import Federation
from fl_lightning.method import Method
from fl_lightning.probes.settings import Evaluation, Probe
from fl_lightning.training import Training
from fl_lightning.type_words import type_in_words
from fl_lightning.uncertainty.settings import Uncertainty
from fl_lightning.usual_names import unknown_setting

# The named parts: key, folder of `discovery`, default, help.
PARTS = {
    "method": ("methods", "fola", "Federated method."),
    "data": ("data", "digits", "Dataset."),
    "model": ("models", "mlp", "Network of every client."),
    "engine": ("engines", "lightning", "How local training is carried out; the numbers are the same up to rounding."),
}


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the numbers of a run."""

    method: Method
    source: Source
    split: Split
    model: Model
    training: Training
    federation: Federation
    engine: Engine
    compute: Compute
    seed: int
    probe: Probe = field(default_factory=Probe)
    uncertainty: Uncertainty = field(default_factory=Uncertainty)
    evaluation: Evaluation = field(default_factory=Evaluation)

    def flat(self) -> dict[str, Any]:
        """All settings by dotted key."""
        flat: dict[str, Any] = {}
        for part, value in self._parts.items():
            flat[part] = _name_of(part, value)
            flat |= {f"{part}.{name}": v for name, v in _field_values(value).items()}
            if part == "data":
                flat |= {f"data.{name}": v for name, v in _field_values(self.split).items()}
                flat["model"] = self.model.name
                flat |= {f"model.{name}": v for name, v in self.model.options.items()}
        for section in ("training", "federation", "compute", "evaluation", "probe", "uncertainty"):
            flat |= {f"{section}.{name}": v for name, v in _field_values(getattr(self, section)).items()}
        return flat | {"seed": self.seed}

    def yaml(self) -> str:
        """A complete configuration file, with what each field means."""
        flat, schema = self.flat(), schema_of(self.names)
        lines, section = [], ""
        for key, item in schema.items():
            head, _, name = key.rpartition(".")
            head = head or (key if key in PARTS else "")
            if head != section:
                lines += ["", f"{head}:"] if head else [""]
                section = head
            indent = "  " if head else ""
            value = yaml.safe_dump(_plain(flat[key]), default_flow_style=True).removesuffix("\n").removesuffix("\n...")
            lines += [f"{indent}# {item.help}", f"{indent}{'name' if key in PARTS else name}: {value}"]
        return "\n".join(lines).lstrip("\n") + "\n"

    def varied(self) -> dict[str, Any]:
        """The names of the parts, and those settings that differ from their defaults."""
        schema = schema_of(self.names)
        return {
            key: value for key, value in self.flat().items() if key in PARTS or value != _plain(schema[key].default)
        }

    @property
    def classes(self) -> dict[str, type[Any]]:
        """The classes of the parts: method, data, model, engine."""
        model = discovery.find("models", self.model.name)
        return {"method": type(self.method), "data": type(self.source), "model": model, "engine": type(self.engine)}

    @property
    def names(self) -> dict[str, str]:
        """The names of the parts: method, data, model, engine."""
        found = {part: _name_of(part, value) for part, value in self._parts.items()}
        return {part: self.model.name if part == "model" else found[part] for part in PARTS}

    @property
    def _parts(self) -> dict[str, Any]:
        """Those that are instances of a discovered class, by key."""
        return {"method": self.method, "data": self.source, "engine": self.engine}


def _name_of(part: str, value: Any) -> str:
    return discovery.name_of(PARTS[part][0], type(value)) or type(value).__name__


class Field(NamedTuple):
    """One setting: type, default and explanation."""

    type: Any
    default: Any
    help: str


def configure(settings: Mapping[str, Any] | None = None) -> RunConfig:
    """A run's configuration from dotted keys; what is not given has its default.

    >>> configure({"method": "fola", "data.alpha": 0.01, "method.strength": 10}).method.strength
    10.0
    """
    flat = {key: _as_flag(key, value) for key, value in (settings or {}).items()}
    return parse([f"--{key}={value}" for key, value in flat.items()])


def parse(flags: Sequence[str]) -> RunConfig:
    """A run's configuration from `--key=value` or `--key value` flags; later ones override earlier ones."""
    names = chosen_names(flags)
    schema = schema_of(names)
    check_flags(flags, schema, names)
    classes = (discovery.find(kind, names[part]) for part, (kind, _, _) in PARTS.items())
    return build({**_typed_defaults(tuple(schema), *classes, **names), **_given(schema, flags)})


def _given(schema: Mapping[str, Field], flags: Sequence[str]) -> dict[str, Any]:
    """The settings that flags name."""
    pairs = [flag.removeprefix("--").partition("=") for flag in flags if flag.startswith("--")]
    if len(pairs) == len(flags) and all(equals for _, equals, _ in pairs):
        return {key: _typed_value(key, schema[key].type, text) for key, _, text in pairs}
    return _typed({key: schema[key] for key, _, _ in pairs}, flags)


def _value(key: str, kind: Any, text: str) -> Any:
    """What a flag makes of a setting."""
    return _typed({key: Field(kind, None, "")}, [f"--{key}={text}"])[key]


def _defaults(keys: tuple[str, ...], *classes: type[Any], **names: str) -> dict[str, Any]:
    """All settings of a run with these parts, as they are if none is given; keys and classes are what it depends on."""
    return _typed(schema_of(names), []) | names


# The parser takes a millisecond per setting, whether it is given or not; so it sees each value of each once.
_typed_value = cast("Callable[[str, Any, str], Any]", functools.lru_cache(maxsize=4096)(_value))
_typed_defaults = cast("Callable[..., dict[str, Any]]", functools.lru_cache(maxsize=1024)(_defaults))


def _typed(schema: Mapping[str, Field], flags: Sequence[str]) -> dict[str, Any]:
    """What the flags make of some settings, each of its type."""
    try:
        parsed = parser_of(schema).parse_args(list(flags)).as_flat()
    except ArgumentError as error:
        raise UserError(_explain(str(error), schema)) from None
    return {key: getattr(parsed, _dest(key)) for key in schema}


def build(values: Mapping[str, Any]) -> RunConfig:
    """The nested configuration from complete, typed, flat settings; the inverse of `RunConfig.flat`."""

    def section(prefix: str, cls: type[Any]) -> dict[str, Any]:
        return {name: _frozen(values[f"{prefix}.{name}"]) for name in fields_of(cls)}

    def part(key: str) -> Any:
        cls = discovery.find(PARTS[key][0], values[key])
        return cls(**section(key, cls))

    model = discovery.find("models", values["model"])
    return RunConfig(
        method=part("method"),
        source=part("data"),
        split=Split(**section("data", Split)),
        model=Model(values["model"], section("model", model)),
        training=Training(**section("training", Training)),
        federation=Federation(**section("federation", Federation)),
        engine=part("engine"),
        compute=Compute(**section("compute", Compute)),
        seed=values["seed"],
        probe=Probe(**section("probe", Probe)),
        uncertainty=Uncertainty(**section("uncertainty", Uncertainty)),
        evaluation=Evaluation(**section("evaluation", Evaluation)),
    )


def with_section(config: RunConfig, section: str, given: Mapping[str, str]) -> RunConfig:
    """A configuration with other settings of one section, as flags give them.

    >>> with_section(configure(), "training", {"lr": "0.5"}).training.lr
    0.5
    """
    flags = [f"--{key}={_as_flag(key, value)}" for key, value in config.flat().items()]
    return parse([*flags, *(f"--{section}.{name}={value}" for name, value in given.items())])


def read_yaml(path: str) -> list[str]:
    """The settings of a YAML file as flags. Nested and dotted keys both work; `method: fola` names a part."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except OSError as error:
        raise UserError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:  # the latter: not UTF-8
        raise UserError(f"{path} is not valid YAML: {_one_line(str(error))}") from None
    require(isinstance(content, dict), f"{path} must hold settings as `key: value`, got {type(content).__name__}")
    return [f"--{key}={_as_flag(key, value)}" for key, value in _flatten(content).items()]


def flags_to_settings(flags: Sequence[str]) -> dict[str, str]:
    """Flags as dotted keys and values.

    >>> flags_to_settings(["--training.lr", "0.1", "--data=mnist"])
    {'training.lr': '0.1', 'data': 'mnist'}
    """
    settings = {}
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        require(flag.startswith("--"), f"expected a setting as --key value, got {flag!r}")
        key, equals, value = flag.removeprefix("--").partition("=")
        require(bool(equals) or bool(rest), f"--{key} needs a value")
        settings[key] = value if equals else rest.pop(0)
    return settings


def chosen_names(flags: Sequence[str]) -> dict[str, str]:
    """Which method, dataset, model and engine the flags name."""
    names = {part: default for part, (_, default, _) in PARTS.items()}
    for position, flag in enumerate(flags):
        key, equals, value = flag.removeprefix("--").partition("=")
        if flag.startswith("--") and key in PARTS:
            require(bool(equals) or position + 1 < len(flags), f"--{key} needs a name")
            names[key] = value if equals else flags[position + 1]
    return names


def schema_of(names: Mapping[str, str]) -> dict[str, Field]:
    """Every setting of a run with these parts, in the order of the help text."""
    schema: dict[str, Field] = {}
    for part, (kind, default, text) in PARTS.items():
        cls = discovery.find(kind, names[part])
        schema[part] = Field(str, default, text)
        schema |= {f"{part}.{name}": item for name, item in fields_of(cls).items()}
        if part == "data":
            schema |= {f"data.{name}": item for name, item in fields_of(Split).items()}
    sections: dict[str, type[Any]] = {"training": Training, "federation": Federation, "compute": Compute}
    sections |= {"evaluation": Evaluation, "probe": Probe, "uncertainty": Uncertainty}
    for prefix, section in sections.items():
        schema |= {f"{prefix}.{name}": item for name, item in fields_of(section).items()}
    schema["seed"] = Field(int, 0, "Key of every random draw: weights, partition, cohorts, batches.")
    return schema


def _fields_of(cls: type[Any]) -> Mapping[str, Field]:
    """The settings of a class: the arguments of its constructor that have a default, explained by its docstring."""
    # A named setting explains only what it changes; the rest is explained by what it is made of.
    docs = [inspect.cleandoc(one.__doc__ or "") for one in reversed(cls.__mro__)]
    texts = {param.arg_name: param.description or "" for doc in docs for param in parse_docstring(doc).params}
    hints = get_type_hints(cls.__init__)
    hidden = getattr(cls, "python_only", ())
    return {
        name: Field(hints.get(name, Any), parameter.default, " ".join(texts.get(name, "").split()))
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is not inspect.Parameter.empty and name not in hidden
    }


# Settings are looked up for every run, and docstrings are slow to parse.
fields_of = cast("Callable[[type[Any]], Mapping[str, Field]]", functools.cache(_fields_of))


def parser_of(schema: Mapping[str, Field], **options: Any) -> ArgumentParser:
    """A parser with one flag per setting, grouped by section."""
    parser = ArgumentParser(exit_on_error=False, add_help=False, default_env=False, **options)
    groups: dict[str, Any] = {}
    for key, item in schema.items():
        section = key.partition(".")[0] if "." in key or key in PARTS else "run"
        group = groups.setdefault(section, parser.add_argument_group(section))
        group.add_argument(f"--{key}", dest=_dest(key), type=item.type, default=item.default, help=item.help)
    return parser


def check_flags(flags: Sequence[str], known: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse a flag that does not exist, with the one that was probably meant."""
    for flag in flags:
        name = flag.removeprefix("--").partition("=")[0]
        if flag.startswith("--") and name not in known:
            raise unknown_setting(name, known, names, _owners)


def _owners(key: str) -> list[str]:
    """The methods, datasets, models or engines that have a setting of this key."""
    part, _, name = key.partition(".")
    found = discovery.discover(PARTS[part][0]) if part in PARTS and name else {}
    return [owner for owner, cls in found.items() if name in fields_of(cls)]


def _dest(key: str) -> str:
    return key.replace(".", "__")


def _field_values(value: Any) -> dict[str, Any]:
    known = fields_of(type(value))
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name in known}


def _plain(value: Any) -> Any:
    """As JSON and YAML have it."""
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _frozen(value: Any) -> Any:
    """The inverse of `_plain`: settings are dataclasses that one can hash and compare."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _as_flag(key: str, value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(_plain(value))
    except TypeError:
        raise UserError(
            f"{key} must be a name, a number or a list of them, so that the run can be repeated, got an object of the "
            f"type {type(value).__name__}; give objects of your own to `federate`, or put the class into a file of the "
            "plug-in folder and name that (docs/extending.md)"
        ) from None


def _flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name.removesuffix(".name") if name.removesuffix(".name") in PARTS else name] = value
    return flat


def _explain(message: str, schema: Mapping[str, Field]) -> str:
    """The parser's complaint in the words of our settings: what was expected, what was given."""
    line = _one_line(message).replace("__", ".")
    key = re.search(r'Parser key "([^"]+)"', line)
    given = re.search(r"(?:Got value|Given value): (.*)$", line)
    if key is None or given is None or key[1] not in schema:
        return line
    return f"{key[1]} must be {type_in_words(schema[key[1]].type)}, got {given[1]}"


def _one_line(message: str) -> str:
    return re.sub(r"\s+", " ", message).strip()
