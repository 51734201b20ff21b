"""Runs that follow from what a study has found: its best settings with more rounds, or on fresh seeds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tune.grid import Cell
from tune.outcome import best_of, outcome_of
from tune.study import Study


def follows_up(study: Study) -> bool:
    """Whether a study goes on when all settings have been tried."""
    return study.continue_to is not None or study.confirm is not None


def finals(study: Study, tried: Sequence[Cell], out: Path) -> list[Cell]:
    """The best setting of every case and environment, with all rounds and, if the study confirms, on fresh seeds.

    The seeds that chose do not go on where fresh ones do: nothing but the choice is read off them.
    """
    return [final(study, cell) for cell in _best(study, tried, out)] if follows_up(study) else []


def expected(study: Study, tried: Sequence[Cell], out: Path) -> list[Cell]:
    """The same before all settings have been tried: those that would be chosen now."""
    # Where nothing is known yet, one setting of each comparison stands for the best.
    likely = {cell.contest: cell for cell in tried} | {cell.contest: cell for cell in _best(study, tried, out)}
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
