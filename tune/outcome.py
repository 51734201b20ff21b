"""What the runs of a cell have shown, which cell of a comparison is the best, and the runs that follow from it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
    comparisons: dict[Any, list[CellOutcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.cell.confirms):
        mine = comparisons.setdefault(outcome.cell.comparison, [])
        if not (outcome.cell.confirms and mine):
            mine.append(outcome)
    found = [(mine, best.best([one.tried for one in mine])) for mine in comparisons.values()]
    return [mine[number] for mine, number in found if number is not None]


def without_result(outcomes: Sequence[CellOutcome]) -> list[str]:
    """The comparisons in which every run diverged, for which tables have no row."""
    known = {outcome.cell.comparison for outcome in best_of(outcomes)}
    lost = {outcome.cell.comparison: outcome.cell for outcome in outcomes if outcome.runs}
    return [cell.in_words for comparison, cell in lost.items() if comparison not in known]


def protocol_of(outcomes: Sequence[CellOutcome], study: Study) -> str:
    """How the numbers of the table came about; empty if there was nothing to choose from."""
    comparisons = [outcome.cell.comparison for outcome in outcomes if not outcome.cell.confirms]
    if len(set(comparisons)) == len(comparisons) and study.confirm is None:
        return ""
    fewer = any(case.confirming for case in study.cases)
    return best.protocol(study.metric, study.seeds, study.confirm.seeds if study.confirm else (), fewer)


def follows_up(study: Study) -> bool:
    """Whether a study goes on when all settings have been tried."""
    return study.continue_to is not None or study.confirm is not None


def finals(study: Study, tried: Sequence[Cell], out: Path) -> list[Cell]:
    """The best setting of every case and environment, with all rounds and, if the study confirms, on fresh seeds.

    The seeds that chose do not go on where fresh ones do: nothing but the choice is read off them.
    """
    return [final(study, cell) for cell in _best(study, tried, out)] if follows_up(study) else []


def expected(study: Study, tried: Sequence[Cell], out: Path) -> list[Cell]:
    """The same, before all settings have been tried: those that would be chosen now."""
    # Where nothing is known yet, one setting of each comparison stands for the best.
    likely = {cell.comparison: cell for cell in tried} | {cell.comparison: cell for cell in _best(study, tried, out)}
    return [final(study, cell) for cell in likely.values()] if follows_up(study) else []


def final(study: Study, cell: Cell) -> Cell:
    """A setting with the rounds and on the seeds that a study ends with."""
    if study.continue_to is not None:
        federation = replace(cell.config.federation, rounds=study.continue_to)
        cell = replace(cell, config=replace(cell.config, federation=federation))
    return on_fresh_seeds(study, cell) if study.confirm is not None else cell


def on_fresh_seeds(study: Study, cell: Cell) -> Cell:
    """The same setting on the confirming seeds."""
    return replace(cell, seeds=study.confirming_seeds(cell.case), confirms=True)


def _best(study: Study, tried: Sequence[Cell], out: Path) -> list[Cell]:
    return [one.cell for one in best_of([outcome_of(cell, out, study) for cell in tried])]
