"""The settings of a run: nested dataclasses in Python, flat dotted keys everywhere else.

One key is the command-line flag, the YAML key, the search-space key, the MLflow param and the column of a table:
`method.strength`, `data.alpha`, `training.lr`. The keys `method`, `data`, `model` and `engine` hold the names of what
was discovered; the settings below them follow from that choice.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from fl_lightning import discovery
from fl_lightning.data.dataset import Source
from fl_lightning.data.partition import Split
from fl_lightning.engines.base import Engine
from fl_lightning.errors import UserError, require
from fl_lightning.method import Method
from fl_lightning.metrics.settings import Evaluation, Probe
from fl_lightning.metrics.uncertainty.settings import Uncertainty
from fl_lightning.models.tuning import Lora, Tuning
from fl_lightning.runs.config.aliases import unknown_setting, with_extended_method
from fl_lightning.runs.config.compute import Compute, Model
from fl_lightning.runs.config.schema import PARTS, SECTIONS, as_text, fields_of, frozen, plain, schema_of, typed
from fl_lightning.training import Federation, Training

# The section that is a part of the model.
LORA = "model.lora"
# The settings in the folder of a run: for people and `--config`, and for programs, which read JSON much faster.
SETTINGS_YAML, SETTINGS_JSON = "config.yaml", "settings.json"


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
        values = {
            "method": _field_values(self.method),
            "data": _field_values(self.source) | _field_values(self.split),
            "model": _field_values(self.model.tuning) | dict(self.model.options),
            "engine": _field_values(self.engine),
        }
        for part, name in self.names.items():
            flat |= {part: name, **{f"{part}.{key}": value for key, value in values[part].items()}}
        for section in SECTIONS:
            flat |= {f"{section}.{key}": value for key, value in _field_values(attrgetter(section)(self)).items()}
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
            value = yaml.safe_dump(plain(flat[key]), default_flow_style=True).removesuffix("\n").removesuffix("\n...")
            lines += [f"{indent}# {item.help}", f"{indent}{'name' if key in PARTS else name}: {value}"]
        return "\n".join(lines).lstrip("\n") + "\n"

    def varied(self) -> dict[str, Any]:
        """The names of the parts, and those settings that differ from their defaults."""
        schema = schema_of(self.names)
        return {key: value for key, value in self.flat().items() if key in PARTS or value != plain(schema[key].default)}

    def recorded(self) -> dict[str, Any]:
        """`varied` as it counts for the identity of a run: methods that are recorded as another share its name."""
        varied, cls = self.varied(), type(self.method)
        if "recorded_as" not in vars(cls):
            return varied
        defaults = fields_of(discovery.inherited(cls) or cls)  # a preset is recorded with what it changes
        changed = {name: value for name, value in _field_values(self.method).items() if value != defaults[name].default}
        others = {key: value for key, value in varied.items() if not key.startswith("method.")}
        return {**others, "method": self.recorded_method, **{f"method.{name}": v for name, v in changed.items()}}

    @property
    def recorded_method(self) -> str:
        """The name of the method in folders and identities."""
        return str(vars(type(self.method)).get("recorded_as") or self.names["method"])

    @property
    def classes(self) -> dict[str, type[Any]]:
        """The classes of the parts: method, data, model, engine."""
        model = discovery.find("models", self.model.name)
        return {"method": type(self.method), "data": type(self.source), "model": model, "engine": type(self.engine)}

    @property
    def names(self) -> dict[str, str]:
        """The names of the parts: method, data, model, engine."""
        return {
            "method": _name_of("method", self.method),
            "data": _name_of("data", self.source),
            "model": self.model.name,
            "engine": _name_of("engine", self.engine),
        }


def configure(settings: Mapping[str, Any] | None = None) -> RunConfig:
    """A run's configuration from dotted keys, as text or as values; what is not given has its default.

    >>> configure({"method": "fola", "data.alpha": 0.01, "method.strength": "10"}).method.strength
    10.0
    """
    settings, names = with_extended_method(settings or {}, chosen_names(settings or {}))
    schema = schema_of(names)
    check_keys(settings, schema, names)
    given = {key: typed(key, schema[key].type, value) for key, value in settings.items()}
    return build({"seed": schema["seed"].default, **names, **by_owners(names, given), **given})


def build(values: Mapping[str, Any]) -> RunConfig:
    """The nested configuration from typed, flat settings, at least the names of the parts and the seed.

    It is the inverse of `RunConfig.flat`.
    """
    given: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        given[section][name] = frozen(value)
    top = given[""]
    classes = {part: discovery.find(kind, top[part]) for part, (kind, _, _) in PARTS.items()}

    def made(section: str, cls: type[Any]) -> Any:
        return cls(**{name: value for name, value in given[section].items() if name in fields_of(cls)})

    options = {name: frozen(item.default) for name, item in fields_of(classes["model"]).items()}
    tuning = {name: value for name, value in given["model"].items() if name not in options}
    return RunConfig(
        method=made("method", classes["method"]),
        source=made("data", classes["data"]),
        split=made("data", Split),
        model=Model(
            top["model"],
            {name: given["model"].get(name, default) for name, default in options.items()},
            Tuning(**tuning),
            made(LORA, Lora),
        ),
        engine=made("engine", classes["engine"]),
        seed=top["seed"],
        **{section: made(section, cls) for section, cls in SECTIONS.items() if section != LORA},
    )


def chosen_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Which method, dataset, model and engine the settings name."""
    return {part: as_text(part, settings.get(part, default)) for part, (_, default, _) in PARTS.items()}


def check_keys(keys: Iterable[str], known: Collection[str], names: Mapping[str, str]) -> None:
    """Refuse a setting that does not exist with these parts, with the one that was probably meant."""
    for key in keys:
        if key not in known:
            raise unknown_setting(key, known, names)


def by_owners(names: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, str]:
    """Where a column names the clients, the default of the partition is theirs."""
    column = discovery.find("data", names["data"]).owners_by
    return {"data.partition": "natural"} if column and given.get(f"data.{column}") is not None else {}


def read_yaml(path: Path | str) -> dict[str, Any]:
    """The settings of a YAML file by dotted key. Nested and dotted keys both work; `method: fola` names a part."""
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except OSError as error:
        raise UserError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:  # the latter: not UTF-8
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    require(isinstance(content, dict), f"{path} must hold settings as `key: value`, got {type(content).__name__}")
    return _flatten(content)


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a saved run by dotted key; those of older runs, and of archives, are in YAML alone.

    Raises:
        UserError: If they cannot be read.
    """
    try:
        content = json.loads((folder / SETTINGS_JSON).read_bytes())
    except (OSError, ValueError):  # of an older run, or damaged
        content = None
    return content if isinstance(content, dict) else read_yaml(folder / SETTINGS_YAML)


def _flatten(content: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for given, value in content.items():
        key = "on" if given is True else given  # YAML takes the name `on` for a truth value
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name.removesuffix(".name") if name.removesuffix(".name") in PARTS else name] = value
    return flat


def _name_of(part: str, value: Any) -> str:
    return discovery.name_of(PARTS[part][0], type(value)) or type(value).__name__


def _field_values(value: Any) -> dict[str, Any]:
    known = fields_of(type(value))
    return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name in known}
