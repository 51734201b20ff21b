"""The results of a cell's runs, and the best cell of each comparison."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.errors import unknown
from fl_lightning.metrics.early_stopping import ALWAYS
from fl_lightning.metrics.metric import sign
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.folder import Result, ended
from tune import best
from tune.grid import Cell
from tune.study import Study


class CellOutcome(NamedTuple):
    """A cell and its runs.

    Attributes:
        cell: The setting.
        metric: The study's metric.
        runs: Those that have ended, with how.
    """

    cell: Cell
    metric: str
    runs: list[tuple[RunConfig, Result]]

    @property
    def good(self) -> list[Result]:
        """How the runs ended that did not diverge."""
        return [result for _, result in self.runs if result.status != "diverged" and result.history]

    @property
    def values(self) -> list[float]:
        """The metric after the last round of each of them."""
        return [measured(result.final, self.metric) for result in self.good]

    @property
    def tried(self) -> best.Tried:
        """What the rule for the best looks at."""
        diverged = sum(result.status == "diverged" for _, result in self.runs)
        return best.Tried(self.values, diverged, sign(self.metric))


def outcome_of(cell: Cell, out: Path, study: Study) -> CellOutcome:
    """Read what the runs of a cell have left."""
    found = [(config, ended(config, out, study.stop)) for config in cell.configs]
    return CellOutcome(cell, study.metric, [(config, result) for config, result in found if result])


def measured(metrics: Mapping[str, float], metric: str) -> float:
    """The value of a metric, NaN in a round that was not measured, or an error that names the nearest one."""
    if metric not in metrics and ALWAYS in metrics:
        raise unknown("metric", metric, metrics)
    return metrics.get(metric, math.nan)


def best_of(outcomes: Iterable[CellOutcome]) -> list[CellOutcome]:
    """The best cell of every comparison; see `tune.best`.

    Fresh seeds choose nothing; where none but they have so many rounds, they are of the setting that was chosen before.
    """
    contests: dict[Any, list[CellOutcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.cell.confirms):
        mine = contests.setdefault(outcome.cell.contest, [])
        if not (outcome.cell.confirms and mine):
            mine.append(outcome)
    found = [(mine, best.best([one.tried for one in mine])) for mine in contests.values()]
    return [mine[number] for mine, number in found if number is not None]


def protocol_of(outcomes: Sequence[CellOutcome], study: Study) -> str:
    """How the numbers of the table came about; empty if there was nothing to choose from."""
    contests = [outcome.cell.contest for outcome in outcomes if not outcome.cell.confirms]
    if len(set(contests)) == len(contests) and study.confirm is None:
        return ""
    fewer = any(case.confirming for case in study.cases)
    return best.protocol(study.metric, study.seeds, study.confirm.seeds if study.confirm else (), fewer)
