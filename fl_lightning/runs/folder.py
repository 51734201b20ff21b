"""The folder of a run: where it lies, who may write to it, and the result in it."""

import json
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from fl_lightning.config import RunConfig
from fl_lightning.errors import UserError
from fl_lightning.record import Measurement
from fl_lightning.runs.identity import trajectory
from fl_lightning.system.atomic import write_atomically

RESULT, ATTEMPT = "result.json", "attempt.json"


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
    """

    status: str
    message: str
    run_id: str
    folder: Path
    history: list[Measurement]
    reused: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    store: str = ""

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
        with locked(folder):
            clear(folder, keep=("lock",))


def folder_of(config: RunConfig, out: Path) -> Path:
    """Where a run leaves its files. Runs that differ in the number of rounds alone lie side by side."""
    return out / f"{config.names['method']}-{config.names['data']}-{trajectory(config)}-{config.federation.rounds}r"


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


def latest(config: RunConfig, out: Path) -> Result | None:
    """How this run ended, or where it was stopped; None if it never came to an end."""
    return read_result(folder_of(config, out))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder, and keep other processes out of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / "lock")
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(
            f"another process is computing this run in {folder}; wait for it, or change a setting"
        ) from None
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


def attempt_of(folder: Path) -> str:
    """The key of this run in MLflow, written before the MLflow run exists, so that it is never created twice."""
    path = folder / ATTEMPT
    if not path.exists():
        write_atomically(path, json.dumps({"attempt": uuid.uuid4().hex}).encode())
    attempt: str = json.loads(path.read_text())["attempt"]
    return attempt


def write_result(result: Result) -> None:
    content = {
        "status": result.status,
        "message": result.message,
        "run_id": result.run_id,
        "history": [measurement._asdict() for measurement in result.history],
        "tags": dict(result.tags),
        "store": result.store,
    }
    write_atomically(result.folder / RESULT, json.dumps(content).encode())


def read_result(folder: Path) -> Result | None:
    try:
        content = json.loads((folder / RESULT).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{folder / RESULT} is damaged; start this run again with --fresh") from None
    history = [Measurement(**item) for item in content["history"]]
    known = (content["status"], content["message"], content["run_id"], folder, history)
    return Result(*known, reused=True, tags=content["tags"], store=content["store"])
