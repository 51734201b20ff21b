"""The folder of a run: where it lies, who may write to it, and the result in it."""

import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from fl_lightning.config import RunConfig
from fl_lightning.errors import UserError, require
from fl_lightning.record import Measurement
from fl_lightning.runs import checkpoint, sealed
from fl_lightning.runs.identity import identity, trajectory
from fl_lightning.stopping import Stop
from fl_lightning.system import activity

RESULT, ATTEMPT = "result.json", "attempt.json"
ARTIFACTS = (
    *(checkpoint.SETTINGS, "rounds.parquet", "clients.parquet", "partition.png", "curves.png", "laplace.npz"),
    *("uncertainty.npz", "uncertainty.png", "model.safetensors"),
)
# What of a result is saved under its own name.
SAVED = ("status", "message", "run_id", "tags", "store", "name", "params", "unsent")


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: finished, diverged, or stopped by somebody who had seen enough of it.
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
            "GA": self.final.get("GA"),
            "LA": self.final.get("LA"),
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
    return out / folder_name(config.names["method"], config.names["data"], trajectory(config), config.federation.rounds)


def folder_name(method: str, data: str, trajectory: str, rounds: int) -> str:
    """What the folder of a run is called, wherever it is."""
    return f"{method}-{data}-{trajectory}-{rounds}r"


def of_other_versions(configs: Sequence[RunConfig], out: Path) -> dict[str, list[Path]]:
    """Folders of runs with the settings of these, but made by other versions of the code; by the name of the folder.

    Such results are never used; they stay where they are, until somebody deletes them.
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

    What somebody else's rule has stopped is no result. What was computed beyond this rule does not count.
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
    # Whether it diverged later, nobody would have seen.
    message = f"stopped {stop.reason(values[:enough])}"
    return replace(result, status="stopped", message=message, history=result.history[:enough])


def latest(config: RunConfig, out: Path) -> Result | None:
    """How this run ended, or where it was stopped; None if it never came to an end."""
    return read_result(folder_of(config, out), identity(config))


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
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None
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
    """The key of a run in MLflow, and whether nobody can have used it before."""

    key: str
    is_new: bool


def attempt_of(folder: Path, identity: str, recall: Callable[[], str | None]) -> Attempt:
    """The key, written before the MLflow run exists, so that it is never created twice.

    Args:
        folder: Of the run.
        identity: Of the run.
        recall: Asks MLflow for the key of a run that was begun, if the file has got lost.
    """
    path = folder / ATTEMPT
    try:
        return Attempt(str(sealed.read(path, identity)["attempt"]), False)
    except FileNotFoundError:
        begun = any((folder / name).exists() for name in (RESULT, checkpoint.CURRENT, checkpoint.PREVIOUS))
    except sealed.DamagedError as damage:
        begun = True
        activity.warn(f"{path} {damage}; it is written again")
    known = recall() if begun else None
    attempt = Attempt(known or uuid.uuid4().hex, known is None)
    sealed.write(path, identity, {"attempt": attempt.key})
    return attempt


def as_saved(result: Result) -> dict[str, Any]:
    """What is saved of a result."""
    content = {name: getattr(result, name) for name in SAVED}
    return {**content, "history": [measurement._asdict() for measurement in result.history]}


def from_saved(content: Mapping[str, Any], folder: Path) -> Result:
    """The result of which that was saved; a KeyError or TypeError if it was something else."""
    history = [Measurement(**item) for item in content["history"]]
    saved = {name: content[name] for name in SAVED}
    return Result(**{**saved, "history": history}, folder=folder, reused=True, identity=content["identity"])


def write_result(result: Result) -> None:
    sealed.write(result.folder / RESULT, result.identity, as_saved(result))


def read_result(folder: Path, identity: str | None = None) -> Result | None:
    """The result in a folder, if it belongs to the run with this identity; None takes any run's."""
    path = folder / RESULT
    try:
        return from_saved(sealed.read(path, identity), folder)
    except FileNotFoundError:
        return None
    except (sealed.DamagedError, KeyError, TypeError) as damage:
        raise UserError(f"{path} {damage}; compute this run again with --fresh, or delete its folder") from None


def artifacts_of(folder: Path) -> list[Path]:
    """The files that a run leaves for its readers."""
    return [path for name in ARTIFACTS if (path := folder / name).exists()]
