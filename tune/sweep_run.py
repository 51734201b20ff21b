"""A sweep in MLflow: one parent run, to which the runs of its settings and seeds belong."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from filelock import FileLock

from fl_lightning.errors import UserError
from fl_lightning.metrics.metric import sign
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.folder import Result
from fl_lightning.runs.tracking.live_copy import END_SECONDS, LiveCopy
from fl_lightning.runs.tracking.store import store_uri
from fl_lightning.runs.tracking.sync import PARENT_TAG, Account, finish_children, sync_ended
from fl_lightning.system import activity
from fl_lightning.system.atomic import write_atomically
from fl_lightning.system.text import as_csv
from tune.grid import Cell
from tune.outcome import CellOutcome, best_of
from tune.study import STATE, STUDY, SUMMARY, TABLE, Study

# When a sweep was last begun or gone on with: a study that was swept in two forms is what it was then.
SWEPT_TAG = "swept"


class SweepRecord:
    """The parent run of a sweep. The same study at the same scale goes on in the same one.

    Args:
        study: What is swept.
        out: The folder of all runs.
        folder: Of this sweep.
    """

    def __init__(self, study: Study, out: Path, folder: Path) -> None:
        self._study, self._out, self._folder = study, out, folder
        name = f"sweep {study.name}" + (f" {study.scale}" if study.scale else "")
        self._swept = datetime.now(UTC)
        tags = {"kind": "sweep", SWEPT_TAG: self._swept.isoformat(), **_study_tags(study)}
        folder.mkdir(parents=True, exist_ok=True)
        content = json.loads(json.dumps(asdict(study), default=str))
        said = self._write(STUDY, yaml.safe_dump(content, sort_keys=False))
        key = f"sweep {study.name} {study.scale} {study.identity}"
        self._account = Account(key, name, study.params, tags, first=0, files=[said])
        self._mlflow = LiveCopy(out, self._account, seconds=END_SECONDS)  # trials are to know its id
        self._write_state(ended=False)

    @property
    def run_id(self) -> str:
        """Of the parent run; empty until its store has answered."""
        return self._mlflow.run_id

    @property
    def child_tags(self) -> dict[str, str]:
        """What marks a run as part of this sweep."""
        parent = {PARENT_TAG: self.run_id} if self.run_id else {}
        return {**parent, **_study_tags(self._study)}

    def store(self, paths: Sequence[Path]) -> None:
        """Store files, or whole folders, with the sweep."""
        self._account = self._account._replace(files=[*self._account.files, *paths])
        self._mlflow.flush(self._account, 0)

    def finish(self) -> None:
        """Nothing more comes."""
        self._write_state(ended=True)
        self._mlflow.close(self._account._replace(status="FINISHED"))

    def _write_state(self, ended: bool) -> None:
        state = {"run_id": self.run_id, "swept": self._swept.timestamp(), "ended": ended}
        self._write(STATE, json.dumps(state))

    def _write(self, name: str, text: str) -> Path:
        """Write a file of the sweep's folder; another sweep of the same study may write it at the same moment."""
        path = self._folder / name
        with FileLock(self._folder / "lock"):
            write_atomically(path, text.encode())
        return path

    def abandon(self, reason: BaseException) -> None:
        """The sweep ends before its end; the same command goes on in this run."""
        with suppress(UserError):  # the store itself may be what failed
            status = "KILLED" if isinstance(reason, KeyboardInterrupt) else "FAILED"
            self._mlflow.close(self._account._replace(status=status))
            finish_children(self._out, self.run_id, status)  # its trials are gone, without a word

    def close(
        self, study: Study, outcomes: Sequence[CellOutcome], failures: Mapping[str, str], summary: str | None = None
    ) -> None:
        """Adopt the runs that other sweeps have computed, and store the table of runs and the summary."""
        if self._mlflow.flush(self._account):  # or it is away, and the same command adopts them
            outcomes = [outcome._replace(runs=self._adopted(outcome)) for outcome in outcomes]
        texts = {TABLE: _runs_csv(outcomes)} | ({} if summary is None else {SUMMARY: summary})
        paths = [self._write(name, text) for name, text in texts.items()]
        self._write_state(ended=not failures)
        ended = sum(len(outcome.runs) for outcome in outcomes)
        means = [one.tried.mean for one in best_of(outcomes) if len(one.values) == len(one.cell.seeds)]
        numbers = {"runs": float(ended), "failures": float(len(failures))}
        if means:
            numbers[f"best_{study.metric}"] = max(means, key=lambda mean: sign(study.metric) * mean)
        status, files = "FINISHED" if not failures else "FAILED", [*self._account.files, *paths]
        if not self._mlflow.close(self._account._replace(rounds=[numbers], files=files, status=status), None):
            activity.warn("the MLflow server lacks the tables of this sweep; the same command sends them")

    def _adopted(self, outcome: CellOutcome) -> list[tuple[RunConfig, Result]]:
        """The runs of a cell, as the present store knows them."""
        runs = []
        for config, result in outcome.runs:
            whole = run_folder.latest(config, self._out) or result  # also what lies beyond this study's rule
            known = self._adopt(whole, {**self.child_tags, **purpose_tags(outcome.cell)})
            runs.append((config, replace(result, run_id=known.run_id)))
        return runs

    def _adopt(self, result: Result, tags: Mapping[str, str]) -> Result:
        """Give a run that has ended the tags of this sweep."""
        same = result.store == store_uri(self._out)
        if same and tags.keys() <= result.tags.keys():
            return sync_ended(self._out, result)
        # In its own store it stays a child of the sweep that has computed it; another store does not know that one.
        return sync_ended(self._out, result, tags={**tags, **result.tags} if same else {**result.tags, **tags})


def open_sweep(study: Study, out: Path, folder: Path) -> SweepRecord:
    """The parent run; opening it also creates the store's tables, once, before many processes write to them."""
    return SweepRecord(study, out, folder)


def purpose_tags(cell: Cell) -> dict[str, str]:
    """Marks runs that only confirm a choice, so that none of them takes part in it."""
    return {"purpose": "confirm"} if cell.confirms else {}


def _study_tags(study: Study) -> dict[str, str]:
    # A run may belong to several studies, so each has a tag of its own name.
    return {f"study.{study.name}": study.scale or "all", "study": study.name}


def _runs_csv(outcomes: Sequence[CellOutcome]) -> str:
    """One line per run: case, whether it chose or confirmed, settings, how it ended, the metrics of its last round."""
    lines: list[dict[str, Any]] = []
    for outcome in outcomes:
        for config, result in outcome.runs:
            ending = {"status": result.status, "round": len(result.history), "run_id": result.run_id}
            ending["identity"] = result.identity
            purpose = "confirm" if outcome.cell.confirms else "choose"
            lines.append({"case": outcome.cell.case, "purpose": purpose, **config.flat(), **ending, **result.final})
    columns = list(dict.fromkeys(key for line in lines for key in line))
    return as_csv(pd.DataFrame([{key: line.get(key, "") for key in columns} for line in lines], dtype=object))
