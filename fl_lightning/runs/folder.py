"""The folder of a run: its place, its lock, and the result in it."""

import functools
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from fl_lightning.errors import UserError, require
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.metrics.metric import GA, LA, Measurement
from fl_lightning.runs import checkpoint, old_formats, rounds_file
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.identity import identity, trajectory
from fl_lightning.system import activity, checksums

RESULT, ATTEMPT = "result.json", "attempt.json"
ARTIFACTS = (
    *(checkpoint.SETTINGS, "rounds.parquet", "clients.parquet", "partition.png", "curves.png", "laplace.npz"),
    *("uncertainty.npz", "uncertainty.png", "model.safetensors"),
)
# Of an MLflow run: the key by which it is found again, and where its files are.
ATTEMPT_TAG, FOLDER_TAG = "fl_lightning.attempt", "fl_lightning.folder"
# Of a run that its own rule has stopped: after which round, and why.
STOPPED_TAG = "stopped"
AGAIN = "compute this run again with --fresh, or delete its folder"
# What of a result is saved under its own name.
SAVED = ("status", "message", "run_id", "tags", "store", "name", "params", "unsent")


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: finished, diverged, or stopped before its last round.
        message: Why it stopped before the last round, if it did.
        run_id: Of the MLflow run.
        folder: Where its files are.
        history: The measurements of all rounds.
        reused: Whether an earlier process had finished it, so that nothing was computed now.
        tags: Of the MLflow run.
        store: Where that is.
        identity: Of the run.
        name: Of the MLflow run.
        params: Its settings as MLflow has them.
        unsent: Whether the store may lack some of it, because it was away or this process ended too early.
    """

    status: str
    message: str
    run_id: str
    folder: Path
    history: list[Measurement]
    reused: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    store: str = ""
    identity: str = ""
    name: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    unsent: bool = False

    @property
    def final(self) -> dict[str, float]:
        """The metrics of the last round; empty if there is none."""
        return self.history[-1].metrics if self.history else {}

    def summary(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            GA: self.final.get(GA),
            LA: self.final.get(LA),
            "round": len(self.history),
            "run_id": self.run_id,
            "status": self.status,
            "message": self.message,
            "folder": str(self.folder),
        }


def forget(config: RunConfig, out: Path) -> None:
    """Remove what earlier processes have computed of a run."""
    folder = folder_of(config, out)
    if folder.exists():
        with locked(folder, wait=False):
            clear(folder, keep=("lock",))


def folder_of(config: RunConfig, out: Path) -> Path:
    """Where a run leaves its files. Runs that differ in the number of rounds alone lie side by side."""
    return out / folder_name(config.recorded_method, config.names["data"], trajectory(config), config.federation.rounds)


def folder_name(method: str, data: str, trajectory: str, rounds: int) -> str:
    """What the folder of a run is called, wherever it is."""
    return f"{method}-{data}-{trajectory}-{rounds}r"


def of_other_versions(configs: Sequence[RunConfig], out: Path) -> dict[str, list[Path]]:
    """Folders of runs with the settings of these, but made by other versions of the code; by the name of the folder.

    Such results are never used; they stay where they are until the user deletes them.
    """
    there: dict[tuple[str, str], list[Path]] = {}
    for path in out.glob("*-*r") if out.is_dir() else ():
        if (path / RESULT).exists():
            there.setdefault(_without_versions(path.name), []).append(path)
    own = [folder_of(config, out).name for config in configs]
    found = {name: [path for path in there.get(_without_versions(name), []) if path.name != name] for name in own}
    return {name: paths for name, paths in found.items() if paths}


def _without_versions(name: str) -> tuple[str, str]:
    """The name of a folder without the hash of the versions.

    >>> _without_versions("fola-digits-0123456789ab-cdef-20r")
    ('fola-digits-0123456789ab', '20r')
    """
    settings, _, rounds = name.rpartition("-")
    return settings.rpartition("-")[0], rounds


def finished(config: RunConfig, out: Path) -> Result | None:
    """What an earlier process has left of this run, if it is all."""
    result = latest(config, out)
    return None if result is None or result.status == "stopped" else result


def ended(config: RunConfig, out: Path, stop: Stop | None) -> Result | None:
    """How a run ended, by itself or by a rule; None if a part of it is missing.

    A run ended by another stopping rule is unfinished. Rounds beyond this rule do not count.
    """
    result = latest(config, out)
    if result is not None and stop is not None and (cut := up_to(result, stop, config.federation.rounds)) is not None:
        return cut
    return None if result is None or result.status == "stopped" else result


def up_to(result: Result, stop: Stop, rounds: int) -> Result | None:
    """A run of so many rounds up to the one in which a rule has seen enough; None if it has not before the last."""
    values = stop.values([measurement.metrics for measurement in result.history])
    enough = stop.enough(values)
    if enough is None or enough == rounds:
        return None
    # A later divergence would not have been seen.
    message = f"stopped {stop.reason(values[:enough])}"
    return replace(result, status="stopped", message=message, history=result.history[:enough])


def latest(config: RunConfig, out: Path) -> Result | None:
    """How this run ended, or where it was stopped; None if it never came to an end, or only other files show it."""
    folder = folder_of(config, out)
    try:
        return _read_result(folder, identity(config))
    except checksums.DamagedError as damage:
        left, rounds = left_of_result(config, out), config.federation.rounds
        what = f"{folder / RESULT} {damage}"
        require(len(left) == rounds or (folder / checkpoint.CURRENT).exists(), f"{what}; {AGAIN}")
        _warn_once(
            f"{what}; the run goes on from its other files"
            if len(left) < rounds
            else f"{what}; the numbers are read from its other files and saved again"
        )
        return None


def left_of_result(config: RunConfig, out: Path) -> list[Measurement]:
    """The rounds of a run whose result is damaged, from its other files; none if its result is not there."""
    folder = folder_of(config, out)
    if not (folder / RESULT).exists():
        return []
    found = rounds_file.read(folder, identity(config))
    return found if len(found) == config.federation.rounds else in_tables(folder)


def in_tables(folder: Path) -> list[Measurement]:
    """The rounds in the tables of a run that has ended."""
    from fl_lightning.runs.files import read_tables  # pandas: imported where it is needed

    return read_tables(folder)


@functools.cache
def _warn_once(text: str) -> None:
    activity.warn(text)


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Create the folder, and keep other processes out of it; wait for the one that is in it, or refuse."""
    lock = filelock.FileLock(folder / "lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            busy = f"another process is computing this run in {folder}"
            require(wait, f"{busy}; wait for it, or stop it")
            activity.warn(f"{busy}; this one waits for it")
            lock.acquire()
            folder.mkdir(parents=True, exist_ok=True)  # the other one was refused, and left nothing
    except RuntimeError:  # filelock's word for a thread that would wait for itself
        raise UserError(f"this process is computing the run in {folder} already; finish or close that first") from None
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder with --runs") from None
    try:
        yield
    finally:
        lock.release()
        if {path.name for path in folder.iterdir()} <= {"lock"}:  # refused: leave nothing behind
            shutil.rmtree(folder, ignore_errors=True)


def clear(folder: Path, keep: Collection[str]) -> None:
    for path in folder.iterdir():
        if path.name not in keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class Attempt(NamedTuple):
    """The key of a run in MLflow, and whether it is new."""

    key: str
    is_new: bool


def attempt_of(
    folder: Path, identity: str, recall: Callable[[], str | None], about: Mapping[str, Any] | None = None
) -> Attempt:
    """The key, written before the MLflow run exists, so that it is never created twice.

    Args:
        folder: Of the run.
        identity: Of the run.
        recall: Asks MLflow for the key of a run that was begun, if the file has got lost.
        about: What `known` reads of a run that has not ended: name, settings and tags.
    """
    path = folder / ATTEMPT
    begun = {"start": time.time(), "failed": False, **(about or {})}
    try:
        content = checksums.read(path, identity)
        if about is not None:  # goes on, perhaps under another name
            checksums.write(path, identity, {**content, **begun, "start": content.get("start", path.stat().st_mtime)})
        return Attempt(str(content["attempt"]), False)
    except FileNotFoundError:
        is_old = any((folder / name).exists() for name in (RESULT, checkpoint.CURRENT, checkpoint.PREVIOUS))
    except checksums.DamagedError as damage:
        is_old = True
        activity.warn(f"{path} {damage}; it is written again")
    key = recall() if is_old else None
    attempt = Attempt(key or uuid.uuid4().hex, key is None)
    checksums.write(path, identity, {"attempt": attempt.key, **begun})
    return attempt


def mark_failed(folder: Path) -> None:
    """Record that the present attempt ended in an error."""
    with suppress(OSError, UserError, checksums.DamagedError):
        content = checksums.read(folder / ATTEMPT, None)
        checksums.write(folder / ATTEMPT, content["identity"], {**content, "failed": True})


def as_saved(result: Result) -> dict[str, Any]:
    """What is saved of a result; the numbers of its rounds are in a file of their own."""
    return {**{name: getattr(result, name) for name in SAVED}, "rounds": len(result.history)}


def from_saved(content: Mapping[str, Any], folder: Path) -> Result:
    """The result of which that was saved; a DamagedError, KeyError or TypeError if it was something else."""
    saved = {name: content[name] for name in SAVED}
    history = history_of(content, folder)
    return Result(**{**saved, "history": history}, folder=folder, reused=True, identity=content["identity"])


def history_of(result: Mapping[str, Any], folder: Path) -> list[Measurement]:
    """The rounds of a result."""
    if "history" in result:
        return old_formats.history(result["history"])
    number: int = result["rounds"]
    found = rounds_file.read(folder, result["identity"])
    if len(found) < number:
        raise checksums.DamagedError(
            f"lacks rounds: {rounds_file.NAME} is damaged after round {len(found)} of {number}"
        )
    return found[:number]


def write_result(result: Result) -> None:
    """Save how a run ended; its rounds, too, if a result of an earlier version was the only place that had them."""
    if not (result.folder / rounds_file.NAME).exists():
        rounds_file.write(result.folder, result.identity, result.history)
    checksums.write(result.folder / RESULT, result.identity, as_saved(result))


def read_result(folder: Path, identity: str | None = None) -> Result | None:
    """The result in a folder, if it belongs to the run with this identity; None takes any run's."""
    try:
        return _read_result(folder, identity)
    except checksums.DamagedError as damage:
        raise UserError(f"{folder / RESULT} {damage}; its command reads it from the other files; or {AGAIN}") from None


def _read_result(folder: Path, identity: str | None) -> Result | None:
    try:
        return from_saved(checksums.read(folder / RESULT, identity), folder)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError) as damage:
        raise checksums.DamagedError(f"is damaged ({damage})") from None


def artifacts_of(folder: Path) -> list[Path]:
    """The files that a run leaves for its readers."""
    return [path for name in ARTIFACTS if (path := folder / name).exists()]
