"""A study from its file to its results, on Ray Tune.

The files of the runs are the truth about what is done, so a sweep is resumed by starting it again: finished runs are
read, interrupted ones go on after their last round, the rest is computed.
"""

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fl_lightning.cluster.connection import Resources
from fl_lightning.config import RunConfig
from fl_lightning.errors import require
from fl_lightning.experiment import Outputs
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.folder import ended
from fl_lightning.runs.identity import identity
from fl_lightning.stopping import Stop
from fl_lightning.system import activity, memory
from fl_lightning.workers.crew import Crew, Workers, pool_of
from tune import record
from tune.cluster import connected
from tune.estimate import Estimate
from tune.follow_up import finals, follows_up
from tune.grid import Cell, cells, reference_cells
from tune.outcome import CellOutcome, outcome_of
from tune.packing import Unit, compact, packs, units
from tune.study import Study
from tune.work import Instructions, one_after_the_other

# Lost nodes and killed processes; a run's own failure is recorded and not tried again in the same sweep.
MAX_FAILURES = 10


class Options(NamedTuple):
    """How a sweep is carried out; none of it changes a number.

    Attributes:
        out: Folder of all runs and of the MLflow store.
        address: Of a Ray cluster; None starts a local one.
        resources: Of one trial, or of each worker of a trial.
        workers: In which a trial trains its clients; 1 is the trial itself, auto takes what too few trials leave free.
        max_concurrent: Trials at once, at most; 0 takes what the cluster holds.
        fresh: Compute again what earlier processes have computed.
        in_process: Compute one run after the other in this process, without Ray; grids only.
        pictures: Whether every run draws its curves and its partition.
    """

    out: Path
    address: str | None = None
    resources: Resources = Resources()
    max_concurrent: int = 0
    fresh: bool = False
    in_process: bool = False
    pictures: bool = False
    workers: int | Literal["auto"] = 1


class Status(NamedTuple):
    """How far a sweep is.

    Attributes:
        finished: Runs that have ended, those of earlier sweeps included.
        total: All runs.
        best: The largest value of the metric at the end of a run.
        rounds: Rounds that are known of the runs of this sweep; they tell of life where runs last for hours.
    """

    finished: int
    total: int
    best: float
    rounds: int = 0


Watch = Callable[[Status], None]


class Outcome(NamedTuple):
    """What a sweep has found.

    Attributes:
        cells: Every setting that was tried, with its runs.
        failures: Runs that could not be computed, with the reason.
        computed: Runs that were not there before.
        folder: Where tables lie.
        run_id: Of the parent run in MLflow.
    """

    cells: list[CellOutcome]
    failures: dict[str, str]
    computed: int
    folder: Path
    run_id: str


def sweep(study: Study, options: Options, watch: Watch) -> Outcome:
    """Compute what is missing of a study.

    Raises:
        UserError: If the study, the cluster or the store cannot be used; before anything is trained.
    """
    known = cells(study) if study.search.algorithm != "optuna" else None  # refuses settings that cannot be
    folder = options.out / "sweeps" / f"{study.name}-{study.scale or 'all'}-{study.identity}"
    activity.say("opening the store of runs")
    parent = record.open_sweep(study, options.out, folder)
    outputs = Outputs(parent.child_tags, pictures=options.pictures, checkpoint=_keeps(study), model=study.keep_models)
    instructions = Instructions(options.out, outputs, stop=study.stop, metric=study.metric)
    failures: dict[str, str] = {}
    try:
        with ExitStack() as stack:
            # Only when there is something to compute: starting a cluster takes seconds.
            place = functools.partial(connected, options.address, options.resources, options.out)
            slots = functools.cache(lambda: stack.enter_context(place()))
            runner = _Runner(study, options, instructions, folder / "ray", slots, watch, failures)
            if known is not None and study.reference is not None:
                found = runner.references(reference_cells(study))
                known = [replace(cell, references=found[cell.group[1]]) for cell in known]
            tried = runner.search() if known is None else runner.grid(known)
            if follows_up(study):
                tried = [*tried, *runner.grid(finals(study, tried, options.out))]
        outcomes = [outcome_of(cell, options.out, study) for cell in tried]
        parent.close(study, outcomes, failures)
    except BaseException as reason:
        parent.abandon(reason)
        raise
    return Outcome(outcomes, failures, runner.computed, folder, parent.run_id)


def local_slots(resources: Resources) -> int:
    """How many trials this machine holds at once, without asking Ray."""
    import torch

    fits = [os.cpu_count() or 1] if not resources.cpu else [int((os.cpu_count() or 1) / resources.cpu)]
    if resources.gpu:
        fits.append(int(torch.cuda.device_count() / resources.gpu))
    return max(1, min(fits))


