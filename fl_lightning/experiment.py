"""One run from its configuration to its results: consumes the federated loop, measures, saves, tracks, resumes."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.config import RunConfig
from fl_lightning.data import strata
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.feature_skew import skew
from fl_lightning.data.partition import class_counts, divide, held_out, kept_classes, subset_indices, validating
from fl_lightning.data.shares import sizes_of
from fl_lightning.engines.engine import Engine
from fl_lightning.errors import Diverged, UserError
from fl_lightning.loop import Judge, federate, initial
from fl_lightning.method import task_of
from fl_lightning.probes import ridge
from fl_lightning.probes.accuracy import ClientJudge, measure
from fl_lightning.probes.reference import Reference
from fl_lightning.record import Measurement, RoundRecord, Snapshot
from fl_lightning.runs import checkpoint, final_round, model_file
from fl_lightning.runs.final_round import Situation
from fl_lightning.runs.folder import Result, clear, finished, folder_of, locked
from fl_lightning.runs.identity import identity
from fl_lightning.runs.recording import Recording, open_recording, retag, send_rest
from fl_lightning.runs.resume import saved_rounds
from fl_lightning.runs.saved import load_reference, start_from
from fl_lightning.task import Task, Weights
from fl_lightning.uncertainty.posterior import Member
from fl_lightning.workers.crew import Crew, hired

# Called after every round with the number of the round and what was measured; also, first, for the rounds of an
# earlier session that are not computed again.
Watch = Callable[[int, Measurement], None]


# The rounds of a run as they become known, and at the end how it ended.
Progress = Generator[tuple[int, Measurement], None, "Result"]


class Outputs(NamedTuple):
    """What stays of a run beside its numbers.

    Attributes:
        tags: Further tags of the MLflow run.
        pictures: Whether to draw its curves and its partition; with thousands of runs that costs more than the runs.
        checkpoint: Whether the server's state stays on disk when the run has finished.
        model: Whether the final model is kept as a state dict, in the folder and in MLflow.
    """

    tags: Mapping[str, str] = MappingProxyType({})
    pictures: bool = True
    checkpoint: bool = True
    model: bool = False


class Problem(NamedTuple):
    """A configuration made real: data, who has which of it, and the model that the settings name."""

    dataset: Dataset
    clients: Sequence[Tensor]
    holdout: Tensor
    task: Task


def build(config: RunConfig) -> Problem:
    """Load the data, split it, and make the model."""
    torch.set_num_threads(config.compute.threads)
    dataset = config.source.load()
    strata.check(dataset, config.split)
    clients = divide(dataset.strata, config.split, config.seed, dataset.owners)
    holdout = held_out(dataset.strata, config.split, config.seed)
    dataset = skew(dataset, clients, config.split, config.seed)
    if config.split.validation > 0:
        dataset = replace(dataset, validation=validating(dataset.strata, config.split, config.seed))
    if config.split.drop_classes:
        kept = kept_classes(dataset.test_y, config.split)
        dataset = dataset.tested_on(kept)
    if config.split.test_subset < 1:
        dataset = dataset.tested_on(subset_indices(dataset.test_strata, config.split.test_subset))
    task = config.model.build(dataset, config.seed, config.compute)
    if config.federation.start is not None:
        start_from(config.federation.start, config.method, task)
    return Problem(dataset, clients, holdout, task)


def run(
    config: RunConfig,
    out: Path | str = "runs",
    fresh: bool = False,
    watch: Watch | None = None,
    tags: Mapping[str, str] = MappingProxyType({}),
    workers: Crew = 1,
) -> Result:
    """Run a configuration, or go on where an earlier process stopped; a finished run is only read.

    Args:
        config: The settings.
        out: Folder of all runs and of the MLflow store.
        fresh: Forget what an earlier process has done for this configuration.
        watch: Told of every round.
        tags: Further tags of the MLflow run; `case` is what tables and figures call it.
        workers: How many processes train the clients, or `Workers` with more to say; no number depends on it.

    Returns:
        How it ended; all numbers are in its folder and in MLflow.
    """
    result = finish(rounds(config, Path(out), fresh, Outputs(tags, model=True), workers=workers), watch)
    return retag(config, Path(out), result, tags) if result.reused else result


def finish(progress: Progress, watch: Watch | None = None) -> Result:
    """Take a run to its end."""
    while True:
        try:
            number, measurement = next(progress)
            try:
                if watch is not None:
                    watch(number, measurement)
            except BaseException as reason:
                progress.throw(reason)  # so that the run is recorded as what it is: interrupted, or failed
        except StopIteration as end:
            result: Result = end.value
            return result


def rounds(
    config: RunConfig,
    out: Path,
    fresh: bool = False,
    outputs: Outputs | None = None,
    problem: Problem | None = None,
    records: Iterator[RoundRecord] | None = None,
    workers: Crew = 1,
) -> Progress:
    """A run, round by round: whoever asks for the next round decides whether there is one.

    Args:
        config: The settings.
        out: Folder of all runs and of the MLflow store.
        fresh: Forget what an earlier process has done for this configuration.
        outputs: What stays of it beside its numbers.
        problem: The configuration made real, if somebody has done that already.
        records: Its rounds, if they come from elsewhere.
        workers: Who trains the clients; no number depends on it.

    Yields:
        The number of the round and what was measured; also, first, for rounds that an earlier process has computed.

    Returns:
        How it ended. Closed before its end, it is recorded as stopped, and can be resumed.
    """
    folder = folder_of(config, out)
    result = None if fresh else finished(config, out)
    if result is not None and not result.unsent:  # only read: its folder may be one that nobody can write to
        yield from enumerate(result.history, start=1)
        return result
    with locked(folder):
        if fresh:
            clear(folder, keep=("lock",))
        result = finished(config, out)
        if result is not None:
            yield from enumerate(result.history, start=1)
            return send_rest(out, result) if result.unsent else result
        return (yield from _compute(config, out, outputs or Outputs(), fresh, problem, records, workers))


def check(config: RunConfig) -> None:
    """Raise `UserError` if the configuration cannot run: data missing, settings that do not go together."""
    problem = build(config)
    _measuring(config, problem, Path(), _reference(config, problem))
    _records(config, problem, None, config.engine)


def _records(
    config: RunConfig, problem: Problem, saved: Snapshot | None, engine: Engine, judge: Judge | None = None
) -> Iterator[RoundRecord]:
    return federate(
        config.method,
        problem.task,
        problem.dataset,
        problem.clients,
        config.training,
        config.federation,
        engine,
        config.seed,
        problem.holdout,
        saved,
        judge=judge,
    )


def _reference(config: RunConfig, problem: Problem) -> Reference | None:
    return load_reference(config.probe, task_of(config.method, problem.task), problem.dataset, problem.clients)


def _measuring(
    config: RunConfig, problem: Problem, folder: Path, posterior: Reference | None, pictures: bool = False
) -> Callable[[RoundRecord], Measurement]:
    """What measures a round: AE, LF, the ridge and the posterior included, where asked for; refuses what cannot be."""
    ridge.check(config.probe, config.federation, sizes_of(problem.clients))

    problem = problem._replace(task=task_of(config.method, problem.task))
    final_round.check(config, _situation(problem, problem.task.initial, ()))

    def measured(record: RoundRecord) -> Measurement:
        if record.round in config.probe.ridge_rounds:
            ridge.write(folder, ridge.measure(config.method, problem.task, problem.dataset, record))
        found = measure(config.method, problem.task, problem.dataset, record, posterior)
        if config.uncertainty.final_round and record.round == config.federation.rounds:
            weights = Weights(record.after.state.params, record.after.buffers)
            members = _members(config, record) if "ensemble" in config.uncertainty.predictive else ()
            found.metrics.update(final_round.conclude(config, _situation(problem, weights, members), folder, pictures))
        return found

    return measured


def _situation(problem: Problem, weights: Weights, members: Sequence[Member]) -> Situation:
    return Situation(problem.task, problem.dataset, problem.clients, problem.holdout, weights, members)


def _members(config: RunConfig, record: RoundRecord) -> list[Member]:
    """The method's own ensemble, or the clients' models by their weights."""
    own = config.method.ensemble(record.before.state, record.cohort, record.reports)
    if own:
        return [Member(Weights(params, record.after.buffers), 1 / len(own)) for params in own]
    models = [Weights(result.local.params, result.local.buffers) for result in record.clients]
    return [Member(weights, share) for weights, share in zip(models, record.cohort.weights, strict=True)]


def _compute(
    config: RunConfig,
    out: Path,
    outputs: Outputs,
    fresh: bool,
    problem: Problem | None,
    records: Iterator[RoundRecord] | None,
    workers: Crew,
) -> Progress:
    problem = problem or build(config)
    task = task_of(config.method, problem.task)
    start = initial(config.method, task, len(problem.clients), problem.dataset)
    saved = saved_rounds(config, out, start, fresh)
    history = list(saved.history) if saved else []
    posterior = _reference(config, problem)
    measured = _measuring(config, problem, folder_of(config, out), posterior, outputs.pictures)
    left = 0 if records is not None else config.federation.rounds - len(history)
    with hired(config.engine, workers, left, config.compute.threads) as engine:
        if len(history) == config.federation.rounds:
            records = iter(())
        elif records is None:  # settings are refused here, before anything is written
            # Several models are measured faster at once, unless workers share them.
            judge = None if engine is config.engine else ClientJudge(task, posterior)
            records = _records(config, problem, saved.snapshot if saved else None, engine, judge)
        return (yield from _record(config, out, outputs, problem, history, records, measured))


def _record(
    config: RunConfig,
    out: Path,
    outputs: Outputs,
    problem: Problem,
    history: list[Measurement],
    records: Iterator[RoundRecord],
    measured: Callable[[RoundRecord], Measurement],
) -> Progress:
    """Measure the rounds that are left, and write them down."""
    folder, key = folder_of(config, out), identity(config)
    recording = open_recording(config, out, folder, problem.clients, history, outputs.tags)
    status, message = "finished", ""
    try:
        yield from enumerate(history, start=1)
        try:
            for record in records:
                history.append(measured(record))
                if outputs.model and record.round == config.federation.rounds:
                    final = Weights(record.after.state.params, record.after.buffers)
                    model_file.write(folder, task_of(config.method, problem.task), final)
                # First the checkpoint, then MLflow: a round that is lost between the two is sent again on resume.
                if outputs.checkpoint or record.round < config.federation.rounds:
                    checkpoint.write(folder, key, record.after, history)
                    recording.saved = len(history)
                recording.send_now_and_then()
                yield record.round, history[-1]
                del record  # the models of all its clients
        except Diverged as divergence:
            status, message = "diverged", str(divergence)
            recording.tracker.tag("diverged", f"round {divergence.round}, client {divergence.client}")
        return _finish(config, problem, outputs, recording, recording.result(status, message, folder))
    except BaseException as reason:
        _break_off(recording, reason, folder)
        raise


def _finish(config: RunConfig, problem: Problem, outputs: Outputs, recording: Recording, result: Result) -> Result:
    """Write down that a run has ended: tables and pictures, the result, which makes it finished, and last MLflow."""
    from fl_lightning.runs import files  # pandas and matplotlib: only who runs waits for them

    counts = class_counts(problem.dataset.strata, problem.clients, problem.dataset.num_strata)
    files.write(config, counts, result.history, result.folder, outputs.pictures)
    result = recording.conclude(result)
    checkpoint.remove(result.folder, current=not outputs.checkpoint)
    return result


def _break_off(recording: Recording, reason: BaseException, folder: Path) -> None:
    """Write down that a run was left before its end; the same command goes on with it."""
    with suppress(UserError):  # the store itself may be what failed
        if isinstance(reason, GeneratorExit):
            recording.conclude(recording.result("stopped", "", folder))
        else:
            recording.send()
            recording.tracker.finish("KILLED" if isinstance(reason, KeyboardInterrupt) else "FAILED")
