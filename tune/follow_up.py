"""Runs that follow from what a study has found: its best settings with more rounds, or on fresh seeds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tune.grid import Cell
from tune.outcome import best_of, outcome_of
from tune.study import Study


def continued(study: Study, tried: Sequence[Cell], out: Path) -> list[Cell]:
    """The best setting of every case and environment, with more rounds."""
    return [longer(study, cell) for cell in _best(study, tried, out)]


def confirmed(study: Study, tried: Sequence[Cell], out: Path) -> list[Cell]:
    """The best setting of every case and environment, on seeds that had no part in choosing it."""
    return [on_fresh_seeds(study, cell) for cell in _best(study, tried, out)]


def expected(study: Study, tried: Sequence[Cell], out: Path) -> list[Cell]:
    """Both, as far as can be told before all settings have been tried: those that would be chosen now."""
    # Where nothing is known yet, one setting of each contest stands for the best.
    likely = {cell.contest: cell for cell in tried} | {cell.contest: cell for cell in _best(study, tried, out)}
    best = [longer(study, cell) for cell in likely.values()]
    fresh = [on_fresh_seeds(study, cell) for cell in best] if study.confirm is not None else []
    return [*(best if study.continue_to is not None else []), *fresh]


def longer(study: Study, cell: Cell) -> Cell:
    """With the rounds that a study continues to, if it does."""
    if study.continue_to is None:
        return cell
    federation = replace(cell.config.federation, rounds=study.continue_to)
    return replace(cell, config=replace(cell.config, federation=federation))


def on_fresh_seeds(study: Study, cell: Cell) -> Cell:
    """The same setting on the confirming seeds."""
    return replace(cell, seeds=study.confirming_seeds(cell.case), confirms=True)


def _best(study: Study, tried: Sequence[Cell], out: Path) -> list[Cell]:
    return [one.cell for one in best_of([outcome_of(cell, out, study) for cell in tried])]
