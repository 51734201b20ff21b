"""From a study to its runs: cells (environment, case, setting) and their seeds."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_lightning import discovery
from fl_lightning.data.partition import Split
from fl_lightning.errors import UserError, require
from fl_lightning.metrics.metric import GA
from fl_lightning.metrics.round_metrics import check_metric
from fl_lightning.models.tuning import Tuning
from fl_lightning.runs.config.aliases import UnknownSetting
from fl_lightning.runs.config.run_config import RunConfig, chosen_names, configure
from fl_lightning.runs.config.schema import fields_of, schema_of
from fl_lightning.runs.folder import ended
from fl_lightning.streams import numpy_generator
from tune.best import ROUNDS
from tune.study import MOST_ROUNDS, REFERENCE, Case, Range, Study

# What a run that others start from is, unless the study says otherwise.
PRETRAINING = {
    **{"method": "centralised", "method.on": "holdout", "data.clients": 1, "data.partition": "iid"},
    "evaluation.local": False,
}


@dataclass(frozen=True)
class Cell:
    """One setting of one case in one environment; its runs differ in the seed alone.

    Attributes:
        case: Label of the case.
        environment: The conditions.
        point: The tuned settings.
        config: All settings, with the first seed.
        seeds: Repetitions.
        refers: Settings that hold the folder of the reference run.
        references: That folder, by seed.
        confirms: Whether its seeds only confirm a choice that was made without them.
        start: The folder of the run that its networks start from, if that is there.
    """

    case: str
    environment: Mapping[str, Any]
    point: Mapping[str, Any]
    config: RunConfig
    seeds: tuple[int, ...]
    refers: tuple[str, ...] = ()
    references: Mapping[int, str] = field(default_factory=dict)
    confirms: bool = False
    start: str | None = None

    @property
    def group(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """Its case and environment."""
        return self.case, _key(self.environment)

    @property
    def in_words(self) -> str:
        """The same for people."""
        return f"{self.case} {', '.join(f'{key} {value}' for key, value in self.environment.items())}".rstrip()

    @property
    def comparison(self) -> tuple[Any, ...]:
        """What it is compared with: runs of more rounds are a comparison of their own, unless their number is tuned."""
        return (*self.group, None if ROUNDS in self.point else self.config.federation.rounds)

    @property
    def configs(self) -> list[RunConfig]:
        return [self._config(seed) for seed in self.seeds]

    def _config(self, seed: int) -> RunConfig:
        config = replace(self.config, seed=seed)
        if self.start is not None and config.model.tuning.weights is None:
            tuning = replace(config.model.tuning, weights=self.start)
            config = replace(config, model=replace(config.model, tuning=tuning))
        for key in self.refers:
            section, _, name = key.partition(".")
            settings = replace(getattr(config, section), **{name: self.references.get(seed)})
            config = replace(config, **{section: settings})
        return config


def cells(study: Study) -> list[Cell]:
    """All cells of a study that does not search by Optuna."""
    return [
        cell_of(study, case, environment, point)
        for environment in environments(study)
        for case in study.cases
        for point in points(study, case)
    ]


def reference_cells(study: Study) -> list[Cell]:
    """The runs that others refer to, one cell per environment, for all seeds of the study."""
    case = Case("reference", {**(study.reference or {}), **dict.fromkeys(_referring(study.base))})
    seeds = (*study.seeds, *(study.confirm.seeds if study.confirm else ()))
    return [replace(cell_of(study, case, environment, {}), seeds=seeds) for environment in environments(study)]


def pretrain_cells(study: Study) -> list[Cell]:
    """The runs that networks start from, one for each environment; how clients divide the data changes nothing."""
    if study.pretrain is None:
        return []
    of_clients = fields_of(Split).keys() - {"subset", "test_subset", "holdout", "holdout_seed", "drop_classes"}
    left_out = {f"data.{name}" for name in of_clients} | {f"model.{name}" for name in fields_of(Tuning)}

    def kept(settings: Mapping[str, Any]) -> dict[str, Any]:
        sections = ("data", "model", "engine", "compute")
        parts = {key: value for key, value in settings.items() if key.partition(".")[0] in sections}
        return {key: value for key, value in parts.items() if key not in left_out and "lora" not in key}

    found = []
    for environment in environments(study):
        settings = {**kept(study.base_in(environment)), **kept(environment), **PRETRAINING, **study.pretrain}
        seed = int(settings.pop("seed", 0))
        alone = replace(study, base={}, given=(), pretrain=None, metric=GA, stop=None, seeds=(seed,))
        found.append(cell_of(alone, Case("reference", settings), {}, {}))
    return found


def started(study: Study, tried: Sequence[Cell], out: Path) -> list[Cell]:
    """Cells whose networks start from the runs of `pretrain_cells`, where those have ended."""
    folders = {}
    for environment, cell in zip(environments(study), pretrain_cells(study), strict=study.pretrain is not None):
        known = ended(cell.config, out, None)
        folders[_key(environment)] = None if known is None else str(known.folder)
    return [replace(cell, start=folders.get(_key(cell.environment))) for cell in tried]


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
    """The index-th random setting. A key gets the same values in every case, so that all compete on equal terms.

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


