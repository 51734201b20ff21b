"""How runs are read from MLflow in bulk: one SQL query per table of a database, pages of runs from a server.

Only `analysis.runs` uses this. Nothing is ever written: a database is opened read-only, also while a sweep writes it.
"""

import logging
import os
import shutil
import sqlite3
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

import pandas as pd

from fl_lightning.errors import UserError, require
from fl_lightning.runs.outbox import check_reachable
from fl_lightning.runs.store import DATABASE, database_of, sqlite_uri
from fl_lightning.runs.track import EXPERIMENT

# What a query needs; MLflow has had these since its version 1.
TABLES = {
    "experiments": ("experiment_id", "name", "lifecycle_stage"),
    "runs": ("run_uuid", "name", "status", "start_time", "end_time", "artifact_uri", "lifecycle_stage"),
    "params": ("run_uuid", "key", "value"),
    "tags": ("run_uuid", "key", "value"),
    "metrics": ("run_uuid", "key", "value", "step", "is_nan"),
    "latest_metrics": ("run_uuid", "key", "value", "step", "is_nan"),
}
# SQLite takes this many values in one query, at least.
VALUES_PER_QUERY = 900
# Requests to a server at once.
THREADS = 8


class Content(NamedTuple):
    """All runs of the experiment, in long tables.

    Attributes:
        runs: run_id, name, state (of MLflow), start and end (milliseconds).
        params: run_id, key, value.
        tags: run_id, key, value.
        latest: run_id, key, value, round: every metric after its last round.
        best: run_id, value: the largest GA of all rounds.
    """

    runs: pd.DataFrame
    params: pd.DataFrame
    tags: pd.DataFrame
    latest: pd.DataFrame
    best: pd.DataFrame


class Store(ABC):
    """Where runs are tracked.

    Attributes:
        place: What a user calls it.
    """

    place: str

    @abstractmethod
    def content(self) -> Content:
        """Everything but the history of metrics."""

    @abstractmethod
    def history(self, run_ids: Sequence[str], metrics: Collection[str] | None = None) -> pd.DataFrame:
        """Columns run_id, round, key, value: all rounds of some runs."""

    @abstractmethod
    def artifact(self, run_id: str, name: str) -> Path | None:
        """A file of a run, on this machine; None if there is none."""


def open_store(place: str | Path | None = None) -> Store:
    """The store in a folder of runs, a database file, or at an MLflow URI.

    Args:
        place: Without one, MLFLOW_TRACKING_URI if that is set, else the folder `runs`.

    Raises:
        UserError: If there is none.
    """
    if place is None:
        place = os.environ.get("MLFLOW_TRACKING_URI") or "runs"
    text = str(place)
    if (database := database_of(text)) is not None:
        return Database(database)
    if "://" in text:
        return Server(text)
    path = Path(place)
    return Database(path if path.is_file() else path / DATABASE)


