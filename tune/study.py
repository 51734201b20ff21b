"""A study: which settings are tried, under which conditions, how often, and what counts as good.

One YAML or Python file, data without logic:

    about: FOLA against FedAvg.                 # shown by `fl-lightning list studies`
    base: {data: digits, federation.rounds: 20} # settings of every run, by dotted key
    environments: {data.alpha: [0.01, 1]}       # what nobody can choose; every combination is a contest of its own
    cases:                                      # the contestants, each with settings and a space of its own
      - {label: FedAvg, method: fedavg}
      - {label: FOLA, method: fola, space: {method.strength: [1, 100]}}
    space: {training.lr: [0.1, 0.01]}           # what is tuned, for every case: a list is a grid
    seeds: 3                                    # 0, 1, 2; or a list
    scales: {smoke: {seeds: 1}}                 # named changes of all this, chosen by --scale

A space may also say `{choice: [...]}`, `{uniform: [low, high]}` or `{loguniform: [low, high]}`; then `search` says how
many samples every case gets in every environment, the same for all: `search: {algorithm: optuna, samples: 20}`.
"""

import hashlib
import json
import math
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from fl_lightning.errors import UserError, require, unknown

FOLDER = Path(__file__).parent / "studies"
DEFAULT_SCALE = "small"
REFERENCE = "@reference"
Distribution = Literal["choice", "uniform", "loguniform"]
Algorithm = Literal["grid", "random", "optuna"]


class Range(NamedTuple):
    """Where the values of one setting come from; `grid` takes every one of them."""

    kind: Literal["grid", "choice", "uniform", "loguniform"]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """A contestant.

    Attributes:
        label: What it is called in tables and figures.
        settings: What it fixes: method, options.
        space: What is tuned for it alone.
    """

    label: str
    settings: Mapping[str, Any]
    space: Mapping[str, Range] = field(default_factory=dict)


@dataclass(frozen=True)
class Search:
    """How the space is searched.

    Attributes:
        algorithm: Every combination (grid), independent draws (random), or Optuna's Bayesian search (optuna).
        samples: Settings that each case may try in each environment: the same budget for everybody.
        scheduler: asha stops bad settings early, judged by the metric round by round, within a case and environment.
        grace: Rounds that asha grants everybody.
        reduction: asha keeps one of this many at each of its stages.
    """

    algorithm: Algorithm = "grid"
    samples: int | None = None
    scheduler: Literal["none", "asha"] = "none"
    grace: int = 1
    reduction: int = 3

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            raise unknown("search.algorithm", str(self.algorithm), get_args(Algorithm))
        if self.scheduler not in ("none", "asha"):
            raise unknown("search.scheduler", str(self.scheduler), ("none", "asha"))
        require(
            self.algorithm == "grid" or _whole(self.samples),
            f"search.samples must say how many settings each case may try, a whole number >= 1, got {self.samples}",
        )
        require(
            self.algorithm != "grid" or self.samples is None,
            f"search.samples is {self.samples}, but a grid tries all settings; use search.algorithm random or optuna",
        )
        require(_whole(self.grace), f"search.grace must be a whole number of rounds >= 1, got {self.grace}")
        require(
            _whole(self.reduction) and self.reduction >= 2,
            f"search.reduction must be a whole number >= 2, got {self.reduction}",
        )
        require(
            self.scheduler == "none" or self.algorithm == "optuna",
            f"search.scheduler {self.scheduler} goes with search.algorithm optuna, got {self.algorithm}",
        )