def cell_of(study: Study, case: Case, environment: Mapping[str, Any], point: Mapping[str, Any]) -> Cell:
    """One setting of a case in one environment, checked."""
    given = {**study.base_in(environment), **case.settings, "seed": study.seeds[0]}
    refers = tuple(_referring(given))
    fixed = {key: value for key, value in given.items() if value is not None and key not in refers}
    chosen = {key: value for key, value in case.settings.items() if key in fixed}
    place = f"study {study.name}, case {case.label}"
    try:
        config = configure({**fixed, **environment, **chosen, **point})
        _check_metric(study, config)
    except UnknownSetting as error:
        remedy = _misplaced(study, study.base_in(environment), error.key)
        raise UserError(f"{place} has no setting {remedy}" if remedy else f"{place}: {error}") from None
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    return Cell(case.label, environment, point, config, study.seeds, refers)


def _misplaced(study: Study, base: Mapping[str, Any], key: str) -> str:
    """What to do with a key that stands for all cases, though only some have it; empty if that is not so."""
    common = {"space": study.space, "environments": study.environments, "base": base}
    where = next((name for name, settings in common.items() if key in settings), None)
    owners = [case.label for case in study.cases if where and _takes({**base, **case.settings}, key)]
    if not owners:
        return ""
    place = f"the space of the case {' and of '.join(owners)}"
    target = place if where == "space" else place.replace("the space of ", "")
    return f"{key}, which stands in {where} for all cases; put it into {target}"


def _check_metric(study: Study, config: RunConfig) -> None:
    rounds = config.federation.rounds
    for key, number in (("federation.rounds", rounds), ("training.epochs", config.training.epochs)):
        require(number <= MOST_ROUNDS, f"{key} must be at most {MOST_ROUNDS:,} in a study, got {number}")
    for name, metric in (("metric", study.metric), ("stop.metric", study.stop.metric if study.stop else None)):
        if metric is not None:
            check_metric(name, metric, config.classes, config.split.validation)


def _takes(settings: Mapping[str, Any], key: str) -> bool:
    """Whether a run with these parts has the setting."""
    parts = chosen_names(settings)
    extended = vars(discovery.find("methods", parts["method"])).get("extended_by", parts["method"])
    return key in schema_of(parts) or key in schema_of({**parts, "method": extended})


def _referring(settings: Mapping[str, Any]) -> list[str]:
    """The keys whose value stands for the folder of the reference run."""
    return [key for key, value in settings.items() if value == REFERENCE]


def _key(environment: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((key, str(value)) for key, value in environment.items()))


def _product(space: Mapping[str, Range]) -> list[dict[str, Any]]:
    combinations: Iterator[Sequence[Any]] = itertools.product(*(values.values for values in space.values()))
    return [dict(zip(space, combination, strict=True)) for combination in combinations]