class Database(Store):
    """A SQLite file.

    Args:
        path: The file; artifacts lie where the runs say, or beside it if the folder was moved.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, str(path.parent if path.name == DATABASE else path)
        require(
            path.is_file(),
            f"no runs in {path.parent} ({path} does not exist); make some with `fl-lightning demo`, or name the "
            "folder of your runs",
        )
        self._artifacts: dict[str, str] = {}

    def content(self) -> Content:
        with self._connected() as connection:
            self._check(connection)
            experiment = self._experiment(connection)

            def read(columns: str, table: str, condition: str = "") -> pd.DataFrame:
                query = (
                    f"SELECT {columns} FROM {table} t JOIN runs r ON r.run_uuid = t.run_uuid "
                    f"WHERE r.experiment_id = ? AND r.lifecycle_stage = 'active' {condition}"
                )
                return pd.read_sql_query(query, connection, params=(experiment,))

            runs = read(
                "r.run_uuid AS run_id, r.name, r.status AS state, r.start_time AS start, r.end_time AS end, "
                "r.artifact_uri",
                "runs",
            )
            self._artifacts = dict(zip(runs["run_id"], runs.pop("artifact_uri"), strict=True))
            return Content(
                runs,
                read("t.run_uuid AS run_id, t.key, t.value", "params"),
                read("t.run_uuid AS run_id, t.key, t.value", "tags"),
                _with_nan(read("t.run_uuid AS run_id, t.key, t.value, t.is_nan, t.step AS round", "latest_metrics")),
                read(
                    "t.run_uuid AS run_id, MAX(t.value) AS value",
                    "metrics",
                    "AND t.key = 'GA' AND NOT t.is_nan GROUP BY t.run_uuid",
                ),
            )

    def history(self, run_ids: Sequence[str], metrics: Collection[str] | None = None) -> pd.DataFrame:
        chosen = list(metrics or ())
        named = f"AND key IN ({', '.join('?' * len(chosen))})" if chosen else ""
        parts = []
        with self._connected() as connection:
            for first in range(0, max(len(run_ids), 1), VALUES_PER_QUERY):
                some = list(run_ids[first : first + VALUES_PER_QUERY])
                query = (
                    "SELECT run_uuid AS run_id, step AS round, key, value, is_nan FROM metrics "
                    f"WHERE run_uuid IN ({', '.join('?' * len(some))}) {named} ORDER BY rowid"
                )
                parts.append(pd.read_sql_query(query, connection, params=(*some, *chosen)))
        return _with_nan(pd.concat(parts, ignore_index=True))

    def artifact(self, run_id: str, name: str) -> Path | None:
        recorded = Path(unquote(urlparse(self._artifacts.get(run_id, "")).path))
        for folder in (recorded, self.path.parent / "artifacts" / run_id / "artifacts"):
            if (folder / name).is_file():
                return folder / name
        return None

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Read-only. A database with a write-ahead log on a read-only disk opens only as one that never changes."""
        uri = self.path.resolve().as_uri()
        try:
            connection = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=20)
            try:
                connection.execute("SELECT 1 FROM sqlite_master").fetchone()
            except sqlite3.OperationalError:
                connection.close()
                connection = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)
            with closing(connection):
                yield connection
        except (sqlite3.Error, pd.errors.DatabaseError) as error:
            reason = str(error).strip().rpartition("\n")[2]
            raise UserError(f"{self.path} cannot be read as an MLflow database: {reason}") from None

    def _check(self, connection: sqlite3.Connection) -> None:
        for table, columns in TABLES.items():
            found = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            lacking = [column for column in columns if column not in found]
            if lacking:
                what = f"table {table}" if not found else f"column {lacking[0]} of table {table}"
                raise UserError(
                    f"{self.path} is no MLflow database of a version that can be read here: it has no {what}; "
                    f"bring it up to date with `mlflow db upgrade '{sqlite_uri(self.path.resolve())}'`, or name "
                    "another folder"
                )

    def _experiment(self, connection: sqlite3.Connection) -> int:
        names = dict(connection.execute("SELECT name, experiment_id FROM experiments WHERE lifecycle_stage = 'active'"))
        if EXPERIMENT not in names:
            raise _other_experiment(self.place, names)
        return int(names[EXPERIMENT])