def fitting(gigabytes: float) -> int:
    """How many runs of that size fit into the memory that is free on this machine; at least one is tried."""
    import torch

    free = memory.available(torch.device("cpu"))
    return max(1, int(free / (gigabytes * 1e9))) if gigabytes and free is not None else sys.maxsize


def missing(configs: Sequence[RunConfig], out: Path, stop: Stop | None) -> list[RunConfig]:
    """The runs that no earlier process has taken to their end."""
    return [config for config in configs if ended(config, out, stop) is None]


def _is_new(out: Path, fresh: bool, config: RunConfig) -> bool:
    if fresh:
        run_folder.forget(config, out)
    return run_folder.latest(config, out) is None


def _keeps(study: Study) -> bool:
    return study.keep_checkpoints or study.continue_to is not None


class _Runner:
    """Carries out the phases of a sweep on a cluster that is connected."""

    def __init__(
        self,
        study: Study,
        options: Options,
        instructions: Instructions,
        storage: Path,
        slots: Callable[[], int],
        watch: Watch,
        failures: dict[str, str],
    ) -> None:
        self._study, self._options, self._instructions, self._storage = study, options, instructions, storage
        self._cluster = slots
        self._watch, self._failures = watch, failures
        self.computed = 0

    @functools.cached_property
    def _slots(self) -> int:
        """Trials at once; asking for it connects to the cluster."""
        slots = min(self._room(), self._options.max_concurrent or sys.maxsize)
        return min(slots, fitting(self._study.memory)) if self._options.address is None else slots

    def _room(self) -> int:
        """How many trials the cluster holds at once, each with its workers."""
        workers = 1 if self._options.workers == "auto" else self._options.workers
        room = self._cluster()
        require(
            workers <= room,
            f"expected at most {room} workers in a trial, for so many there is room, got {workers}; lower --workers, "
            "--resources.cpu or --resources.gpu, or add a node",
        )
        return room // workers

    def _workers(self, trials: int) -> int:
        """Of each trial, if there are so many."""
        if self._options.workers != "auto":
            return self._options.workers
        number = max(1, self._cluster() // max(1, min(trials, self._slots)))
        activity.note(f"workers auto: {number} for each of {trials} trials, {self._slots} fit at once")
        return number

    def references(self, computed: Sequence[Cell]) -> dict[Any, dict[int, str]]:
        """Compute the runs that others refer to; their folders, by environment and seed. Their final models stay."""
        self.grid(computed, keep=True)
        return {
            cell.group[1]: {
                config.seed: str(run_folder.folder_of(config, self._options.out)) for config in cell.configs
            }
            for cell in computed
        }

    def grid(self, tried: Sequence[Cell], keep: bool = False) -> list[Cell]:
        """Compute settings that are known beforehand."""
        configs = list({identity(config): config for cell in tried for config in cell.configs}.values())
        if self._options.fresh:  # here, once: a trial that is repeated after a failure must not begin again
            for config in configs:
                run_folder.forget(config, self._options.out)
        todo = missing(configs, self._options.out, self._study.stop)
        done = len(configs) - len(todo)
        if todo and not self._options.in_process:
            self._room()  # refuses before anything is shown or counted
        self._watch(Status(done, len(configs), float("-inf")))
        if todo:
            self.computed += len(todo)
            tags = {
                identity(config): {"case": cell.case, **record.purpose_tags(cell)}
                for cell in tried
                for config in cell.configs
            }
            outputs = self._instructions.outputs
            outputs = outputs._replace(checkpoint=keep or outputs.checkpoint)
            instructions = self._instructions._replace(tags=tags, outputs=outputs)
            if self._options.in_process:
                self._compute_here(units(todo), instructions, done, len(configs))
                return list(tried)
            work = self._packed(units(todo))
            ray_space = {"pack": _ray().grid_search(list(range(len(work))))}
            self._fit(ray_space, instructions, lambda finished: (done + finished, len(configs)), work)
        return list(tried)

    def _compute_here(self, work: Sequence[Unit], instructions: Instructions, done: int, total: int) -> None:
        options = self._options
        workers = Workers(options.workers, options.address, options.resources)
        with ExitStack() as stack:
            crew: Crew = workers
            if isinstance(workers.number, int) and workers.number > 1:  # the same ones for all runs
                crew = stack.enter_context(pool_of(workers, workers.number))
            progress = one_after_the_other(work, instructions._replace(workers=crew))
            for news in stack.enter_context(closing(progress)):
                self._failures.update(news.failures)
                self._watch(Status(done + news.finished, total, news.best, news.rounds))

    def search(self) -> list[Cell]:
        """Compute the settings that Optuna proposes."""
        from tune.search import FairAsha, FairSearch

        study = self._study
        proposals, stops = (self._storage.parent / name for name in ("proposals.json", "stops.json"))
        if self._options.fresh:
            for memory in (proposals, stops):
                memory.unlink(missing_ok=True)
        self._room()  # refuses before anything is proposed
        is_new = functools.partial(_is_new, self._options.out, self._options.fresh)
        searcher = FairSearch(study, proposals, is_new)
        scheduler = FairAsha(study, searcher.rounds, stops) if study.search.scheduler == "asha" else None
        total = searcher.budget * len(study.seeds)
        self._watch(Status(0, total, float("-inf")))
        self._fit({}, self._instructions, lambda finished: (finished, total), searcher=searcher, scheduler=scheduler)
        self.computed += searcher.computed
        return searcher.proposed

    def _packed(self, work: Sequence[Unit]) -> list[list[Unit]]:
        if len(work) <= 4 * self._slots:
            return [[unit] for unit in work]
        estimate = Estimate()
        return packs(work, self._slots, estimate.seconds)

    def _fit(
        self,
        space: dict[str, Any],
        instructions: Instructions,
        count: Callable[[int], tuple[int, int]],
        work: Sequence[list[Unit]] = (),
        searcher: Any = None,
        scheduler: Any = None,
    ) -> None:
        from tune.trial import Trial

        ray_tune = _ray()
        workers = self._workers(len(work) or self._slots)
        wanted = Workers(workers, resources=self._options.resources)
        trainable = ray_tune.with_resources(
            ray_tune.with_parameters(
                Trial,
                packs=[compact(pack) for pack in work],
                instructions=instructions._replace(workers=wanted),
            ),
            _occupied(self._options.resources, workers),
        )
        name = f"{time.time_ns()}"
        tuner = ray_tune.Tuner(
            trainable,
            param_space=space,
            tune_config=ray_tune.TuneConfig(
                search_alg=searcher,
                scheduler=scheduler,
                num_samples=1 if searcher is None else searcher.budget,
                max_concurrent_trials=self._slots,
                reuse_actors=True,
            ),
            run_config=ray_tune.RunConfig(
                name=name,
                storage_path=str(self._storage.resolve()),
                failure_config=ray_tune.FailureConfig(max_failures=MAX_FAILURES),
                callbacks=[_progress(self._watch, count, self._failures)],
                verbose=0,
            ),
        )
        try:
            results = tuner.fit()
        finally:
            shutil.rmtree(self._storage / name, ignore_errors=True)
            with suppress(OSError):  # another phase, or another driver, may be using it
                self._storage.rmdir()
        for error in results.errors:
            self._failures[f"a trial of {self._study.name}"] = str(error).strip().rpartition("\n")[2]


def _occupied(resources: Resources, workers: int) -> Any:
    """What a trial asks of the cluster: a process, or a group of workers and a process that only waits for them."""
    cpu, gpu = resources
    if workers == 1:
        return {"cpu": cpu, "gpu": gpu}
    return _ray().PlacementGroupFactory([{}, *[{"CPU": cpu, "GPU": gpu}] * workers])


def _progress(watch: Watch, count: Callable[[int], tuple[int, int]], failures: dict[str, str]) -> Any:
    """Tells how far the trials are."""
    ray_tune = _ray()

    class Reporter(ray_tune.Callback):  # type: ignore[misc, name-defined]
        def __init__(self, watch: Watch, count: Callable[[int], tuple[int, int]], failures: dict[str, str]) -> None:
            self._watch, self._count, self._failures = watch, count, failures
            self._finished: dict[str, int] = {}
            self._rounds: dict[str, int] = {}
            self._best = float("-inf")
            self._status = Status(*count(0), self._best)

        def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
            self._watch(self._status)  # nothing new, but the clock goes on

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
            # A trial that starts again after a failure counts its finished runs again.
            self._finished[trial.trial_id] = max(self._finished.get(trial.trial_id, 0), result["finished"])
            self._rounds[trial.trial_id] = max(self._rounds.get(trial.trial_id, 0), result["rounds"])
            self._best = max(self._best, result["best"])
            self._failures.update(result["failures"])
            finished, total = self._count(sum(self._finished.values()))
            self._status = Status(finished, total, self._best, sum(self._rounds.values()))
            self._watch(self._status)

        def __getstate__(self) -> dict[str, Any]:
            return {}  # Ray saves it with the experiment; a progress line cannot be saved

    return Reporter(watch, count, failures)


def _ray() -> Any:
    from ray import tune

    return tune
