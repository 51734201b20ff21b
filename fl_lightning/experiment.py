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
from fl_lightning.data.own_tests import own_tests
from fl_lightning.data.partition import counted, divide, held_out, kept_classes, subset_indices, validating
from fl_lightning.data.shares import class_counts, sizes_of
from fl_lightning.engines.engine import Engine
from fl_lightning.errors import Diverged, UserError, require
from fl_lightning.loop import Judge, federate, initial
from fl_lightning.method import task_of
from fl_lightning.probes import ridge
from fl_lightning.probes.accuracy import ClientJudge, measure, own_metrics_of
from fl_lightning.probes.reference import Reference
from fl_lightning.record import Measurement, RoundRecord, Snapshot
from fl_lightning.runs import checkpoint, final_round, model_file
from fl_lightning.runs.final_round import Situation
from fl_lightning.runs.folder import Result, clear, ended, folder_of, latest, locked, up_to
from fl_lightning.runs.identity import identity
from fl_lightning.runs.recording import STOPPED_TAG, Recording, open_recording, retag, send_rest
from fl_lightning.runs.resume import saved_rounds
from fl_lightning.runs.saved import load_reference, start_from
from fl_lightning.stopping import Stop
from fl_lightning.task import Task, Weights
from fl_lightning.uncertainty.posterior import Member
from fl_lightning.workers.crew import Crew, Workers, hired

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
    dataset = skew(dataset, clients, counted(config.split, dataset.owners), config.seed)
    if config.split.client_test > 0:
        clients, tests = own_tests(dataset.strata, clients, config.split.client_test, config.seed)
        dataset = replace(dataset, client_tests=tests)
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
    stop: Stop | None = None,
) -> Result:
    """Run a configuration, or go on where an earlier process stopped; a finished run is only read.

    Args:
        config: The settings.
        out: Folder of all runs and of the MLflow store.
        fresh: Forget what an earlier process has done for this configuration.
        watch: Told of every round.
        tags: Further tags of the MLflow run; `case` is what tables and figures call it.
        workers: How many processes train the clients, or `Workers` with more to say; no number depends on it.
        stop: When it need not go on; no number of any round depends on it.

    Returns:
        How it ended; all numbers are in its folder and in MLflow.
    """
    out = Path(out)
    result = finish(rounds(config, out, fresh, Outputs(tags, model=True), workers=workers, stop=stop), watch)
    if not result.reused:
        return result
    told = retag(config, out, latest(config, out) or result, tags)  # also what lies beyond the rule
    return replace(told, status=result.status, message=result.message, history=result.history)


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
    stop: Stop | None = None,
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
        stop: When it need not go on. Whoever has another rule, or none, goes on where this one has stopped.

    Yields:
        The number of the round and what was measured; also, first, for rounds that an earlier process has computed.

    Returns:
        How it ended. Closed before its end, it is recorded as stopped, and can be resumed.
    """
    folder = folder_of(config, out)
    result = None if fresh else ended(config, out, stop)
    if result is not None and not result.unsent:  # only read: its folder may be one that nobody can write to
        yield from enumerate(result.history, start=1)
        return result
    with locked(folder):
        if fresh:
            clear(folder, keep=("lock",))
        result = ended(config, out, stop)
        if result is not None:
            yield from enumerate(result.history, start=1)
            if result.unsent:  # also what lies beyond the rule
                told = send_rest(out, latest(config, out) or result)
                return replace(told, status=result.status, message=result.message, history=result.history)
            return result
        return (yield from _compute(config, out, outputs or Outputs(), fresh, problem, records, workers, stop))


def check(config: RunConfig) -> None:
    """Raise `UserError` if the configuration cannot run: data missing, settings that do not go together."""
    problem = build(config)
    _measuring(config, problem, Path(), _reference(config, problem))
    own_metrics_of(task_of(config.method, problem.task), problem.dataset)
    _concluding(config, problem, Path(), False)
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
    config: RunConfig, problem: Problem, folder: Path, posterior: Reference | None
) -> Callable[[RoundRecord], Measurement]:
    """What measures a round: AE, LF and the ridge included, where asked for; refuses what cannot be."""
    ridge.check(config.probe, config.federation, sizes_of(problem.clients))
    task = task_of(config.method, problem.task)

    def measured(record: RoundRecord) -> Measurement:
        if record.round in config.probe.ridge_rounds:
            ridge.write(folder, ridge.measure(config.method, task, problem.dataset, record))
        rounds = config.federation.rounds
        return measure(config.method, task, problem.dataset, record, posterior, config.evaluation, rounds)

    return measured


def _concluding(
    config: RunConfig, problem: Problem, folder: Path, pictures: bool
) -> Callable[[RoundRecord], dict[str, float]]:
    """What is measured of the last round alone: the posterior, where asked for; refuses what cannot be."""
    problem = problem._replace(task=task_of(config.method, problem.task))
    if config.uncertainty.final_round:
        blank = initial(config.method, problem.task, len(problem.clients), problem.dataset)
        final_round.check(config, _situation(config, problem, blank, ()))

    def concluded(record: RoundRecord) -> dict[str, float]:
        if not config.uncertainty.final_round:
            return {}
        members = _members(config, record) if "ensemble" in config.uncertainty.predictive else ()
        return final_round.conclude(config, _situation(config, problem, record.after, members), folder, pictures)

    return concluded


def _situation(config: RunConfig, problem: Problem, now: Snapshot, members: Sequence[Member]) -> Situation:
    own = None
    if config.uncertainty.source != "final_round":
        own = final_round.kept_by_method(config, now, problem.clients)
    weights = Weights(now.state.params, now.buffers)
    return Situation(problem.task, problem.dataset, problem.clients, problem.holdout, weights, members, own)


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
    stop: Stop | None,
) -> Progress:
    problem = problem or build(config)
    task = task_of(config.method, problem.task)
    start = initial(config.method, task, len(problem.clients), problem.dataset)
    saved = saved_rounds(config, out, start, fresh, own_metrics_of(task, problem.dataset))
    history = list(saved.history) if saved else []
    posterior = _reference(config, problem)
    measured = _measuring(config, problem, folder_of(config, out), posterior)
    concluded = _concluding(config, problem, folder_of(config, out), outputs.pictures)
    is_enough = len(history) == config.federation.rounds or _enough(stop, history) is not None
    left = 0 if records is not None or is_enough else config.federation.rounds - len(history)
    if not is_enough:  # the numbers of a final round stand in none that others follow
        history = [one._replace(metrics=final_round.without(one.metrics)) for one in history]
    require(
        config.compute.device != "cpu" or not isinstance(workers, Workers) or not workers.resources.gpu,
        "compute.device is cpu, but workers are to have GPUs; leave out --resources.gpu, or --compute.device",
    )
    with hired(config.engine, workers, left, config.compute.threads) as engine:
        if is_enough:
            records = iter(())
        elif records is None:  # settings are refused here, before anything is written
            # Several models are measured faster at once, unless workers share them.
            rounds = config.federation.rounds
            judge = None if engine is config.engine else ClientJudge(task, posterior, config.evaluation, rounds)
            records = _records(config, problem, saved.snapshot if saved else None, engine, judge)
        return (yield from _record(config, out, outputs, problem, history, records, measured, concluded, stop))


def _record(
    config: RunConfig,
    out: Path,
    outputs: Outputs,
    problem: Problem,
    history: list[Measurement],
    records: Iterator[RoundRecord],
    measured: Callable[[RoundRecord], Measurement],
    concluded: Callable[[RoundRecord], dict[str, float]],
    stop: Stop | None,
) -> Progress:
    """Measure the rounds that are left, and write them down."""
    folder, key = folder_of(config, out), identity(config)
    recording = open_recording(config, out, folder, problem.clients, history, outputs.tags)
    status, message = "finished", ""
    try:
        yield from enumerate(history[: _enough(stop, history)], start=1)
        try:
            for record in records:
                history.append(measured(record))
                is_enough = stop is not None and stop.reached(_values(stop, history))
                is_last = is_enough or record.round == config.federation.rounds
                if is_last:
                    history[-1].metrics.update(concluded(record))
                if outputs.model and is_last:
                    final = Weights(record.after.state.params, record.after.buffers)
                    model_file.write(folder, task_of(config.method, problem.task), final)
                # First the checkpoint, then MLflow: a round that is lost between the two is sent again on resume.
                if outputs.checkpoint or record.round < config.federation.rounds:
                    checkpoint.write(folder, key, record.after, history)
                    recording.saved = len(history)
                recording.send_now_and_then()
                yield record.round, history[-1]
                del record  # the models of all its clients
                if is_enough:
                    break
        except Diverged as divergence:
            status, message = "diverged", str(divergence)
            recording.tracker.tag("diverged", f"round {divergence.round}, client {divergence.client}")
        result = recording.result(status, message, folder)
        rounds = config.federation.rounds
        cut = up_to(result, stop, rounds) if stop is not None else None
        if cut is not None and len(history) < rounds:
            result = replace(result, status=cut.status, message=cut.message)
            recording.tracker.tag(STOPPED_TAG, f"round {len(cut.history)}: {cut.message}")
        result = _finish(config, problem, outputs, recording, result)
        if cut is None:
            return result
        return replace(result, status=cut.status, message=cut.message, history=cut.history)
    except BaseException as reason:
        _break_off(recording, reason, folder)
        raise


def _finish(config: RunConfig, problem: Problem, outputs: Outputs, recording: Recording, result: Result) -> Result:
    """Write down that a run has ended: tables and pictures, the result, which makes it finished, and last MLflow."""
    from fl_lightning.runs import files  # pandas and matplotlib: only who runs waits for them

    counts = class_counts(problem.dataset.strata, problem.clients, problem.dataset.num_strata)
    files.write(config, counts, result.history, result.folder, outputs.pictures)
    result = recording.conclude(result)
    # A run that a rule has stopped can go on without it.
    checkpoint.remove(result.folder, current=not outputs.checkpoint and result.status != "stopped")
    return result


def _enough(stop: Stop | None, history: Sequence[Measurement]) -> int | None:
    """After how many of the rounds a rule has seen enough; None if not yet, or without one."""
    return None if stop is None else stop.enough(_values(stop, history))


def _values(stop: Stop, history: Sequence[Measurement]) -> list[float]:
    return stop.values([measurement.metrics for measurement in history])


def _break_off(recording: Recording, reason: BaseException, folder: Path) -> None:
    """Write down that a run was left before its end; the same command goes on with it."""
    with suppress(UserError):  # the store itself may be what failed
        if isinstance(reason, GeneratorExit):
            recording.conclude(recording.result("stopped", "", folder))
        else:
            recording.send()
            recording.tracker.finish("KILLED" if isinstance(reason, KeyboardInterrupt) else "FAILED")
