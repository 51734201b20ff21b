"""What one trial computes: runs one after the other, or the seeds of one setting side by side.

Whatever an earlier process has finished is only read, and an interrupted run goes on after its last round: the files
of the runs are the truth, not what Ray remembers.
"""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fl_lightning import experiment
from fl_lightning.config import RunConfig
from fl_lightning.direction import sign
from fl_lightning.errors import UserError
from fl_lightning.experiment import Outputs, Progress
from fl_lightning.record import Measurement
from fl_lightning.runs.identity import identity
from fl_lightning.stopping import Stop
from fl_lightning.workers.crew import Crew
from tune.first_round import share_first_round
from tune.outcome import measured


class Instructions(NamedTuple):
    """What to do with the runs of a trial.

    Attributes:
        out: Folder of all runs.
        outputs: What stays of each run.
        tags: Of single runs, by their identity: what a run is called in tables and figures, and what it is for.
        stop: When a run need not go on.
        metric: What decides.
        workers: Who trains the clients of a run; no number depends on it.
    """

    out: Path
    outputs: Outputs
    tags: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    stop: Stop | None = None
    metric: str = "GA"
    workers: Crew = 1

    def outputs_of(self, config: RunConfig) -> Outputs:
        """What stays of this run; its MLflow run says which case it is."""
        return self.outputs._replace(tags={**self.outputs.tags, **self.tags.get(identity(config), {})})


class TrialStatus(NamedTuple):
    """What has happened in a trial so far.

    Attributes:
        finished: Runs that have ended.
        rounds: Rounds that are known; of seeds side by side, the latest.
        value: The metric of the latest round, times -1 if it is good if small.
        best: The largest such value at the end of a run.
        failures: Runs that could not be computed, with the reason.
    """

    finished: int = 0
    rounds: int = 0
    value: float = float("-inf")
    best: float = float("-inf")
    failures: Mapping[str, str] = {}


def one_after_the_other(
    units: Sequence[Sequence[RunConfig]], instructions: Instructions
) -> Generator[TrialStatus, None, None]:
    """Compute runs; those of a unit share their first round. A run that fails does not take others with it."""
    status, metric = TrialStatus(), instructions.metric
    way = sign(metric)
    for unit in units:
        for config, progress in _runs(unit, instructions):
            diverged = False
            try:
                for measurement in _until(instructions.stop, progress):
                    diverged = measurement is None
                    if measurement is not None:
                        value = way * measured(measurement.metrics, metric)
                        status = status._replace(rounds=status.rounds + 1, value=_newest(value, status.value))
                        yield status
                best = status.best if diverged else max(status.best, status.value)
                status = status._replace(finished=status.finished + 1, best=best)
            except Exception as error:  # a bug of a plugin, say: it is told at the end, and tried again next time
                status = _with_failure(status, config, error)
            yield status


def side_by_side(configs: Sequence[RunConfig], instructions: Instructions) -> Generator[TrialStatus, None, None]:
    """Compute the seeds of one setting in step, so that a scheduler can judge the mean after every round.

    A seed that has ended counts with its last value; one that has diverged makes the setting worth nothing. Until all
    have been measured once, the mean is NaN.
    """
    status, metric = TrialStatus(), instructions.metric
    way = sign(metric)
    runs = {identity(config): _until(instructions.stop, _run(config, instructions)) for config in configs}
    latest: dict[str, float] = {}
    while runs:
        going = False
        for config in [config for config in configs if identity(config) in runs]:
            try:
                for measurement in runs[identity(config)]:
                    key = identity(config)
                    value = -math.inf if measurement is None else way * measured(measurement.metrics, metric)
                    latest[key] = _newest(value, latest.get(key, math.nan))
                    going = True
                    break
                else:
                    del runs[identity(config)]
                    status = status._replace(finished=status.finished + 1)
            except Exception as error:
                yield _with_failure(status, config, error)
                return
        if going:
            status = status._replace(rounds=status.rounds + 1, value=sum(latest.values()) / len(latest))
            yield status
    yield status._replace(best=status.value)


def _runs(unit: Sequence[RunConfig], instructions: Instructions) -> Iterator[tuple[RunConfig, Progress]]:
    left = {identity(config): config for config in unit}
    if len(unit) > 1:
        with suppress(Exception):  # what breaks the shared training will break, alone, the run that it belongs to
            for config, progress in share_first_round(
                unit, instructions.out, outputs=instructions.outputs_of, workers=instructions.workers
            ):
                del left[identity(config)]
                yield config, progress
    for config in left.values():
        yield config, _run(config, instructions)


def _run(config: RunConfig, instructions: Instructions) -> Progress:
    outputs = instructions.outputs_of(config)
    return experiment.rounds(config, instructions.out, outputs=outputs, workers=instructions.workers)


def _until(stop: Stop | None, progress: Progress) -> Iterator[Measurement | None]:
    """The rounds of a run, until the study has seen enough of it; at the end None if it diverged."""
    seen: list[float] = []
    while True:
        try:
            _, measurement = next(progress)
        except StopIteration as end:
            if end.value.status == "diverged":
                yield None
            return
        yield measurement
        if stop is not None:
            seen.append(measured(measurement.metrics, stop.metric))
            if stop.reached(seen):
                progress.close()
                return


def _newest(value: float, before: float) -> float:
    """The value of a round; the one before it, where it was not measured."""
    return before if math.isnan(value) else value


def _with_failure(status: TrialStatus, config: RunConfig, error: Exception) -> TrialStatus:
    flat: dict[str, Any] = config.flat()
    name = f"{flat['method']} seed {flat['seed']} ({identity(config)})"
    reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return status._replace(finished=status.finished + 1, failures={**status.failures, name: reason})
