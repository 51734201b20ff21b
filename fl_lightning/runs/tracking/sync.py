"""The MLflow run of a run, brought up to date by one function, `sync`, which may be repeated at any moment.

The folder of a run is the truth, MLflow a copy of it. A metric's timestamp is the run's start plus the round, so
writing a round again changes nothing. A run is found by a key that its folder has had before the MLflow run began, so
it is never doubled. Rounds are sent up to the checkpoint: one that is computed again has other seconds, and MLflow
would keep both.
"""

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.errors import UserError
from fl_lightning.metrics.metric import TIMES, is_final
from fl_lightning.runs.folder import (
    ATTEMPT_TAG,
    FOLDER_TAG,
    RESULT,
    Result,
    artifacts_of,
    attempt_of,
    read_result,
    write_result,
)
from fl_lightning.runs.tracking import ui_view
from fl_lightning.runs.tracking.store import (
    UnreachableError,
    check_reachable,
    database_of,
    ensure,
    explained,
    store_uri,
)
from fl_lightning.system import activity

EXPERIMENT = "fl_lightning"
PARENT_TAG = "mlflow.parentRunId"
# MLflow's limits for one request.
PARAMS_PER_BATCH, METRICS_PER_BATCH = 100, 1000


class Account(NamedTuple):
    """What a store is to know of a run.

    Attributes:
        attempt: The key by which its MLflow run is found.
        name: Shown in the UI.
        params: Flat dotted settings.
        tags: To filter by.
        rounds: The metrics of the rounds up to the checkpoint.
        first: The number of the first of them.
        files: Files and folders to be kept with it.
        status: RUNNING, FINISHED, FAILED or KILLED.
    """

    attempt: str
    name: str
    params: Mapping[str, Any]
    tags: Mapping[str, str]
    rounds: Sequence[Mapping[str, float]] = ()
    first: int = 1
    files: Sequence[Path] = ()
    status: str = "RUNNING"


@dataclass
class Copy:
    """What a store has of a run, as far as this process knows.

    Attributes:
        run_id: Of the MLflow run; empty until the store has answered.
        start: When that began.
        rounds: How many it has.
        tags: Those that it has.
        files: Those that it has.
        status: What it says; empty until this process has opened it.
        is_new: Whether no process can have begun it, so that there is nothing to look for.
    """

    run_id: str = ""
    start: int = 0
    rounds: int = 0
    tags: dict[str, str] = field(default_factory=dict)
    files: set[Path] = field(default_factory=set)
    status: str = ""
    is_new: bool = False


class Place(NamedTuple):
    """Where runs are written: the client of a store, and the id of our experiment in it."""

    client: Any
    experiment: str


def sync(account: Account, place: Place, copy: Copy) -> None:
    """Bring the MLflow run of an account up to date. Repeating it changes nothing.

    Args:
        account: What the store is to know.
        place: Where to write.
        copy: What the store has; updated with what is added.
    """
    from mlflow.entities import Metric, RunTag

    if not copy.status:
        _open(account, place, copy)
    metrics = [
        # A posterior that is measured again has later numbers, of which MLflow takes the latest.
        Metric(name, value, copy.start + number + int(values.get(TIMES, 0) if is_final(name) else 0), number)
        for number, values in enumerate(account.rounds[copy.rounds :], start=account.first + copy.rounds)
        for name, value in values.items()
    ]
    news = [RunTag(name, value) for name, value in account.tags.items() if copy.tags.get(name) != value]
    for batch in _batches(metrics, METRICS_PER_BATCH) if metrics or news else ():
        place.client.log_batch(copy.run_id, metrics=batch, tags=news)
    copy.rounds, copy.tags = len(account.rounds), dict(account.tags)
    for path in account.files:
        if path not in copy.files:
            if path.is_dir():
                place.client.log_artifacts(copy.run_id, str(path), path.name)
            else:
                place.client.log_artifact(copy.run_id, str(path))
            copy.files.add(path)
    if account.status != copy.status:
        place.client.set_terminated(copy.run_id, account.status)
        copy.status = account.status


def _open(account: Account, place: Place, copy: Copy) -> None:
    """Find the MLflow run, or create it."""
    from mlflow.entities import Param

    client = place.client
    run = None if copy.is_new else _find(place, {ATTEMPT_TAG: account.attempt})
    copy.is_new = False
    if run is None:
        run = client.create_run(
            place.experiment, run_name=account.name, tags={**account.tags, ATTEMPT_TAG: account.attempt}
        )
        copy.tags = dict(account.tags)
    else:
        client.update_run(run.info.run_id, status="RUNNING", name=account.name)
    if run.info.run_id != copy.run_id:
        copy.rounds, copy.files = 0, set()
    copy.run_id, copy.start = run.info.run_id, run.info.start_time
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in account.params.items()}
    for batch in _batches([Param(key, text) for key, text in texts.items()], PARAMS_PER_BATCH):
        client.log_batch(run.info.run_id, params=batch)
    copy.status = "RUNNING"


def _find(place: Place, tags: Mapping[str, str]) -> Any:
    """The latest MLflow run with these tags; None if there is none."""
    where = " AND ".join(f"tags.`{name}` = {_quoted(value)}" for name, value in tags.items())
    order = ["attributes.start_time DESC"]
    runs = place.client.search_runs([place.experiment], where, max_results=1, order_by=order)
    return runs[0] if runs else None


