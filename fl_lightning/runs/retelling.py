"""A new store learns what the folders of the runs know: the database that had it is lost or broken."""

from dataclasses import replace
from pathlib import Path

from fl_lightning.errors import UserError
from fl_lightning.runs.folder import RESULT, read_result
from fl_lightning.runs.recording import tell
from fl_lightning.runs.store import database_of
from fl_lightning.runs.track import PARENT_TAG, Place
from fl_lightning.system import activity


def retell(out: Path, uri: str, place: Place) -> None:
    """Write all runs that have ended, and whose store is gone, to a new one; unfinished ones do so when they go on.

    Args:
        out: Folder of all runs.
        uri: What the store will be called.
        place: Where it is now.
    """
    told = 0
    for path in sorted(out.glob(f"*/{RESULT}")):
        try:
            result = read_result(path.parent)
        except UserError as damage:
            activity.warn(str(damage))
            continue
        if result is not None and _is_gone(result.store, uri):
            # The run of its sweep is gone too; the sweep adopts it again.
            tags = {name: value for name, value in result.tags.items() if name != PARENT_TAG}
            tell(out, replace(result, unsent=True), tags, place)
            told += 1
    if told:
        activity.warn(f"told the new MLflow database of {told} runs that had ended before")


def _is_gone(store: str, uri: str) -> bool:
    database = database_of(store)
    return store == uri or (database is not None and not database.exists())