@dataclass(frozen=True)
class Stop:
    """When a run need not go on.

    Attributes:
        metric: What is watched.
        at_least: Stop when it has reached this.
        patience: Stop when it has not improved for this many rounds.
    """

    metric: str = "GA"
    at_least: float = math.inf
    patience: float = math.inf

    def __post_init__(self) -> None:
        require(isinstance(self.metric, str), f"stop.metric must be the name of a metric, got {self.metric!r}")
        require(
            not math.isnan(_number(self.at_least)) and not isinstance(self.at_least, str),
            f"stop.at_least must be a number, got {self.at_least!r}",
        )
        require(
            _whole(self.patience) or self.patience == math.inf,
            f"stop.patience must be a number of rounds >= 1, got {self.patience!r}",
        )

    def reached(self, values: Sequence[float]) -> bool:
        """Whether the values of the rounds so far are enough.

        >>> Stop(patience=2).reached([0.1, 0.3, 0.2]), Stop(patience=2).reached([0.1, 0.3, 0.2, 0.3])
        (False, True)
        """
        best = max(range(len(values)), key=lambda i: (values[i], -i))
        return values[-1] >= self.at_least or len(values) - 1 - best >= self.patience

    def enough(self, values: Sequence[float]) -> int | None:
        """After how many rounds a run could have stopped; None if not yet.

        >>> Stop(at_least=0.5).enough([0.1, 0.6, 0.7]), Stop(at_least=0.5).enough([0.1])
        (2, None)
        """
        return next((number for number in range(1, len(values) + 1) if self.reached(values[:number])), None)


@dataclass(frozen=True)
class Study:
    """What a sweep computes.

    Attributes:
        name: Of the study.
        scale: Which of its scales this is.
        about: A sentence.
        base: Settings of every run.
        environments: Conditions; a contest in every combination of them.
        cases: The contestants.
        space: What is tuned for all of them.
        seeds: Repetitions.
        metric: What is good if large; of the last round, averaged over seeds, it decides what is best.
        search: How the space is searched.
        stop: When a run need not go on.
        continue_to: The best setting of every case and environment goes on to this many rounds.
        thresholds: Levels of GA whose round of arrival the table shows.
        keep_checkpoints: Whether the final models stay on disk.
        draw: Two Gaussian posteriors in the plane (means, covariances, weight) instead of runs: a picture is computed.
        report: Whether figures and tables of the study are made at the end and stored with the sweep in MLflow.
        reference: Settings of a run that is computed first, for every environment and seed; where a setting is
            `@reference`, the folder of that run takes its place.
    """

    name: str
    scale: str
    about: str = ""
    base: Mapping[str, Any] = field(default_factory=dict)
    environments: Mapping[str, Range] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    space: Mapping[str, Range] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    metric: str = "GA"
    search: Search = field(default_factory=Search)
    stop: Stop | None = None
    continue_to: int | None = None
    thresholds: tuple[float, ...] = ()
    keep_checkpoints: bool = False
    reference: Mapping[str, Any] | None = None
    draw: Mapping[str, Any] | None = None
    report: bool = False

    def __post_init__(self) -> None:
        if self.draw is not None:
            return
        require(isinstance(self.metric, str), f"metric must be the name of a metric, got {self.metric!r}")
        require(
            isinstance(self.keep_checkpoints, bool),
            f"keep_checkpoints must be true or false, got {self.keep_checkpoints!r}",
        )
        labels = [case.label for case in self.cases]
        require(bool(labels), f"study {self.name} has no cases; name at least one method under `cases`")
        twice = [label for label in labels if labels.count(label) > 1]
        require(not twice, f"study {self.name} has two cases called {''.join(twice[:1])!r}; give each its own label")
        require(bool(self.seeds), f"study {self.name} has no seeds; give a number or a list, such as seeds: 3")
        spaces = [self.space, *(case.space for case in self.cases)]
        drawn = [key for space in spaces for key, values in space.items() if values.kind != "grid"]
        require(
            not drawn or self.search.algorithm != "grid",
            f"study {self.name} draws {', '.join(sorted(set(drawn)))} at random, which a grid cannot; give "
            "`search: {algorithm: optuna, samples: 20}` or lists of values",
        )
        for key, values in self.environments.items():
            require(values.kind == "grid", f"environments.{key} must be a list of values, got {values.kind}")
        require(
            self.search.algorithm == "grid" or any(spaces),
            f"study {self.name} searches an empty space; name at least one key under `space`",
        )
        require(
            self.continue_to is None or (_whole(self.continue_to) and self.search.scheduler == "none"),
            f"continue_to must be a number of rounds, and goes with search.scheduler none, got {self.continue_to}",
        )

        settings = [self.base, *(case.settings for case in self.cases)]
        require(
            self.reference is not None or not any(REFERENCE in map(str, one.values()) for one in settings),
            f"study {self.name} has a setting {REFERENCE} but no `reference`; give the settings of the reference run",
        )

    @property
    def identity(self) -> str:
        """A short hash of everything the study says."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True, default=str).encode()).hexdigest()[:8]


def names() -> list[str]:
    """The studies that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str, scale: str | None = None, overrides: Mapping[str, Any] | None = None) -> Study:
    """A study by name, or from a YAML or Python file.

    Args:
        name: One of `names()`, or a path; a Python file defines a mapping called STUDY.
        scale: Which of its scales; without one `small`, or the study as it stands if it has no scales.
        overrides: Settings for all runs; a key that the study varies is pinned to the value.
    """
    content = _read(name)
    scales = content.pop("scales", {}) or {}
    require(isinstance(scales, Mapping), f"{name}: scales must be a mapping of names, got {scales!r}")
    if scale is not None and scale not in scales:
        if not scales:
            raise UserError(f"study {name} has no scales, got --scale {scale}; leave it out")
        raise unknown("scale", scale, scales)
    scale = scale or (DEFAULT_SCALE if DEFAULT_SCALE in scales else next(iter(scales), ""))
    changes = (scales[scale] or {}) if scale else {}
    require(isinstance(changes, Mapping), f"{name}: scale {scale} must be a mapping, got {changes!r}")
    for key, value in changes.items():
        merges = isinstance(content.get(key), Mapping) and isinstance(value, Mapping)
        content[key] = _merged(f"{name}: {key}", key == "base", content[key], value) if merges else value
    study = _parse(Path(name).stem if _is_file(name) else name, scale or "", content)
    return _pin(study, overrides or {})


