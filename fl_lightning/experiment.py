"""One run from its configuration to its results: consumes the federated loop, measures, saves, tracks, resumes."""

import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning import checkpoint, probes, reference, ridge_probe
from fl_lightning.config import RunConfig
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.feature_skew import skew
from fl_lightning.data.partition import class_counts, content_hash, held_out, partition, subset_indices
from fl_lightning.errors import Diverged, UserError
from fl_lightning.federate import RoundRecord, Snapshot, federate, initial
from fl_lightning.probes import Measurement
from fl_lightning.run_folder import (
    ATTEMPT,
    Result,
    attempt_of,
    clear,
    finished,
    folder_of,
    locked,
    write_result,
)
from fl_lightning.task import Task
from fl_lightning.track import Tracker, store_uri

# A batch of metrics costs MLflow about the same for one round as for many.
SEND_EVERY_SECONDS = 1.0

# Called after every round with the number of the round and what was measured; also, first, for the rounds of an
# earlier session that are not computed again.
Watch = Callable[[int, Measurement], None]


# The rounds of a run as they become known, and at the end how it ended.
Progress = Generator[tuple[int, Measurement], None, "Result"]


class Keeping(NamedTuple):
    """What stays of a run beside its numbers.

    Attributes:
        tags: Further tags of the MLflow run.
        pictures: Whether to draw its curves and its partition; with thousands of runs that costs more than the runs.
        checkpoint: Whether the server's state stays on disk when the run has finished.
    """

    tags: Mapping[str, str] = MappingProxyType({})
    pictures: bool = True
    checkpoint: bool = True


class Problem(NamedTuple):
    """A configuration made real: data, who has which of it, and the model."""

    dataset: Dataset
    clients: list[Tensor]
    holdout: Tensor
    task: Task


def build(config: RunConfig) -> Problem:
    """Load the data, split it, and make the model."""
    torch.set_num_threads(config.compute.threads)
    dataset = config.source.load()
    clients = partition(dataset.train_y, config.split, config.seed, dataset.owners)
    holdout = held_out(dataset.train_y, config.split, config.seed)
    dataset = skew(dataset, clients, config.split, config.seed)
    if config.split.test_subset < 1:
        measured = subset_indices(dataset.test_y, config.split.test_subset)
        dataset = replace(dataset, test_x=dataset.test_x[measured], test_y=dataset.test_y[measured])
    task = config.model.build(dataset, config.seed, config.compute)
    if config.federation.start is not None:
        task.load(reference.saved_weights("federation.start", config.federation.start, task)[0])
        task.initial = task.weights()
    return Problem(dataset, clients, holdout, task)


def run(config: RunConfig, out: Path | str = "runs", fresh: bool = False, watch: Watch | None = None) -> Result:
    """Run a configuration, or go on where an earlier process stopped; a finished run is only read.

    Args:
        config: The settings.
        out: Folder of all runs and of the MLflow store.
        fresh: Forget what an earlier process has done for this configuration.
        watch: Told of every round.

    Returns:
        How it ended; all numbers are in its folder and in MLflow.
    """
    return finish(rounds(config, Path(out), fresh), watch)


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
    keeping: Keeping | None = None,
    problem: Problem | None = None,
    records: Iterator[RoundRecord] | None = None,
) -> Progress:
    """A run, round by round: whoever asks for the next round decides whether there is one.

    Args:
        config: The settings.
        out: Folder of all runs and of the MLflow store.
        fresh: Forget what an earlier process has done for this configuration.
        keeping: What stays of it beside its numbers.
        problem: The configuration made real, if somebody has done that already.
        records: Its rounds, if they come from elsewhere.

    Yields:
        The number of the round and what was measured; also, first, for rounds that an earlier process has computed.

    Returns:
        How it ended. Closed before its end, it is recorded as stopped, and can be resumed.
    """
    folder = folder_of(config, out)
    with locked(folder):
        if fresh:
            clear(folder, keep=("lock",))
        result = finished(config, out)
        if result is not None:
            yield from enumerate(result.history, start=1)
            return result
        return (yield from _compute(config, out, keeping or Keeping(), fresh, problem, records))


def adopt(config: RunConfig, out: Path, result: Result, tags: Mapping[str, str]) -> None:
    """Give a run further tags; if another store has it, tell the present one what is known of it."""
    same = result.store == store_uri(out)
    if same and tags.keys() <= result.tags.keys():
        return
    # In its own store it stays a child of the sweep that has computed it; another store does not know that one.
    tags = {**tags, **result.tags} if same else {**result.tags, **tags}
    tracker = Tracker(out, attempt_of(result.folder), _run_name(config, tags), config.flat(), tags)
    if tracker.run_id != result.run_id:
        tracker.log_rounds((i, m.metrics) for i, m in enumerate(result.history, start=1))
        tracker.tag("status", result.status)
    tracker.finish("FINISHED" if result.status != "stopped" else "KILLED")
    write_result(replace(result, run_id=tracker.run_id, tags=tags, store=store_uri(out)))


def check(config: RunConfig) -> None:
    """Raise `UserError` if the configuration cannot run: data missing, settings that do not go together."""
    problem = build(config)
    _probes(config, problem)
    _records(config, problem, None)


def _probes(config: RunConfig, problem: Problem) -> reference.Reference | None:
    """Check what is to be measured beside the usual; the reference of AE and LF, if there is one."""
    ridge_probe.check(config.probe, config.federation, [len(indices) for indices in problem.clients])
    return reference.load(config.probe, problem.task, problem.dataset, problem.clients)


