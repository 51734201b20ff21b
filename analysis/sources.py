"""Where runs are: in a folder, or on a tracking server, which is read by MLflow's public API."""

import json
import logging
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml

from analysis import study_records
from analysis.study_records import Sweep, cases_in
from fl_lightning.errors import UserError, require
from fl_lightning.runs.files import ROUNDS
from fl_lightning.runs.known_run import KnownRun, known_runs
from fl_lightning.runs.tracking.store import check_reachable
from fl_lightning.runs.tracking.sync import EXPERIMENT
from tune.study import STUDY, TABLE
from tune.sweep_run import SWEPT_TAG

if TYPE_CHECKING:
    from mlflow.entities import Run  # MLflow takes seconds to import

Place = str | Path | None
STUDY_PREFIX = "study."
# Requests at once.
THREADS = 8
# Of a run, in MLflow's words and in ours; a diverged run is FINISHED there, and has a tag.
STATUS = {"RUNNING": "running", "SCHEDULED": "running", "FAILED": "failed", "KILLED": "stopped"}


class Source(ABC):
    """Where runs are.

    Attributes:
        place: What a user calls it.
    """

    place: str

    @abstractmethod
    def runs(self) -> Iterable[KnownRun]:
        """All of them."""

    @abstractmethod
    def sweeps(self) -> Iterable[Sweep]:
        """All sweeps."""

    @abstractmethod
    def artifact(self, run_id: str, name: str) -> Path | None:
        """A file of a run, on this machine; None if there is none."""


class Folder(Source):
    """A folder of runs; nothing is ever written to it."""

    def __init__(self, path: Path) -> None:
        require(
            path.is_dir(),
            f"no runs in {path} (there is no such folder); make some with `fl-lightning demo`, or name the folder of "
            "your runs",
        )
        self.path, self.place = path, str(path)
        self._folders: dict[str, Path | None] = {}

    def runs(self) -> Iterable[KnownRun]:
        for run in known_runs(self.path):
            self._folders[run.run_id] = run.folder
            yield run

    def sweeps(self) -> Iterable[Sweep]:
        return study_records.sweeps_in(self.path)

    def artifact(self, run_id: str, name: str) -> Path | None:
        folder = self._folders.get(run_id)
        return folder / name if folder is not None and (folder / name).is_file() else None


class Server(Source):
    """A tracking server, or any other store that MLflow knows by its URI.

    Args:
        uri: Of the store.
    """

    def __init__(self, uri: str) -> None:
        self.place = uri
        check_reachable(uri)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # one for every file
        from mlflow import MlflowClient, MlflowException  # takes seconds

        self._failures = (MlflowException, OSError, ImportError)
        with self._explained():
            self._client = MlflowClient(tracking_uri=uri)
            self._runs = list(self._search())
        self._files = tempfile.mkdtemp(prefix="fl_lightning-artifacts-")
        weakref.finalize(self, shutil.rmtree, self._files, ignore_errors=True)

    def runs(self) -> Iterable[KnownRun]:
        # Sweeps have params and metrics of their own; runs without a method have only just begun.
        begun = [run for run in self._runs if "method" in run.data.params]
        with self._explained(), ThreadPoolExecutor(THREADS) as threads:
            yield from threads.map(self._known, begun)

    def sweeps(self) -> Iterable[Sweep]:
        with self._explained():
            return [self._sweep(run) for run in self._runs if run.data.tags.get("kind") == "sweep"]

    def artifact(self, run_id: str, name: str) -> Path | None:
        folder = Path(self._files) / run_id
        if (folder / name).is_file():
            return folder / name
        folder.mkdir(exist_ok=True)
        try:
            return Path(self._client.download_artifacts(run_id, name, str(folder)))
        except self._failures:
            return None

    def _search(self) -> "Iterator[Run]":
        experiments = {e.name: e.experiment_id for e in self._client.search_experiments()}
        if EXPERIMENT not in experiments:
            others = ", ".join(sorted(set(experiments) - {"Default"})) or "no experiment at all"
            raise UserError(
                f"{self.place} holds no experiment called {EXPERIMENT}, but {others}; name the store of runs made by "
                "fl-lightning"
            )
        token = None
        while True:
            page = self._client.search_runs([experiments[EXPERIMENT]], max_results=1000, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def _known(self, run: "Run") -> KnownRun:
        info, tags = run.info, dict(run.data.tags)
        return KnownRun(
            run_id=info.run_id,
            name=info.run_name,
            status=STATUS.get(info.status) or tags.get("status", "finished"),
            start=info.start_time / 1000,
            end=(info.end_time or float("nan")) / 1000,
            settings={key: _parsed(text) for key, text in run.data.params.items()},
            tags=tags,
            rounds=self._rounds(run),
            folder=None,
        )

    def _rounds(self, run: "Run") -> list[Mapping[str, float]]:
        """From the run's own table, one request; while it runs there is none, and every metric is asked for."""
        if run.info.status == "FINISHED" and (path := self.artifact(run.info.run_id, ROUNDS)) is not None:
            rows = pd.read_parquet(path).drop(columns="round", errors="ignore").to_dict("records")
            return [{str(name): value for name, value in row.items() if value == value} for row in rows]
        found: dict[int, dict[str, float]] = {}
        for name in run.data.metrics:
            for one in self._client.get_metric_history(run.info.run_id, name):
                found.setdefault(one.step, {})[name] = one.value
        return [found.get(number, {}) for number in range(1, max(found, default=0) + 1)]

    def _sweep(self, run: "Run") -> Sweep:
        run_id, tags = run.info.run_id, run.data.tags
        said = self.artifact(run_id, STUDY)
        content = yaml.safe_load(said.read_text(encoding="utf-8")) if said is not None else None
        swept = tags.get(SWEPT_TAG)  # those of earlier versions lack it
        return Sweep(
            study=tags["study"],
            scale=tags[f"{STUDY_PREFIX}{tags['study']}"],
            run_id=run_id,
            content=content or {},
            cases=cases_in(self.artifact(run_id, TABLE)),
            swept=pd.Timestamp(swept).timestamp() if swept else run.info.start_time / 1000,
            ended=run.info.status == "FINISHED",
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"cannot read the MLflow store {self.place}: {reason}") from None


def _parsed(text: str) -> Any:
    """A setting: numbers, switches and lists are written as JSON, words as they are."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def open_source(place: Place = None) -> Source:
    """The runs in a folder, or at an MLflow URI.

    Args:
        place: Without one, MLFLOW_TRACKING_URI if that is set, else the folder `runs`.

    Raises:
        UserError: If there is none.
    """
    if place is None:
        place = os.environ.get("MLFLOW_TRACKING_URI") or "runs"
    if "://" in str(place):
        return Server(str(place))
    return Folder(Path(place))