def _merged(where: str, flatten: bool, old: Any, new: Any) -> dict[str, Any]:
    """Two mappings, the new one winning; `training: {lr: 1}` is `training.lr: 1`."""
    return {**_mapping(where, old, flatten), **_mapping(where, new, flatten)}


def describe(name: str) -> str:
    """The sentence about a study."""
    return str(_read(name).get("about", ""))


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml", ".py")


def _read(name: str) -> dict[str, Any]:
    if not _is_file(name):
        if name not in names():
            raise unknown("study", name, names())
        path = FOLDER / f"{name}.yaml"
    else:
        path = Path(name)
    try:
        if path.suffix == ".py":
            content: Any = runpy.run_path(str(path)).get("STUDY")
            require(content is not None, f"{path} must define STUDY, a mapping; see docs/sweeps.md")
        else:
            content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"no study at {path}; fl-lightning list studies shows those that come with it") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from None
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's Python file may do
        raise UserError(f"{path} cannot be run: {type(error).__name__}: {error}") from None
    require(isinstance(content, Mapping), f"{path} must hold a mapping with base, cases, space, ..., got {content!r}")
    return dict(content)


def _parse(name: str, scale: str, content: Mapping[str, Any]) -> Study:
    known = {item.name for item in fields(Study)} - {"name", "scale"}
    for key in content:
        if key not in known:
            raise unknown(f"key of study {name}", str(key), known)
    values = dict(content)
    for key in ("environments", "space"):
        if key in values:
            values[key] = _space(f"{name}: {key}", values[key])
    for key in ("base", "reference"):
        if key in values:
            values[key] = _mapping(f"{name}: {key}", values[key])
    values["cases"] = tuple(_case(name, item) for item in _listed(f"{name}: cases", values.get("cases", ())))
    values["seeds"] = _seeds(name, values.get("seeds", 1))
    for key, cls in (("search", Search), ("stop", Stop)):
        if values.get(key) is not None:
            values[key] = _section(f"{name}: {key}", cls, values[key])
    if "thresholds" in values:
        levels = values["thresholds"]
        good = isinstance(levels, Sequence) and all(isinstance(level, int | float) for level in levels)
        require(good, f"{name}: thresholds must be a list of numbers, got {levels!r}")
        values["thresholds"] = tuple(levels)
    return Study(name, scale, **values)