def _records(config: RunConfig, problem: Problem, saved: Snapshot | None) -> Iterator[RoundRecord]:
    return federate(
        config.method,
        problem.task,
        problem.dataset,
        problem.clients,
        config.training,
        config.federation,
        config.engine,
        config.seed,
        problem.holdout,
        saved,
    )


def _compute(
    config: RunConfig,
    out: Path,
    keeping: Keeping,
    fresh: bool,
    problem: Problem | None,
    records: Iterator[RoundRecord] | None,
) -> Progress:
    from fl_lightning import files  # pandas and matplotlib: only who runs waits for them

    problem, identity = problem or build(config), config.identity  # own data are hashed for it, so only once
    task, folder = problem.task, folder_of(config, out)
    start = initial(config.method, task, len(problem.clients))
    saved = checkpoint.read(folder, identity, start)
    if saved is None and not fresh:
        saved = _from_relatives(config, out, start)
    history = list(saved.history) if saved else []
    status, message = "finished", ""
    if len(history) == config.federation.rounds:
        records = iter(())
    elif records is None:  # settings are refused here, before anything is written
        records = _records(config, problem, saved.snapshot if saved else None)
    posterior = _probes(config, problem)
    tracker = _open_tracker(config, out, folder, problem, keeping.tags)
    try:
        tracker.log_rounds((i, m.metrics) for i, m in enumerate(history, start=1))  # what a killed process left unsent
        yield from enumerate(history, start=1)
        unsent: list[tuple[int, dict[str, float]]] = []
        sent = time.monotonic()
        try:
            for record in records:
                history.append(probes.measure(config.method, task, problem.dataset, record, posterior))
                if record.round in config.probe.ridge_rounds:
                    ridge_probe.write(folder, ridge_probe.measure(config.method, task, problem.dataset, record))
                # First the checkpoint, then MLflow: a round that is lost between the two is sent again on resume.
                if keeping.checkpoint or record.round < config.federation.rounds:
                    checkpoint.write(folder, identity, record.after, history)
                unsent.append((record.round, history[-1].metrics))
                if time.monotonic() - sent > SEND_EVERY_SECONDS:
                    tracker.log_rounds(unsent)
                    unsent, sent = [], time.monotonic()
                yield record.round, history[-1]
                del record  # the models of all its clients
        except Diverged as divergence:
            status, message = "diverged", str(divergence)
            tracker.tag("diverged", f"round {divergence.round}, client {divergence.client}")
        tracker.log_rounds(unsent)
        result = Result(status, message, tracker.run_id, folder, history, False, tracker.tags, tracker.uri)
        counts = class_counts(problem.dataset.train_y, problem.clients, problem.dataset.num_classes)
        written = files.write(config, counts, history, folder, keeping.pictures)
        tracker.artifacts([*written, *(path for path in [folder / ridge_probe.FILE] if path.exists())])
        tracker.tag("status", status)
        tracker.finish("FINISHED")
        write_result(result)
        checkpoint.remove(folder, current=not keeping.checkpoint)
        return result
    except BaseException as reason:
        with suppress(UserError):  # the store itself may be what failed
            tracker.log_rounds((i, m.metrics) for i, m in enumerate(history, start=1))
            if isinstance(reason, GeneratorExit):
                tracker.tag("status", "stopped")
                stopped = Result("stopped", "", tracker.run_id, folder, history, False, tracker.tags, tracker.uri)
                write_result(stopped)
            tracker.finish("KILLED" if isinstance(reason, KeyboardInterrupt | GeneratorExit) else "FAILED")
        raise


def _from_relatives(config: RunConfig, out: Path, start: Snapshot) -> checkpoint.Saved | None:
    """The rounds that a run has computed which differs from this one only in how many rounds it takes."""
    rounds = config.federation.rounds
    if rounds == 1:
        return None  # grids have them by the ten thousand, and listing the folder of all runs costs more than a round
    base = folder_of(config, out).name.removesuffix(f"{rounds}r")
    numbers = [folder.name.removeprefix(base).removesuffix("r") for folder in out.glob(f"{base}*r")]
    for number in sorted((int(number) for number in numbers if number.isdigit()), reverse=True):
        relative = replace(config, federation=replace(config.federation, rounds=number))
        with suppress(UserError):  # a damaged one is of no use here
            arrays = ridge_probe.read(folder_of(relative, out))
            if arrays:
                ridge_probe.write(folder_of(config, out), arrays)
            if number < rounds and (saved := checkpoint.read(folder_of(relative, out), relative.identity, start)):
                return saved
            if number > rounds and (result := finished(relative, out)) and len(result.history) >= rounds:
                return checkpoint.Saved(start, result.history[:rounds])
    return None


def _open_tracker(config: RunConfig, out: Path, folder: Path, problem: Problem, further: Mapping[str, str]) -> Tracker:
    flat, names = config.flat(), config.names
    split_hash = content_hash(problem.clients)
    tags = {
        "method": names["method"],
        "data": names["data"],
        "model": names["model"],
        "partition": split_hash,
        "seed": str(config.seed),
        "identity": config.identity,
        "trajectory": config.trajectory,
        **further,
    }
    if commit := _git_commit():
        tags["mlflow.source.git.commit"] = commit
    is_new = not (folder / ATTEMPT).exists()
    return Tracker(out, attempt_of(folder), _run_name(config, tags), flat, tags, is_new)


def _run_name(config: RunConfig, tags: Mapping[str, str]) -> str:
    """What the UI shows; the seed comes early, because long names are cut off."""
    names = config.names
    return f"{tags.get('case', names['method'])} seed={config.seed} {names['data']} alpha={config.split.alpha:g}"


def _git_commit() -> str | None:
    """The commit of the source, if the package lies in a git repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
