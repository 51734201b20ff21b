"""What earlier processes have left of a run: its checkpoint, or the rounds of a run that differs in length alone."""

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


def _of_relatives(config: RunConfig, out: Path, start: Snapshot, own: frozenset[str]) -> Saved | None:
    """The rounds that a run has computed which differs from this one only in how many rounds it takes."""
    rounds = config.federation.rounds
    if rounds == 1:
        return None  # grids have them by the ten thousand, and listing the folder of all runs costs more than a round
    base = folder_of(config, out).name.removesuffix(f"{rounds}r")
    numbers = [folder.name.removeprefix(base).removesuffix("r") for folder in out.glob(f"{base}*r")]
    for number in sorted((int(number) for number in numbers if number.isdigit()), reverse=True):
        relative = replace(config, federation=replace(config.federation, rounds=number))
        with suppress(UserError):  # a damaged one is of no use here
            arrays = ridge.read(folder_of(relative, out))
            if arrays:
                ridge.write(folder_of(config, out), arrays)
            if number < rounds and (saved := checkpoint.read(folder_of(relative, out), identity(relative), start)):
                # What was its final round is none of this run's.
                return saved._replace(history=[_as_here(config, i, m, own) for i, m in enumerate(saved.history, 1)])
            if config.uncertainty.final_round:
                continue  # numbers are not enough: the posterior is that of the model after the last round
            if not config.evaluation.is_due(rounds, number):
                continue  # what is the last round here was not measured there
            if number > rounds and (result := finished(relative, out)) and len(result.history) >= rounds:
                return Saved(start, result.history[:rounds])
    return None


def _as_here(config: RunConfig, round: int, found: Measurement, own: frozenset[str]) -> Measurement:
    """A round of a shorter run: its last one is measured, whether it is due here or not."""
    found = found._replace(metrics=without(found.metrics))
    return found if config.evaluation.is_due(round, config.federation.rounds) else as_if_not_due(found, own)