def recall_attempt(out: Path, folder: Path, identity: str) -> str | None:
    """The key of the latest MLflow run of a folder, which has lost it; None also if a server does not answer."""
    uri = store_uri(out)
    with suppress(UnreachableError), explained(uri):
        run = _find(open_place(uri, out.resolve()), marks_of(folder, identity))
        return run.data.tags.get(ATTEMPT_TAG) if run else None
    return None


def marks_of(folder: Path, identity: str) -> dict[str, str]:
    """The tags by which an MLflow run is found whose key has got lost."""
    return {"identity": identity, FOLDER_TAG: str(folder.resolve())}


def sync_ended(out: Path, result: Result, place: Place | None = None, **changes: Any) -> Result:
    """Bring the MLflow run of a run that has ended up to date; that costs nothing if there is nothing to do.

    Args:
        out: Folder of all runs.
        result: The run; `store`, `run_id` and `unsent` say what its store has.
        place: Where to write, if not to the store of the folder.
        changes: Other tags, or another name.

    Returns:
        The run with what its store says of it; it is saved.
    """
    uri = store_uri(out)
    is_known = place is None and result.store == uri and not result.unsent
    now = replace(result, **changes)
    if is_known and (now.name, now.tags) == (result.name, result.tags):
        return result
    now = replace(now, tags={**now.tags, **marks_of(now.folder, now.identity)})
    attempt = attempt_of(
        now.folder,
        now.identity,
        lambda: None if place else recall_attempt(out, now.folder, now.identity),
    )
    files = artifacts_of(now.folder)
    copy = Copy(is_new=attempt.is_new)
    if is_known:
        copy = Copy(result.run_id, rounds=len(result.history), files=set(files))
    account = account_of(now, attempt.key)
    try:
        if place is None:
            check_reachable(uri)
        with explained(uri):
            sync(account, place or open_place(uri, out.resolve()), copy)
        now = replace(now, run_id=copy.run_id, store=uri, unsent=False)
    except UnreachableError:
        now = replace(now, store=uri, unsent=True)
        warn_of_rest(now)
    write_result(now)
    return now


def account_of(result: Result, attempt: str) -> Account:
    """What a store is to know of a run that has ended."""
    return Account(
        attempt,
        result.name,
        result.params,
        {**result.tags, "status": result.status},
        [measurement.metrics for measurement in result.history],
        files=artifacts_of(result.folder),
        # A run that its own rule has stopped has a reason, and has left all that a finished run leaves.
        status="KILLED" if result.status == "stopped" and not result.message else "FINISHED",
    )


def warn_of_rest(result: Result) -> None:
    """Say that the store lacks some of a run."""
    activity.warn(
        f"the MLflow server at {result.store} does not answer, or not fast enough, and lacks some of this run; all of "
        f"it is saved in {result.folder}, and the same command sends the rest"
    )


def finish_children(out: Path, run_id: str, status: str) -> None:
    """End those runs below this one that no process computes any more, though they say so."""
    uri = store_uri(out)
    check_reachable(uri)
    with explained(uri):
        client, experiment = open_place(uri, out.resolve())
        where = f"tags.`{PARENT_TAG}` = '{run_id}' AND attributes.status = 'RUNNING'"
        while running := client.search_runs([experiment], where, max_results=1000):
            for run in running:
                client.set_terminated(run.info.run_id, status)


@functools.cache
def open_place(uri: str, out: Path) -> Place:
    """The place of a folder of runs; made once per process, since runs may be many and short."""
    check_reachable(uri)
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # or it tells of every table it creates
    database = database_of(uri)
    location = None if database is None else (out / "artifacts").as_uri()
    if database is not None:
        ensure(database, lambda new: _fill(out, uri, _place(new, location)))
    return _place(uri, location)


def _fill(out: Path, uri: str, place: Place) -> None:
    """Add to a new database the runs that have ended and whose store is gone; others follow when they go on.

    Args:
        out: Folder of all runs.
        uri: What the database will be called.
        place: Where it is now.
    """
    synced = 0
    for path in sorted(out.glob(f"*/{RESULT}")):
        try:
            result = read_result(path.parent)
        except UserError as damage:
            activity.warn(str(damage))
            continue
        if result is not None and _is_gone(result.store, uri):
            # The run of its sweep is gone too; the sweep adopts it again.
            tags = {name: value for name, value in result.tags.items() if name != PARENT_TAG}
            sync_ended(out, result, place, tags=tags)
            synced += 1
    if synced:
        activity.warn(f"copied {synced} finished runs into the new MLflow database")


def _is_gone(store: str, uri: str) -> bool:
    database = database_of(store)
    return store == uri or (database is not None and not database.exists())


def _place(uri: str, artifacts: str | None) -> Place:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(EXPERIMENT)
    # The kind makes the UI show runs and charts first, not its tools for language models; the view, GA and LA.
    tags = {"mlflow.experimentKind": "custom_model_development", **ui_view.tags()}
    if found is not None:
        for name, value in tags.items():
            if found.tags.get(name) != value:
                client.set_experiment_tag(found.experiment_id, name, value)
        return Place(client, str(found.experiment_id))
    try:
        return Place(client, str(client.create_experiment(EXPERIMENT, artifact_location=artifacts, tags=tags)))
    except MlflowException:  # another process may have been faster
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            raise
        return Place(client, str(found.experiment_id))


def _quoted(value: str) -> str:
    """A value as MLflow's filters take it; they know no way to escape a quote."""
    return f'"{value}"' if "'" in value else f"'{value}'"


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, max(len(items), 1), size):
        yield items[first : first + size]
