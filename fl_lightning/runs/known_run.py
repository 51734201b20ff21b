"""What the files of a run say of it, ended or not, to readers that neither compute nor write."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from fl_lightning.errors import UserError
from fl_lightning.metrics.metric import Measurement
from fl_lightning.runs import checkpoint, rounds_file
from fl_lightning.runs.folder import (
    AGAIN,
    ATTEMPT,
    ATTEMPT_TAG,
    FOLDER_TAG,
    RESULT,
    STOPPED_TAG,
    history_of,
    in_tables,
)
from fl_lightning.system import activity, checksums


class KnownRun(NamedTuple):
    """A run as its files describe it, ended or not.

    Attributes:
        run_id: Of the MLflow run; the key of the attempt while no store has answered.
        name: Of the MLflow run.
        status: finished, diverged, stopped, running or failed.
        start: In seconds since 1970.
        end: Likewise; NaN if it has not ended.
        settings: By dotted key.
        tags: Of the MLflow run.
        rounds: What was measured in each round.
        folder: Of its files; None if they are not on this machine.
    """

    run_id: str
    name: str
    status: str
    start: float
    end: float
    settings: Mapping[str, Any]
    tags: Mapping[str, str]
    rounds: Sequence[Mapping[str, float]]
    folder: Path | None


def known_runs(out: Path) -> Iterator[KnownRun]:
    """All runs in a folder of runs. Nothing is written."""
    for entry in sorted(os.scandir(out), key=lambda entry: entry.name) if out.is_dir() else ():
        if entry.is_dir() and (run := known_run(Path(entry.path))) is not None:
            yield run


def known_run(folder: Path) -> KnownRun | None:
    """The run in a folder; None if there is none, or if its settings are not written there."""
    try:
        begun = checksums.read(folder / ATTEMPT, None)
        begun.setdefault("start", (folder / ATTEMPT).stat().st_mtime)
    except (FileNotFoundError, checksums.DamagedError):
        begun = {}
    try:
        result = checksums.read(folder / RESULT, None)
        return _ended_run(folder, begun, result)
    except FileNotFoundError:
        pass
    except (KeyError, TypeError, checksums.DamagedError) as damage:
        activity.warn(f"{folder / RESULT} {damage}; its command reads it from the other files; or {AGAIN}")
    if "params" not in begun:
        return None
    return KnownRun(
        run_id=begun["attempt"],
        name=begun["name"],
        status="failed" if begun["failed"] else "running" if _is_locked(folder) else "stopped",
        start=begun["start"],
        end=math.nan,
        settings=begun["params"],
        tags={**begun["tags"], **_marks(folder, begun)},
        rounds=[one.metrics for one in _unfinished_rounds(folder, begun["identity"])],
        folder=folder,
    )


def _ended_run(folder: Path, begun: Mapping[str, Any], result: Mapping[str, Any]) -> KnownRun:
    end = (folder / RESULT).stat().st_mtime
    rounds = [one.metrics for one in _whatever_is_left(result, folder)]
    tags, status = {**result["tags"], **_marks(folder, begun)}, result["status"]
    if status == "stopped":
        if result["message"]:
            tags[STOPPED_TAG] = f"round {len(rounds)}: {result['message']}"
        later = [one.metrics for one in rounds_file.read(folder, result["identity"])]  # by another rule
        rounds = later if len(later) > len(rounds) else rounds
        status = "running" if _is_locked(folder) else "stopped"
    return KnownRun(
        run_id=result["run_id"] or begun.get("attempt") or result["identity"],
        name=result["name"],
        status=status,
        start=begun.get("start", end),
        end=end,
        settings=result["params"],
        tags=tags,
        rounds=rounds,
        folder=folder,
    )


def _whatever_is_left(result: Mapping[str, Any], folder: Path) -> list[Measurement]:
    """The rounds of a result; of a damaged file those before the damage, if the tables do not have all."""
    try:
        return history_of(result, folder)
    except checksums.DamagedError as damage:
        tables = in_tables(folder)
        is_whole = len(tables) == result["rounds"]
        what = "the numbers are read from its tables" if is_whole else f"those before the damage are shown; {AGAIN}"
        activity.warn(f"{folder / RESULT} {damage}; {what}")
        return tables if is_whole else rounds_file.read(folder, result["identity"])


def _unfinished_rounds(folder: Path, identity: str) -> list[Measurement]:
    """The rounds of a run that has not ended."""
    saved = 0
    with suppress(UserError):
        saved = checkpoint.round_of(folder) or 0  # first: the run may be going on
    found = rounds_file.read(folder, identity)
    if len(found) < saved:
        activity.warn(f"{folder / rounds_file.NAME} is damaged after round {len(found)} of {saved}; {AGAIN}")
    return found


def _marks(folder: Path, begun: Mapping[str, Any]) -> dict[str, str]:
    key = {ATTEMPT_TAG: begun["attempt"]} if begun else {}
    return {FOLDER_TAG: str(folder.resolve()), **key}


def _is_locked(folder: Path) -> bool:
    """Whether a process computes the run in this folder."""
    lock = filelock.FileLock(folder / "lock")
    try:
        with lock.acquire(timeout=0):
            return False
    except (filelock.Timeout, RuntimeError, OSError):
        return True