def _case(study: str, content: Any) -> Case:
    settings = {"method": content} if isinstance(content, str) else _mapping(f"{study}: a case", content)
    space = _space(f"{study}: space of a case", settings.pop("space", {}))
    label = settings.pop("label", None) or settings.get("method")
    require(isinstance(label, str), f"{study}: a case must name its method, got {content!r}")
    return Case(str(label), settings, space)


def _space(where: str, content: Any) -> dict[str, Range]:
    space = {}
    for key, values in _mapping(where, content or {}, flatten=False).items():
        if isinstance(values, Mapping):
            require(len(values) == 1, f"{where}: {key} must be a list or one of choice, uniform, loguniform")
            ((kind, bounds),) = values.items()
            if kind not in get_args(Distribution):
                raise unknown(f"distribution of {key}", str(kind), get_args(Distribution))
        else:
            kind, bounds = "grid", values
        require(
            isinstance(bounds, Sequence) and not isinstance(bounds, str) and len(bounds) > 0,
            f"{where}: {key} must be a list with at least one value, got {bounds!r}",
        )
        if kind in ("uniform", "loguniform"):
            low, high = (_number(bound) for bound in bounds) if len(bounds) == 2 else (math.nan, math.nan)
            require(
                low < high and (kind == "uniform" or low > 0),
                f"{where}: {key} must be {kind}: [low, high] with {'0 < ' * (kind == 'loguniform')}low < high, "
                f"got {bounds!r}",
            )
            bounds = [low, high]
        space[str(key)] = Range(kind, tuple(bounds))
    return space


def _number(value: Any) -> float:
    """A number, also where YAML takes it for text, as it does with 1e-3; NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _seeds(name: str, content: Any) -> tuple[int, ...]:
    if _whole(content):
        return tuple(range(content))
    good = isinstance(content, Sequence) and not isinstance(content, str) and all(isinstance(s, int) for s in content)
    require(good, f"{name}: seeds must be a number >= 1 or a list of whole numbers, got {content!r}")
    return tuple(dict.fromkeys(content))


def _section(where: str, cls: type[Any], content: Any) -> Any:
    settings = _mapping(where, content)
    known = [item.name for item in fields(cls)]
    for key in settings:
        if key not in known:
            raise unknown(where, key, known)
    return cls(**settings)


def _mapping(where: str, content: Any, flatten: bool = True) -> dict[str, Any]:
    require(isinstance(content, Mapping), f"{where} must be a mapping, got {content!r}")
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if flatten and isinstance(value, Mapping) and key != "space":
            flat |= {f"{key}.{inner}": v for inner, v in _mapping(where, value).items()}
        else:
            flat[str(key)] = value
    return flat


def _listed(where: str, content: Any) -> Sequence[Any]:
    require(isinstance(content, Sequence) and not isinstance(content, str), f"{where} must be a list, got {content!r}")
    listed: Sequence[Any] = content
    return listed


def _pin(study: Study, overrides: Mapping[str, Any]) -> Study:
    """The study with some settings fixed from outside, whatever it says about them."""
    if not overrides:
        return study

    def without(space: Mapping[str, Range]) -> dict[str, Range]:
        return {key: values for key, values in space.items() if key not in overrides}

    cases = tuple(
        Case(case.label, {k: v for k, v in case.settings.items() if k not in overrides}, without(case.space))
        for case in study.cases
    )
    values = {item.name: getattr(study, item.name) for item in fields(Study)}
    values |= {
        "base": {**study.base, **overrides},
        "environments": without(study.environments),
        "space": without(study.space),
        "cases": cases,
    }
    return Study(**values)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
