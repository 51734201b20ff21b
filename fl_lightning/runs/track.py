"""The only writer to MLflow.

Writes are replayable: the timestamp of a metric is the run's start plus the round, so writing a round again changes
nothing, and a run that was killed is continued, never doubled.
"""

import functools
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fl_lightning.runs import view
from fl_lightning.runs.outbox import Outbox, check_reachable, explained
from fl_lightning.runs.store import database_of, ensure, store_uri
from fl_lightning.uncertainty.kinds import is_final

EXPERIMENT = "fl_lightning"
ATTEMPT_TAG = "fl_lightning.attempt"
PARENT_TAG = "mlflow.parentRunId"
# Counts how often the posterior of a run was measured.
TIMES = "posterior/times_measured"
# MLflow's limits for one request.
PARAMS_PER_BATCH, METRICS_PER_BATCH = 100, 1000


class Tracker:
    """One MLflow run.

    Args:
        out: The folder of all runs.
        attempt: A key of this run that is stable over resumes; the run is found again by it.
        name: Shown in the UI.
        params: Flat dotted settings.
        tags: To filter by.
        is_new: Whether nobody can have used the key before, so that there is nothing to look for.
        place: Where to write, if not to the store of the folder.
    """

    def __init__(
        self,
        out: Path,
        attempt: str,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        is_new: bool = False,
        place: "Place | None" = None,
    ) -> None:
        self.uri, self.name, self.params, self.tags = store_uri(out), name, dict(params), dict(tags)
        self._outbox = Outbox(self.uri)
        with explained(self.uri):
            from mlflow.entities import Metric, Param, RunTag  # seconds to import: only who tracks waits for it

            self._metric = Metric
            self._client, experiment = place or open_place(self.uri, out.resolve())
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
            # A posterior that is measured again has later numbers, of which MLflow takes the latest.
            self._metric(name, value, self._start + number + int(values.get(TIMES, 0) if is_final(name) else 0), number)
            for number, values in rounds
            for name, value in values.items()
        ]
        for batch in _batches(metrics, METRICS_PER_BATCH) if metrics else ():
            self._outbox.send(functools.partial(self._client.log_batch, self.run_id, metrics=batch))

    def tag(self, name: str, value: str) -> None:
        self.tags[name] = value
        self._outbox.send(functools.partial(self._client.set_tag, self.run_id, name, value))

    def artifacts(self, paths: Iterable[Path]) -> None:
        """Store files, or whole folders, with the run."""
        for path in paths:
            if path.is_dir():
                self._outbox.send(functools.partial(self._client.log_artifacts, self.run_id, str(path), path.name))
            else:
                self._outbox.send(functools.partial(self._client.log_artifact, self.run_id, str(path)))

    def finish(self, status: str) -> None:
        """End the run: FINISHED, FAILED or KILLED."""
        self._outbox.send(functools.partial(self._client.set_terminated, self.run_id, status))

    def flush(self) -> bool:
        """Try once more to send what a server has not taken; whether the store now has everything."""
        return self._outbox.flush()

    def finish_children(self, status: str) -> None:
        """End those runs below this one that nobody computes any more, though they say so."""
        with explained(self.uri):
            where = f"tags.`{PARENT_TAG}` = '{self.run_id}' AND attributes.status = 'RUNNING'"
            while running := self._client.search_runs([self._experiment], where, max_results=1000):
                for run in running:
                    self._client.set_terminated(run.info.run_id, status)

    def _find(self, experiment: str, attempt: str) -> Any:
        runs = self._client.search_runs([experiment], f"tags.`{ATTEMPT_TAG}` = '{attempt}'", max_results=1)
        return runs[0] if runs else None


def recall_attempt(out: Path, tags: Mapping[str, str]) -> str | None:
    """The key of the latest run with these tags, whoever began it."""
    uri = store_uri(out)
    with explained(uri):
        client, experiment = open_place(uri, out.resolve())
        where = " AND ".join(f"tags.`{name}` = {_quoted(value)}" for name, value in tags.items())
        runs = client.search_runs([experiment], where, max_results=1, order_by=["attributes.start_time DESC"])
    return runs[0].data.tags.get(ATTEMPT_TAG) if runs else None


def delete_run(out: Path, run_id: str) -> None:
    """Put a run into MLflow's trash, from which `mlflow gc` removes it; files of it in our folder go at once."""
    uri = store_uri(out)
    with explained(uri):
        client = open_place(uri, out.resolve()).client
        files = Path(client.get_run(run_id).info.artifact_uri.removeprefix("file://"))
        client.delete_run(run_id)
        if files.is_relative_to(out.resolve()):
            shutil.rmtree(files.parent, ignore_errors=True)


class Place(NamedTuple):
    """Where runs are written: the client of a store, and the id of our experiment in it."""

    client: Any
    experiment: str


@functools.cache
def open_place(uri: str, out: Path) -> Place:
    """The place of a folder of runs; made once per process, since runs may be many and short."""
    check_reachable(uri)
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # or it tells of every table it creates
    database = database_of(uri)
    location = None if database is None else (out / "artifacts").as_uri()
    if database is not None:
        from fl_lightning.runs.retelling import retell  # it writes through a tracker

        ensure(database, lambda new: retell(out, uri, _place(new, location)))
    return _place(uri, location)


def _place(uri: str, artifacts: str | None) -> Place:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(EXPERIMENT)
    # The kind makes the UI show runs and charts first, not its tools for language models; the view, GA and LA.
    tags = {"mlflow.experimentKind": "custom_model_development", **view.tags()}
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
