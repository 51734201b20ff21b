"""Where a run is, by its folder, its result, or its id in MLflow; and how it is removed there."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import filelock

from fl_lightning.errors import UserError, require
from fl_lightning.runs import checkpoint, saved_model
from fl_lightning.runs.folder import ATTEMPT, FOLDER_TAG, RESULT, Result, locked
from fl_lightning.runs.tracking.store import database_of, explained, store_uri
from fl_lightning.runs.tracking.sync import open_place
from fl_lightning.system import checksums

# In the folder of all runs, while some are deleted.
LOCK = "removal.lock"


def folder_of_run(run: Result | Path | str, out: Path | str = "runs") -> Path:
    """The folder of a finished run.

    Args:
        run: A result, a folder, or the id of an MLflow run.
        out: Folder of all runs, whose store knows the id.

    Raises:
        UserError: If there is no such run, or its files are not on this machine and MLflow has no model of it.
    """
    if isinstance(run, Result):
        return run.folder
    folder = Path(run)
    if folder.is_dir() or folder.parent != Path():
        expected = f"expected the folder of a saved run, got {folder}"
        remedy = "a finished run names its folder"
        require(folder.is_dir(), f"{expected}: there is no such folder; {remedy}")
        begun = (folder / checkpoint.CURRENT).exists()
        require(
            (folder / checkpoint.SETTINGS).exists(),
            f"the run in {folder} has not finished; the command that started it goes on with it"
            if begun
            else f"{expected}: there is no checkpoint in it; {remedy}",
        )
        return folder
    return _by_id(str(run), Path(out))


def _by_id(run_id: str, out: Path) -> Path:
    uri = store_uri(out)
    database = database_of(uri)
    require(
        database is None or database.exists(),
        f"expected the folder or the MLflow id of a run, got {run_id!r}: no such folder, and no runs in {out}; "
        "name their folder with --runs",
    )
    with explained(uri):
        from mlflow.exceptions import MlflowException

        client, experiment = open_place(uri, out.resolve())
        try:
            found = [client.get_run(run_id)]
        except MlflowException:
            every = client.search_runs([experiment], max_results=50_000)
            found = [run for run in every if run.info.run_id.startswith(run_id)]
        if len(found) != 1:
            what = f"{len(found)} runs begin so" if found else "no run has it"
            raise UserError(
                f"expected the folder or the MLflow id of a run, got {run_id!r}: {what}; `fl-lightning runs` lists them"
            )
        folder = Path(found[0].data.tags.get(FOLDER_TAG, ""))
        if (folder / RESULT).exists():
            return folder
        # Computed on another machine: what a store has of it is enough to load the model.
        place = Path(tempfile.mkdtemp(prefix="fl_lightning-run-"))
        try:
            for name in (checkpoint.SETTINGS, saved_model.FILE):
                client.download_artifacts(found[0].info.run_id, name, str(place))
        except (MlflowException, OSError):
            raise UserError(
                f"the files of run {run_id} are not on this machine ({folder}), and MLflow has no model of it; compute "
                "it here, or let its study say keep_models: true"
            ) from None
        return place


def folders(out: Path) -> dict[str, Path]:
    """The folders of all runs, by the key of their MLflow run (the tag `fl_lightning.attempt`)."""
    found = {}
    for path in out.glob(f"*/{ATTEMPT}"):
        with suppress(OSError, checksums.DamagedError):  # another process may be removing it
            found[str(checksums.read(path, None)["attempt"])] = path.parent
    return found


def remove(out: Path, run_id: str, folder: Path | None) -> bool:
    """Remove a run, so that the same settings are computed anew; one process at a time.

    Args:
        out: Folder of all runs.
        run_id: Of the MLflow run.
        folder: Of its files; None if a later attempt has taken their place.

    Returns:
        Whether this call has removed it; another process may have been faster.

    Raises:
        UserError: If a process is computing it, or the store cannot be written.
    """
    lock = filelock.FileLock(out / LOCK)
    with lock:
        try:
            return _remove(out, run_id, folder)
        finally:
            Path(lock.lock_file).unlink()


def _remove(out: Path, run_id: str, folder: Path | None) -> bool:
    if folder is not None:  # first: a run that is still in MLflow can be removed again
        with locked(folder, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)  # the lock looks into it, and removes it because it is empty
    uri = store_uri(out)
    with explained(uri):
        client = open_place(uri, out.resolve()).client
        info = client.get_run(run_id).info
        if info.lifecycle_stage == "deleted":
            return False
        client.delete_run(run_id)  # into MLflow's trash, from which `mlflow gc` removes it
        files = Path(info.artifact_uri.removeprefix("file://"))
        if files.is_relative_to(out.resolve()):
            shutil.rmtree(files.parent, ignore_errors=True)
    return True
