"""From a study to its runs: cells (environment, case, setting) and their seeds."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fl_lightning.config import PARTS, RunConfig, build, configure, schema_of
from fl_lightning.errors import UserError, require
from fl_lightning.streams import numpy_generator
from fl_lightning.usual_names import UnknownSetting
from tune.best import ROUNDS, VALIDATION
from tune.study import REFERENCE, Case, Range, Study


@dataclass(frozen=True)
class Cell:
    """One setting of one case in one environment; its runs differ in the seed alone.

    Attributes:
        case: Label of the contestant.
        environment: The conditions.
        point: The tuned settings.
        config: All settings, with the first seed.
        seeds: Repetitions.
        refers: Settings that hold the folder of the reference run.
        references: That folder, by seed.
        confirms: Whether its seeds only confirm a choice that was made without them.
    """

    case: str
    environment: Mapping[str, Any]
    point: Mapping[str, Any]
    config: RunConfig
    seeds: tuple[int, ...]
    refers: tuple[str, ...] = ()
    references: Mapping[int, str] = field(default_factory=dict)
    confirms: bool = False

    @property
    def group(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """Its case and environment."""
        return self.case, tuple(sorted((key, str(value)) for key, value in self.environment.items()))

    @property
    def contest(self) -> tuple[Any, ...]:
        """Whom it competes with: runs of more rounds are a contest of their own, unless their number is tuned."""
        return (*self.group, None if ROUNDS in self.point else self.config.federation.rounds)

    @property
    def configs(self) -> list[RunConfig]:
        return [self._config(seed) for seed in self.seeds]

    def _config(self, seed: int) -> RunConfig:
        config = replace(self.config, seed=seed)
        for key in self.refers:
            section, _, name = key.partition(".")
            settings = replace(getattr(config, section), **{name: self.references.get(seed)})
            config = replace(config, **{section: settings})
        return config


def cells(study: Study) -> list[Cell]:
    """All cells of a study that does not search by Optuna."""
    builders = {case.label: Builder(study, case) for case in study.cases}
    return [
        builders[case.label].cell(environment, point)
        for environment in environments(study)
        for case in study.cases
        for point in points(study, case)
    ]


def reference_cells(study: Study) -> list[Cell]:
    """The runs that others refer to, one cell per environment, for all seeds of the study."""
    case = Case("reference", {**(study.reference or {}), **dict.fromkeys(_referring(study.base))})
    builder = Builder(study, case)
    seeds = (*study.seeds, *(study.confirm.seeds if study.confirm else ()))
    return [replace(builder.cell(environment, {}), seeds=seeds) for environment in environments(study)]


def environments(study: Study) -> list[dict[str, Any]]:
    """Every combination of the conditions."""
    return _product(study.environments)


def points(study: Study, case: Case) -> list[dict[str, Any]]:
    """The settings that a case tries in every environment, if they are known beforehand."""
    space = {**study.space, **case.space}
    if study.search.algorithm == "grid":
        return _product(space)
    return [draw(space, index) for index in range(study.search.samples or 0)]


def draw(space: Mapping[str, Range], index: int) -> dict[str, Any]:
    """The index-th random setting. A key gets the same values in every case, so that all are judged on equal terms.

    >>> first = draw({"training.lr": Range("loguniform", (0.001, 1.0))}, 0)
    >>> 0.001 <= first["training.lr"] <= 1.0, first == draw({"training.lr": Range("loguniform", (0.001, 1.0))}, 0)
    (True, True)
    """
    setting = {}
    for key, (kind, values) in space.items():
        chance = float(numpy_generator(0, f"search {key}", index).random())
        if kind == "uniform":
            setting[key] = values[0] + chance * (values[1] - values[0])
        elif kind == "loguniform":
            setting[key] = math.exp(math.log(values[0]) + chance * math.log(values[1] / values[0]))
        else:
            setting[key] = values[int(chance * len(values))]
    return setting


class Builder:
    """Makes the cells of one case, with their settings checked.

    Thousands of configurations take a while even where the command line's parser has seen every value. So they are put
    together from what it made of each value of a key.
    """

    def __init__(self, study: Study, case: Case) -> None:
        self._study, self._case = study, case
        fixed = {**study.base, **case.settings, "seed": study.seeds[0]}
        self._refers = tuple(_referring(fixed))
        self._fixed = {key: value for key, value in fixed.items() if value is not None and key not in self._refers}
        self._parsed: dict[str, Any] = {}
        self._others: dict[str, Builder] = {}

    def cell(self, environment: Mapping[str, Any], point: Mapping[str, Any]) -> Cell:
        """One setting in one environment."""
        if self._study.given:
            return self._under(environment).cell(environment, point)
        try:
            chosen = {key: value for key, value in self._case.settings.items() if key in self._fixed}
            config = self._config({**environment, **chosen, **point})
            self._check_metric(config)
        except UnknownSetting as error:
            raise UserError(self._misplaced(error.key) or f"{self._place}: {error}") from None
        except UserError as error:
            raise UserError(f"{self._place}: {error}") from None
        return Cell(self._case.label, environment, point, config, self._study.seeds, self._refers)

    def _under(self, environment: Mapping[str, Any]) -> "Builder":
        """Whoever makes the cells of environments with the same base."""
        base = self._study.base_in(environment)
        name = repr(base)
        if name not in self._others:
            self._others[name] = Builder(replace(self._study, base=base, given=()), self._case)
        return self._others[name]

    @property
    def _place(self) -> str:
        return f"study {self._study.name}, case {self._case.label}"

    def _misplaced(self, key: str) -> str:
        """What to do with a key that stands for all cases, though only some have it; empty if that is not so."""
        study = self._study
        common = {"space": study.space, "environments": study.environments, "base": study.base}
        where = next((name for name, settings in common.items() if key in settings), None)
        owners = [case.label for case in study.cases if where and _takes({**study.base, **case.settings}, key)]
        if not owners:
            return ""
        place = f"the space of the case {' and of '.join(owners)}"
        target = place if where == "space" else place.replace("the space of ", "")
        return f"{self._place} has no setting {key}, which stands in {where} for all cases; put it into {target}"

    def _config(self, varied: Mapping[str, Any]) -> RunConfig:
        if any(key in PARTS and key not in self._case.settings for key in varied):
            return configure({**self._fixed, **varied})  # other parts have other settings
        values = dict(self._parse("", None))
        for key, value in varied.items():
            values[key] = self._parse(key, value)[key]
        return build(values)

    def _check_metric(self, config: RunConfig) -> None:
        stop = self._study.stop.metric if self._study.stop else None
        for name, metric in (("metric", self._study.metric), ("stop.metric", stop)):
            require(
                metric != VALIDATION or config.split.validation > 0,
                f"{name} {VALIDATION} needs data that belong to no client, got data.validation 0; set data.validation, "
                "0.1 for instance, for all runs, or choose another metric",
            )

    def _parse(self, key: str, value: Any) -> dict[str, Any]:
        name = f"{key}={value!r}"
        if name not in self._parsed:
            self._parsed[name] = configure({**self._fixed, **({key: value} if key else {})}).flat()
        flat: dict[str, Any] = self._parsed[name]
        return flat


def _takes(settings: Mapping[str, Any], key: str) -> bool:
    """Whether a run with these parts has the setting."""
    parts = {part: settings.get(part, default) for part, (_, default, _) in PARTS.items()}
    return key in schema_of(parts)


def _referring(settings: Mapping[str, Any]) -> list[str]:
    """The keys whose value stands for the folder of the reference run."""
    return [key for key, value in settings.items() if value == REFERENCE]


def _product(space: Mapping[str, Range]) -> list[dict[str, Any]]:
    combinations: Iterator[Sequence[Any]] = itertools.product(*(values.values for values in space.values()))
    return [dict(zip(space, combination, strict=True)) for combination in combinations]
