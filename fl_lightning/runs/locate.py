"""Where a run is, by its folder, its result, or its id in MLflow."""

import tempfile
from pathlib import Path

from fl_lightning.errors import UserError, require
from fl_lightning.runs import checkpoint, model_file
from fl_lightning.runs.folder import RESULT, Result
from fl_lightning.runs.outbox import explained
from fl_lightning.runs.recording import FOLDER_TAG
from fl_lightning.runs.store import database_of, store_uri
from fl_lightning.runs.track import open_place


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
        "name their folder with --out",
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
            for name in (checkpoint.SETTINGS, model_file.FILE):
                client.download_artifacts(found[0].info.run_id, name, str(place))
        except (MlflowException, OSError):
            raise UserError(
                f"the files of run {run_id} are not on this machine ({folder}), and MLflow has no model of it; compute "
                "it here, or let its study say keep_models: true"
            ) from None
        return place
