"""What earlier processes have left of a run: its checkpoint, or the rounds of a run that differs in length alone."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fl_lightning.config import RunConfig
from fl_lightning.errors import UserError
from fl_lightning.probes import ridge
from fl_lightning.probes.accuracy import as_if_not_due
from fl_lightning.record import Measurement, Snapshot
from fl_lightning.runs import checkpoint
from fl_lightning.runs.checkpoint import Saved
from fl_lightning.runs.final_round import without
from fl_lightning.runs.folder import finished, folder_of, latest
from fl_lightning.runs.identity import identity


def saved_rounds(
    config: RunConfig, out: Path, start: Snapshot, fresh: bool, own: frozenset[str] = frozenset()
) -> Saved | None:
    """The latest round to go on from, with the numbers of all rounds up to it; None if there is nothing.

    Args:
        config: The run.
        out: Folder of all runs.
        start: The server before round 1, whose structure a checkpoint must have.
        fresh: Whether only this very run counts.
        own: The names of metrics that the model measures itself.
    """
    saved = checkpoint.read(folder_of(config, out), identity(config), start)
    stopped = latest(config, out)
    if stopped is not None and len(stopped.history) == config.federation.rounds:
        return Saved(start, stopped.history)  # after its last round, of which no checkpoint was kept
    return _of_relatives(config, out, start, own) if saved is None and not fresh else saved


def known_rounds(config: RunConfig, out: Path) -> int:
    """How many rounds of a run that has not ended need not be computed; no checkpoint is read whole."""
    rounds = config.federation.rounds
    for relative in (config, *_relatives(config, out)):
        with suppress(UserError):
            if _read_off(config, relative, out):
                return rounds
            if relative.federation.rounds <= rounds and (done := checkpoint.round_of(folder_of(relative, out))):
                return done
    return 0


def _of_relatives(config: RunConfig, out: Path, start: Snapshot, own: frozenset[str]) -> Saved | None:
    """The rounds that a run has computed which differs from this one only in how many rounds it takes."""
    rounds = config.federation.rounds
    for relative in _relatives(config, out):
        folder = folder_of(relative, out)
        with suppress(UserError):  # a damaged one is of no use here
            arrays = ridge.read(folder)
            if arrays:
                ridge.write(folder_of(config, out), arrays)
            if relative.federation.rounds < rounds and (saved := checkpoint.read(folder, identity(relative), start)):
                # What was its final round is none of this run's.
                return saved._replace(history=[_as_here(config, i, m, own) for i, m in enumerate(saved.history, 1)])
            if history := _read_off(config, relative, out):
                return Saved(start, history)
    return None


def _relatives(config: RunConfig, out: Path) -> Iterator[RunConfig]:
    """Runs that have left a folder and differ from this one in their number of rounds alone, the longest first."""
    rounds = config.federation.rounds
    if rounds == 1:
        return  # grids have them by the ten thousand, and listing the folder of all runs costs more than a round
    base = folder_of(config, out).name.removesuffix(f"{rounds}r")
    numbers = [folder.name.removeprefix(base).removesuffix("r") for folder in out.glob(f"{base}*r")]
    for number in sorted({int(number) for number in numbers if number.isdigit()} - {rounds}, reverse=True):
        yield replace(config, federation=replace(config.federation, rounds=number))


def _read_off(config: RunConfig, relative: RunConfig, out: Path) -> list[Measurement]:
    """The numbers of all rounds of a run from those of a longer one; none if they are not enough."""
    rounds, longer = config.federation.rounds, relative.federation.rounds
    if longer <= rounds or config.uncertainty.final_round:
        return []  # the posterior is that of the model after the last round, which is gone
    if not config.evaluation.is_due(rounds, longer):
        return []  # what is the last round here was not measured there
    result = finished(relative, out)
    return result.history[:rounds] if result is not None and len(result.history) >= rounds else []


def _as_here(config: RunConfig, round: int, found: Measurement, own: frozenset[str]) -> Measurement:
    """A round of a shorter run: its last one is measured, whether it is due here or not."""
    found = found._replace(metrics=without(found.metrics))
    return found if config.evaluation.is_due(round, config.federation.rounds) else as_if_not_due(found, own)
