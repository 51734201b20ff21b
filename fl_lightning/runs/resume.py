"""What earlier processes have left of a run: its checkpoint, or the rounds of a run that differs in length alone."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fl_lightning.client_state import Snapshot
from fl_lightning.errors import UserError, require
from fl_lightning.metrics import ridge_scan
from fl_lightning.metrics.metric import Measurement
from fl_lightning.metrics.round_metrics import as_if_not_due
from fl_lightning.runs import checkpoint, rounds_file
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.final_round import without
from fl_lightning.runs.folder import finished, folder_of, latest, left_of_result
from fl_lightning.runs.identity import identity


class Saved(NamedTuple):
    """Where a run goes on: the server after a round, and the numbers of all rounds up to it."""

    snapshot: Snapshot
    history: list[Measurement]


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
    folder = folder_of(config, out)
    stopped = latest(config, out)
    history = stopped.history if stopped is not None else left_of_result(config, out)
    if len(history) == config.federation.rounds:
        return Saved(start, history)  # after its last round, of which no checkpoint may have been kept
    saved = _in_folder(folder, identity(config), start)
    return _of_relatives(config, out, start, own) if saved is None and not fresh else saved


def _in_folder(folder: Path, identity: str, start: Snapshot) -> Saved | None:
    """The checkpoint of a folder and its rounds."""
    snapshot = checkpoint.read(folder, identity, start)
    if snapshot is None:
        return None
    history = rounds_file.read(folder, identity)[: snapshot.round]
    require(
        len(history) == snapshot.round,
        f"{folder / rounds_file.NAME} is damaged: {len(history)} of {snapshot.round} rounds are whole; start this run "
        "again with --fresh",
    )
    # A rule may have made one of them the last, and another have gone on.
    return Saved(snapshot, [*(one._replace(metrics=without(one.metrics)) for one in history[:-1]), *history[-1:]])


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
            arrays = ridge_scan.read(folder)
            if arrays:
                ridge_scan.write(folder_of(config, out), arrays)
            if relative.federation.rounds < rounds and (saved := _in_folder(folder, identity(relative), start)):
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
