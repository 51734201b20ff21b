"""Removing a run: its folder, and its MLflow run."""

import shutil
from contextlib import suppress
from pathlib import Path

from fl_lightning.runs import sealed
from fl_lightning.runs.folder import ATTEMPT, locked
from fl_lightning.runs.track import delete_run


def folders(out: Path) -> dict[str, Path]:
    """The folders of all runs, by the key of their MLflow run (the tag `fl_lightning.attempt`)."""
    found = {}
    for path in out.glob(f"*/{ATTEMPT}"):
        with suppress(OSError, sealed.DamagedError):  # another process may be removing it
            found[str(sealed.read(path, None)["attempt"])] = path.parent
    return found


def remove(out: Path, run_id: str, folder: Path | None) -> None:
    """Remove a run, so that the same settings are computed anew.

    Args:
        out: Folder of all runs.
        run_id: Of the MLflow run.
        folder: Of its files; None if a later attempt has taken their place.

    Raises:
        UserError: If a process is computing it, or the store cannot be written.
    """
    if folder is not None:  # first: a run that is still in MLflow can be removed again
        with locked(folder, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)  # the lock looks into it, and removes it because it is empty
    delete_run(out, run_id)
