"""A run while it is computed: every round goes to its folder first, then to MLflow."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self

from fl_lightning.client_state import Snapshot
from fl_lightning.data.shares import class_counts
from fl_lightning.engines.parallel.executor import Executor
from fl_lightning.errors import Diverged, UserError
from fl_lightning.loop import Problem
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.metrics.metric import Measurement
from fl_lightning.runs import checkpoint, rounds_file
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.folder import (
    STOPPED_TAG,
    Result,
    artifacts_of,
    attempt_of,
    folder_of,
    mark_failed,
    up_to,
    write_result,
)
from fl_lightning.runs.tracking.description import description_of
from fl_lightning.runs.tracking.live_copy import LiveCopy
from fl_lightning.runs.tracking.sync import Account, recall_attempt, warn_of_rest


class RunOptions(NamedTuple):
    """How a run is carried out, and what stays of it beside its numbers; no number depends on it.

    Attributes:
        tags: Further tags of the MLflow run.
        pictures: Whether to draw its curves and its partition; with thousands of runs that costs more than the runs.
        checkpoint: Whether the server's state stays on disk when the run has finished.
        model: Whether the final model is kept as a state dict, in the folder and in MLflow.
        fresh: Forget what an earlier process has done for this configuration.
        workers: The executor.
        stop: When it need not go on. With another rule, or none, the run goes on where this one has stopped.
    """

    tags: Mapping[str, str] = MappingProxyType({})
    pictures: bool = True
    checkpoint: bool = True
    model: bool = False
    fresh: bool = False
    workers: Executor = 1
    stop: Stop | None = None


class OpenRun:
    """The folder and the MLflow run of a run that this process computes; its lock is held.

    Left by an exception, the run is recorded as failed or interrupted, left by `close` of the generator as stopped; in
    either case the same command goes on with it.

    Args:
        config: The run.
        out: Folder of all runs.
        options: What stays of it.
        problem: Its data and model.
        history: The measurements of all rounds, which the caller extends; those that are there already are on disk.
    """

    def __init__(
        self, config: RunConfig, out: Path, options: RunOptions, problem: Problem, history: list[Measurement]
    ) -> None:
        self.folder, self.history = folder_of(config, out), history
        self._config, self._options, self._problem = config, options, problem
        self._name, self._tags, self._params = description_of(config, self.folder, problem.clients, options.tags)
        self._identity, self._saved = self._tags["identity"], len(history)
        self._status, self._message = "finished", ""
        attempt = attempt_of(
            self.folder,
            self._identity,
            lambda: recall_attempt(out, self.folder, self._identity),
            {"name": self._name, "params": self._params, "tags": self._tags},
        )
        self._attempt = attempt.key
        rounds_file.begin(self.folder, self._identity, history)
        self._mlflow = LiveCopy(out, self._account(), attempt.is_new)

    def save(self, after: Snapshot, with_state: bool) -> None:
        """Save a round that was just measured: its numbers, its checkpoint, then MLflow.

        A round that is lost between the two is sent again when the run goes on. Without a checkpoint MLflow learns of
        the round at the end: computed again it would have other seconds.
        """
        if with_state:
            rounds_file.append(self.folder, self._identity, len(self.history), self.history[-1])
            checkpoint.write(self.folder, self._identity, after)
            self._saved = len(self.history)
        self._mlflow.update(self._account())

    def diverge(self, divergence: Diverged) -> None:
        """Record that this was the last round."""
        self._status, self._message = "diverged", str(divergence)
        self._tags["diverged"] = f"round {divergence.round}, client {divergence.client}"

    def finish(self) -> None:
        """Write down that the run has ended: tables and pictures, the result, which makes it finished, and MLflow."""
        from fl_lightning.runs import files  # pandas and matplotlib: only runs wait for them

        rounds, stop = self._config.federation.rounds, self._options.stop
        cut = None if stop is None or len(self.history) == rounds else up_to(self._result(), stop, rounds)
        if cut is not None:
            self._status, self._message = cut.status, cut.message
            self._tags[STOPPED_TAG] = f"round {len(cut.history)}: {cut.message}"
        dataset = self._problem.dataset
        counts = class_counts(dataset.strata, self._problem.clients, dataset.num_strata)
        files.write(self._config, counts, self.history, self.folder, self._options.pictures)
        self._conclude("FINISHED")
        # A run that a rule has stopped can go on without it.
        checkpoint.remove(self.folder, current=not self._options.checkpoint and self._status != "stopped")
        if self._status != "stopped":
            rounds_file.remove_copies(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, reason: BaseException | None, trace: TracebackType | None
    ) -> None:
        if reason is None:
            return
        if not isinstance(reason, GeneratorExit | KeyboardInterrupt):
            mark_failed(self.folder)
        with suppress(UserError):  # the store itself may be what failed
            if isinstance(reason, GeneratorExit):
                self._status, self._message = "stopped", ""
                self._conclude("KILLED")
            else:
                self._mlflow.close(self._account("KILLED" if isinstance(reason, KeyboardInterrupt) else "FAILED"))

    def _conclude(self, status: str) -> None:
        """Save how the run ended, then update MLflow: whatever happens between the two, nothing is computed again."""
        result = self._result()
        rounds_file.write(self.folder, self._identity, self.history)
        write_result(result)
        self._saved = len(self.history)
        ended = self._account(status, artifacts_of(self.folder))
        done = self._mlflow.close(ended._replace(tags={**ended.tags, "status": self._status}))
        result = replace(result, run_id=self._mlflow.run_id, unsent=not done)
        write_result(result)
        if not done:
            warn_of_rest(result)

    def _account(self, status: str = "RUNNING", files: Sequence[Path] = ()) -> Account:
        rounds = [measurement.metrics for measurement in self.history[: self._saved]]
        return Account(self._attempt, self._name, self._params, dict(self._tags), rounds, files=files, status=status)

    def _result(self) -> Result:
        return Result(
            status=self._status,
            message=self._message,
            run_id=self._mlflow.run_id,
            folder=self.folder,
            history=list(self.history),
            tags=dict(self._tags),
            store=self._mlflow.uri,
            identity=self._identity,
            name=self._name,
            params=self._params,
            unsent=True,
        )