class Server(Store):
    """A tracking server, or any other store that MLflow knows by its URI.

    Args:
        uri: Of the store.
    """

    def __init__(self, uri: str) -> None:
        self.place = uri
        check_reachable(uri)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # one for every file
        from mlflow import MlflowClient  # seconds to import: only who needs it waits for it

        with self._explained():
            self._client = MlflowClient(tracking_uri=uri)
        self._files = tempfile.mkdtemp(prefix="fl_lightning-artifacts-")
        weakref.finalize(self, shutil.rmtree, self._files, ignore_errors=True)
        self._finished: set[str] = set()

    def content(self) -> Content:
        with self._explained():
            experiments = {e.name: e.experiment_id for e in self._client.search_experiments()}
            if EXPERIMENT not in experiments:
                raise _other_experiment(self.place, experiments)
            runs = list(self._pages(experiments[EXPERIMENT]))
            histories = self._each(lambda run: self._client.get_metric_history(run.info.run_id, "GA"), runs)
            best = [
                (run.info.run_id, max((m.value for m in history if m.value == m.value), default=float("nan")))
                for run, history in zip(runs, histories, strict=True)
                if history
            ]
        self._finished = {run.info.run_id for run in runs if run.info.status == "FINISHED"}
        rows = [
            (run.info.run_id, run.info.run_name, run.info.status, run.info.start_time, run.info.end_time)
            for run in runs
        ]
        latest = [
            (run.info.run_id, m.key, m.value, m.step)
            for run in runs
            for m in getattr(run.data, "_metric_objs", ())  # `metrics` would forget the round
        ]
        return Content(
            pd.DataFrame(rows, columns=["run_id", "name", "state", "start", "end"]),
            _long((run.info.run_id, run.data.params) for run in runs),
            _long((run.info.run_id, run.data.tags) for run in runs),
            pd.DataFrame(latest, columns=["run_id", "key", "value", "round"]),
            pd.DataFrame(best, columns=["run_id", "value"]),
        )

    def history(self, run_ids: Sequence[str], metrics: Collection[str] | None = None) -> pd.DataFrame:
        with self._explained():
            parts = list(self._each(lambda run_id: self._rounds(run_id, metrics), run_ids))
        empty = pd.DataFrame({"run_id": [], "round": [], "key": [], "value": []})
        table: pd.DataFrame = pd.concat([part for part in parts if len(part)] or [empty], ignore_index=True)
        return table

    def artifact(self, run_id: str, name: str) -> Path | None:
        from mlflow.exceptions import MlflowException

        folder = Path(self._files) / run_id
        if (folder / name).is_file():
            return folder / name
        folder.mkdir(exist_ok=True)
        try:
            return Path(self._client.download_artifacts(run_id, name, str(folder)))
        except (MlflowException, OSError):
            return None

    def _rounds(self, run_id: str, metrics: Collection[str] | None) -> pd.DataFrame:
        """From the run's own table, one request; while it runs there is none, and every metric is asked for."""
        if run_id in self._finished and (path := self.artifact(run_id, "rounds.parquet")) is not None:
            wide = pd.read_parquet(path)
            if "round" in wide:
                chosen = [c for c in wide if c != "round" and (metrics is None or c in metrics)]
                long = wide.melt("round", chosen, "key", "value")
                return long.assign(run_id=run_id)
        keys = metrics or list(self._client.get_run(run_id).data.metrics)
        rows = [(run_id, m.step, key, m.value) for key in keys for m in self._client.get_metric_history(run_id, key)]
        return pd.DataFrame(rows, columns=["run_id", "round", "key", "value"])

    def _pages(self, experiment: str) -> Iterator[Any]:
        token = None
        while True:
            page = self._client.search_runs([experiment], max_results=1000, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def _each(self, ask: Any, items: Sequence[Any]) -> Iterator[Any]:
        with ThreadPoolExecutor(THREADS) as threads:
            yield from threads.map(ask, items)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (MlflowException, SQLAlchemyError, OSError, ImportError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"cannot read the MLflow store {self.place}: {reason}") from None


def _other_experiment(place: str, names: Collection[str]) -> UserError:
    others = ", ".join(sorted(set(names) - {"Default"})) or "no experiment at all"
    return UserError(
        f"{place} holds no experiment called {EXPERIMENT}, but {others}; name the folder of runs made by fl-lightning"
    )


def _with_nan(table: pd.DataFrame) -> pd.DataFrame:
    """MLflow keeps NaN as 0 with a mark."""
    missing = table.pop("is_nan").astype(bool)
    table["value"] = table["value"].astype(float).mask(missing)
    return table


def _long(items: Any) -> pd.DataFrame:
    rows = [(run_id, key, value) for run_id, values in items for key, value in values.items()]
    return pd.DataFrame(rows, columns=["run_id", "key", "value"])
