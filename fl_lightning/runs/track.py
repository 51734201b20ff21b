"""The only writer to MLflow.

Writes are replayable: the timestamp of a metric is the run's start plus the round, so writing a round again changes
nothing, and a run that was killed is continued, never doubled.
"""

import functools
import json
import logging
import os
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError
from fl_lightning.runs import view

EXPERIMENT = "fl_lightning"
ATTEMPT_TAG = "fl_lightning.attempt"
PARENT_TAG = "mlflow.parentRunId"
# MLflow's limits for one request.
PARAMS_PER_BATCH, METRICS_PER_BATCH = 100, 1000


def store_uri(out: Path) -> str:
    """Where runs are tracked: MLFLOW_TRACKING_URI if set, else a database in the folder of all runs."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(out / 'mlflow.db').resolve()}"


class Tracker:
    """One MLflow run.

    Args:
        out: The folder of all runs.
        attempt: A key of this run that is stable over resumes; the run is found again by it.
        name: Shown in the UI.
        params: Flat dotted settings.
        tags: To filter by.
        is_new: Whether nobody can have used the key before, so that there is nothing to look for.
    """

    def __init__(
        self,
        out: Path,
        attempt: str,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        is_new: bool = False,
    ) -> None:
        self.uri, self.tags = store_uri(out), dict(tags)
        with _explained(self.uri):
            from mlflow.entities import Metric, Param, RunTag  # seconds to import: only who tracks waits for it

            self._metric = Metric
            self._client, experiment = _open(self.uri, out.resolve())
            self._experiment = experiment
            run = None if is_new else self._find(experiment, attempt)
            if run is None:
                run = self._client.create_run(experiment, run_name=name, tags={**tags, ATTEMPT_TAG: attempt})
                news: list[Any] = []
            else:
                self._client.update_run(run.info.run_id, status="RUNNING", name=name)
                news = [RunTag(name, value) for name, value in tags.items()]
            self.run_id: str = run.info.run_id
            self._start: int = run.info.start_time
            items = [
                Param(key, json.dumps(value) if not isinstance(value, str) else value) for key, value in params.items()
            ]
            for batch in _batches(items, PARAMS_PER_BATCH):
                self._client.log_batch(self.run_id, params=batch, tags=news)

    def log_rounds(self, rounds: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Write the metrics of some rounds in one batch; repeating a round is harmless."""
        metrics = [
            self._metric(name, value, self._start + number, number)
            for number, values in rounds
            for name, value in values.items()
        ]
        with _explained(self.uri):
            for batch in _batches(metrics, METRICS_PER_BATCH):
                self._client.log_batch(self.run_id, metrics=batch)

    def tag(self, name: str, value: str) -> None:
        with _explained(self.uri):
            self._client.set_tag(self.run_id, name, value)

    def artifacts(self, paths: Iterable[Path]) -> None:
        """Store files, or whole folders, with the run."""
        with _explained(self.uri):
            for path in paths:
                if path.is_dir():
                    self._client.log_artifacts(self.run_id, str(path), path.name)
                else:
                    self._client.log_artifact(self.run_id, str(path))

    def finish(self, status: str) -> None:
        """End the run: FINISHED, FAILED or KILLED."""
        with _explained(self.uri):
            self._client.set_terminated(self.run_id, status)

    def finish_children(self, status: str) -> None:
        """End those runs below this one that nobody computes any more, though they say so."""
        with _explained(self.uri):
            where = f"tags.`{PARENT_TAG}` = '{self.run_id}' AND attributes.status = 'RUNNING'"
            while running := self._client.search_runs([self._experiment], where, max_results=1000):
                for run in running:
                    self._client.set_terminated(run.info.run_id, status)

    def _find(self, experiment: str, attempt: str) -> Any:
        runs = self._client.search_runs([experiment], f"tags.`{ATTEMPT_TAG}` = '{attempt}'", max_results=1)
        return runs[0] if runs else None


def tag_run(uri: str, run_id: str, tags: Mapping[str, str], name: str) -> None:
    """Change the tags and the name of a run that has ended."""
    with _client_of(uri) as client:
        client.update_run(run_id, name=name)
        for key, value in tags.items():
            client.set_tag(run_id, key, value)


def delete_run(uri: str, run_id: str) -> None:
    """Put a run into MLflow's trash, from which `mlflow gc` removes it for good."""
    with _client_of(uri) as client:
        client.delete_run(run_id)


@contextmanager
def _client_of(uri: str) -> Iterator[Any]:
    check_reachable(uri)
    with _explained(uri):
        from mlflow import MlflowClient

        yield MlflowClient(tracking_uri=uri)


@functools.cache
def _open(uri: str, out: Path) -> tuple[Any, str]:
    """The client of a store and the id of our experiment in it; once per process, since runs may be many and short."""
    check_reachable(uri)
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # or it tells of every table it creates
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri)
    _prepare_store(uri)
    found = client.get_experiment_by_name(EXPERIMENT)
    # The kind makes the UI show runs and charts first, not its tools for language models; the view, GA and LA.
    tags = {"mlflow.experimentKind": "custom_model_development", **view.tags()}
    if found is not None:
        for name, value in tags.items():
            if found.tags.get(name) != value:
                client.set_experiment_tag(found.experiment_id, name, value)
        return client, str(found.experiment_id)
    location = (out / "artifacts").as_uri() if uri.startswith("sqlite:") else None
    try:
        return client, str(client.create_experiment(EXPERIMENT, artifact_location=location, tags=tags))
    except MlflowException:  # another process may have been faster
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is None:
            raise
        return client, str(found.experiment_id)


def _prepare_store(uri: str) -> None:
    # Write-ahead logging halves the cost of a batch and lets the UI read while a run writes.
    if uri.startswith("sqlite:///"):
        with sqlite3.connect(uri.removeprefix("sqlite:///")) as connection:
            connection.execute("PRAGMA journal_mode=WAL")


def check_reachable(uri: str) -> None:
    """MLflow itself would retry an unreachable server for minutes."""
    if not uri.startswith(("http://", "https://")):
        return
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=5):
            pass
    except urllib.error.HTTPError:
        pass  # something answers there; a proxy may not know /health
    except (OSError, ValueError) as error:
        raise UserError(
            f"no MLflow server answers at {uri} ({error}); start it, correct MLFLOW_TRACKING_URI, or unset it to "
            "track in the runs folder"
        ) from None


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """MLflow's failures as one line."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError, sqlite3.Error) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"cannot write to the MLflow store {uri}: {reason}; finished rounds are saved, the same command resumes"
        ) from error


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, max(len(items), 1), size):
        yield items[first : first + size]
