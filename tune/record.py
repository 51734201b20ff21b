"""A sweep in MLflow: one parent run, to which the runs of its settings and seeds belong."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.config import RunConfig
from fl_lightning.direction import sign
from fl_lightning.errors import UserError
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.folder import Result
from fl_lightning.runs.recording import adopt
from fl_lightning.runs.track import PARENT_TAG, Tracker
from fl_lightning.system import activity, spreadsheet
from fl_lightning.system.atomic import write_atomically
from fl_lightning.system.text import render
from tune.grid import Cell
from tune.outcome import CellOutcome, best_of, protocol_of, rows
from tune.picture import Picture
from tune.study import Study

# When a sweep was last begun or gone on with: a study that was swept in two forms is what it was then.
SWEPT_TAG = "swept"


class SweepRecord:
    """The parent run of a sweep. The same study at the same scale goes on in the same one.

    Args:
        study: What is swept.
        out: The folder of all runs.
        folder: Of this sweep.
    """

    def __init__(self, study: Study | Picture, out: Path, folder: Path) -> None:
        self._study, self._out, self._folder = study, out, folder
        name = f"sweep {study.name}" + (f" {study.scale}" if study.scale else "")
        tags = {"kind": "sweep", SWEPT_TAG: datetime.now(UTC).isoformat(), **_study_tags(study)}
        self._tracker = Tracker(out, f"sweep {study.name} {study.scale} {study.identity}", name, study.params, tags)
        self.run_id = self._tracker.run_id
        folder.mkdir(parents=True, exist_ok=True)
        content = json.loads(json.dumps(asdict(study), default=str))
        said = folder / "study.yaml"
        write_atomically(said, yaml.safe_dump(content, sort_keys=False).encode())
        self.store([said])  # now, for reports that are made before the sweep ends

    @property
    def child_tags(self) -> dict[str, str]:
        """What marks a run as part of this sweep."""
        return {PARENT_TAG: self.run_id, **_study_tags(self._study)}

    def store(self, paths: Sequence[Path]) -> None:
        """Store files, or whole folders, with the sweep."""
        self._tracker.artifacts(paths)

    def finish(self) -> None:
        """Nothing more comes."""
        self._tracker.finish("FINISHED")

    def abandon(self, reason: BaseException) -> None:
        """The sweep ends before its end; the same command goes on in this run."""
        with suppress(UserError):  # the store itself may be what failed
            status = "KILLED" if isinstance(reason, KeyboardInterrupt) else "FAILED"
            self._tracker.finish_children(status)  # its trials are gone, without a word
            self._tracker.finish(status)

    def close(self, study: Study, outcomes: Sequence[CellOutcome], failures: Mapping[str, str]) -> None:
        """Adopt the runs that other sweeps have computed, and store the tables."""
        outcomes = [outcome._replace(runs=self._adopted(outcome)) for outcome in outcomes]
        table, protocol = rows(outcomes, study), protocol_of(outcomes, study)
        best = render(table, markdown=True) if table else ""
        paths = []
        for name, text in (
            ("runs.csv", _runs_csv(outcomes)),
            ("best.md", f"{best}\n\n{protocol[0].upper()}{protocol[1:]}.\n" if table and protocol else best),
        ):
            paths.append(self._folder / name)
            write_atomically(paths[-1], text.encode())
        self._tracker.artifacts(paths)
        ended = sum(len(outcome.runs) for outcome in outcomes)
        means = [one.tried.mean for one in best_of(outcomes) if len(one.values) == len(one.cell.seeds)]
        numbers = {"runs": float(ended), "failures": float(len(failures))}
        self._tracker.log_rounds(
            [
                (
                    0,
                    numbers
                    | (
                        {f"best_{study.metric}": max(means, key=lambda mean: sign(study.metric) * mean)}
                        if means
                        else {}
                    ),
                )
            ]
        )
        self._tracker.finish("FINISHED" if not failures else "FAILED")
        if not self._tracker.flush():
            activity.warn("the MLflow server lacks the tables of this sweep; the same command sends them")

    def _adopted(self, outcome: CellOutcome) -> list[tuple[RunConfig, Result]]:
        """The runs of a cell, as the present store knows them."""
        runs = []
        for config, result in outcome.runs:
            whole = run_folder.latest(config, self._out) or result  # also what lies beyond this study's rule
            known = adopt(self._out, whole, {**self.child_tags, **purpose_tags(outcome.cell)})
            runs.append((config, replace(result, run_id=known.run_id)))
        return runs


def open_sweep(study: Study | Picture, out: Path, folder: Path) -> SweepRecord:
    """The parent run; opening it also creates the store's tables, once, before many processes write to them."""
    return SweepRecord(study, out, folder)


def purpose_tags(cell: Cell) -> dict[str, str]:
    """What marks runs that only confirm a choice, so that nobody chooses by them."""
    return {"purpose": "confirm"} if cell.confirms else {}


def _study_tags(study: Study | Picture) -> dict[str, str]:
    # A run may belong to several studies, so each has a tag of its own name.
    return {f"study.{study.name}": study.scale or "all", "study": study.name}


def _runs_csv(outcomes: Sequence[CellOutcome]) -> str:
    """One line per run: case, whether it chose or confirmed, settings, how it ended, the metrics of its last round."""
    lines: list[dict[str, Any]] = []
    for outcome in outcomes:
        for config, result in outcome.runs:
            ending = {"status": result.status, "round": len(result.history), "run_id": result.run_id}
            purpose = "confirm" if outcome.cell.confirms else "choose"
            lines.append({"case": outcome.cell.case, "purpose": purpose, **config.flat(), **ending, **result.final})
    columns = list(dict.fromkeys(key for line in lines for key in line))
    return spreadsheet.lines(lines, columns)
