"""A study from its file to its results, on Ray Tune.

The files of the runs are the truth about what is done, so a sweep is resumed by starting it again: finished runs are
read, interrupted ones go on after their last round, the rest is computed.
"""

import functools
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fl_lightning.engines.parallel.executor import Executor, Workers, pool_of
from fl_lightning.engines.parallel.ray_cluster import Resources, check_offered, is_connected, local_nodes, slots
from fl_lightning.errors import DiskFull, UserError, require
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.metrics.metric import GA
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.folder import ended
from fl_lightning.runs.identity import identity
from fl_lightning.runs.open_run import RunOptions
from fl_lightning.system import activity, memory, program
from tune import sweep_run
from tune.cluster import connected
from tune.estimate import Estimate, measure_apart
from tune.grid import Cell, cells, pretrain_cells, reference_cells, started
from tune.outcome import CellOutcome, finals, follows_up, outcome_of
from tune.study import Study
from tune.work import Instructions, Pack, Status, Watch, compact, one_after_the_other, packs

if TYPE_CHECKING:
    from tune.trial import Crash

# A trial whose process or node dies is tried once more; a run's own failure is not tried again in the same sweep.
MAX_FAILURES = 1


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
        summary: Makes the text of `best.md` in the folder of the sweep; without one there is none.
    """

    out: Path
    address: str | None = None
    resources: Resources = Resources()
    max_concurrent: int = 0
    fresh: bool = False
    in_process: bool = False
    pictures: bool = False
    workers: int | Literal["auto"] = 1
    summary: Callable[[Sequence[CellOutcome], Study], str] | None = None


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
    parent = sweep_run.open_sweep(study, options.out, folder)
    how = RunOptions(parent.child_tags, pictures=options.pictures, checkpoint=_keeps(study), model=study.keep_models)
    instructions = Instructions(options.out, how, stop=study.stop, metric=study.metric)
    failures: dict[str, str] = {}
    try:
        with ExitStack() as stack:
            # Only when there is something to compute: starting a cluster takes seconds.
            place = functools.partial(connected, options.address, options.resources, options.out)
            slots = functools.cache(lambda: stack.enter_context(place()))
            runner = _Runner(study, options, instructions, folder / "ray", slots, watch, failures)
            if known is not None and study.pretrain is not None:
                runner.computed += _pretrain(runner, study)
                known = started(study, known, options.out)
                require(all(cell.start for cell in known), _not_pretrained(failures))
            if known is not None and study.reference is not None:
                found = runner.references(started(study, reference_cells(study), options.out))
                known = [replace(cell, references=found[cell.group[1]]) for cell in known]
            tried = runner.search() if known is None else runner.grid(known)
            if follows_up(study):
                tried = [*tried, *runner.grid(finals(study, tried, options.out))]
        outcomes = [outcome_of(cell, options.out, study) for cell in tried]
        parent.close(study, outcomes, failures, options.summary(outcomes, study) if options.summary else None)
    except BaseException as reason:
        parent.abandon(reason)
        raise
    return Outcome(outcomes, failures, runner.computed, folder, parent.run_id)


def local_slots(resources: Resources) -> int:
    """How many trials this machine holds at once, without asking Ray."""
    return max(1, slots(local_nodes(), resources))


def check_place(configs: Sequence[RunConfig], options: Options) -> None:
    """Refuse resources and devices that are not there, without a cluster before Ray takes seconds to start."""
    options.resources.check()
    here = options.address is None and not is_connected()
    if here:
        check_offered(local_nodes(), options.resources)
    for compute in {config.compute for config in configs}:
        Workers("auto", resources=options.resources).check_device(compute.device)
        if here:
            _ = compute.torch_device, compute.mixed  # refuses


def fitting(gigabytes: float) -> int:
    """How many runs of that size fit into the memory that is free on this machine; at least one is tried."""
    import torch

    free = memory.available(torch.device("cpu"))
    return max(1, int(free / (gigabytes * 1e9))) if gigabytes and free is not None else sys.maxsize


def missing(configs: Sequence[RunConfig], out: Path, stop: Stop | None) -> list[RunConfig]:
    """The runs that no earlier process has taken to their end."""
    return [config for config in configs if ended(config, out, stop) is None]


def _pretrain(runner: "_Runner", study: Study) -> int:
    """Compute the runs that networks start from, to their ends, whatever the study measures; how many are new."""
    instructions = runner.instructions._replace(metric=GA, stop=None)
    whole = replace(study, metric=GA, stop=None)
    # What it has reached is another metric than that of the study.
    watch = lambda status: runner.watch(status._replace(best=float("-inf")))  # noqa: E731
    alone = replace(runner, study=whole, instructions=instructions, watch=watch, computed=0)
    alone.grid(pretrain_cells(study), keep=True)
    return alone.computed


def _not_pretrained(failures: dict[str, str]) -> str:
    return f"the run that all networks start from could not be computed: {'; '.join(failures.values()) or 'stopped'}"


def _is_new(out: Path, fresh: bool, config: RunConfig) -> bool:
    if fresh:
        run_folder.forget(config, out)
    return run_folder.latest(config, out) is None


def _keeps(study: Study) -> bool:
    return study.keep_checkpoints or study.continue_to is not None


@dataclass
class _Runner:
    """Carries out the phases of a sweep.

    Attributes:
        study: What is computed.
        options: How.
        instructions: For every trial.
        storage: Where Ray writes.
        cluster: Connects to it at the first call, and counts the trials that it holds.
        watch: Shows how far they are.
        failures: Runs that could not be computed, with the reason.
        computed: How many runs were not there before.
    """

    study: Study
    options: Options
    instructions: Instructions
    storage: Path
    cluster: Callable[[], int]
    watch: Watch
    failures: dict[str, str]
    computed: int = 0

    @functools.cached_property
    def _slots(self) -> int:
        """Trials at once; asking for it connects to the cluster."""
        slots = min(self._room(), self.options.max_concurrent or sys.maxsize)
        return min(slots, fitting(self.study.memory)) if self.options.address is None else slots

    def _room(self) -> int:
        """How many trials the cluster holds at once, each with its workers."""
        workers = 1 if self.options.workers == "auto" else self.options.workers
        room = self.cluster()
        require(
            workers <= room,
            f"expected at most {room} workers in a trial, for so many there is room, got {workers}; lower --workers, "
            "--resources.cpu or --resources.gpu, or add a node",
        )
        return room // workers

    def _workers(self, trials: int) -> int:
        """Of each trial, if there are so many."""
        if self.options.workers != "auto":
            return self.options.workers
        number = max(1, self.cluster() // max(1, min(trials, self._slots)))
        activity.note(f"workers auto: {number} for each of {trials} trials, {self._slots} fit at once")
        return number

    def references(self, computed: Sequence[Cell]) -> dict[Any, dict[int, str]]:
        """Compute the runs that others refer to; their folders, by environment and seed. Their final models stay."""
        self.grid(computed, keep=True)
        return {
            cell.group[1]: {config.seed: str(run_folder.folder_of(config, self.options.out)) for config in cell.configs}
            for cell in computed
        }

    def grid(self, tried: Sequence[Cell], keep: bool = False) -> list[Cell]:
        """Compute settings that are known beforehand."""
        configs = list({identity(config): config for cell in tried for config in cell.configs}.values())
        if self.options.fresh:  # here, once: a trial that is repeated after a failure must not begin again
            for config in configs:
                run_folder.forget(config, self.options.out)
        todo = missing(configs, self.options.out, self.study.stop)
        done = len(configs) - len(todo)
        if todo:  # refused before anything is shown or counted
            check_place(todo, self.options)
        if todo and not self.options.in_process:
            self._room()
        self.watch(Status(done, len(configs), float("-inf")))
        if todo:
            tags = {
                identity(config): {"case": cell.case, **sweep_run.purpose_tags(cell)}
                for cell in tried
                for config in cell.configs
            }
            options = self.instructions.options
            options = options._replace(checkpoint=keep or options.checkpoint, model=keep or options.model)
            instructions = self.instructions._replace(tags=tags, options=options)
            if self.options.in_process:
                self._compute_here(todo, instructions, done, len(configs))
            else:
                self._compute(self._packed(todo), instructions, len(configs))
            failed = sum(instructions.name_of(config) in self.failures for config in todo)
            self.computed += len(todo) - failed
        return list(tried)

    def _compute(self, work: Sequence[Pack], instructions: Instructions, total: int) -> None:
        """Compute packs, one in a trial; of a pack that crashes, each run that is left gets a trial of its own."""
        done = total - sum(map(len, work))
        space = {"pack": _ray().grid_search(list(range(len(work))))}
        apart: list[Pack] = []
        for trial, reason in self._fit(space, instructions, lambda finished: (done + finished, total), work):
            runs = work[trial["pack"]]
            if len(runs) == 1:
                self.failures[instructions.name_of(runs[0])] = reason
            else:
                apart += [[config] for config in missing(runs, self.options.out, self.study.stop)]
        if apart:
            self._compute(apart, instructions, total)

    def _compute_here(self, work: Sequence[RunConfig], instructions: Instructions, done: int, total: int) -> None:
        options = self.options
        workers = Workers(options.workers, options.address, options.resources)
        with ExitStack() as stack:
            pool = stack.enter_context(pool_of(workers))  # the same workers for all runs
            executor: Executor = 1 if pool is None else pool
            progress = one_after_the_other(work, instructions.with_workers(executor))
            for news in stack.enter_context(closing(progress)):
                if news.full:
                    raise DiskFull(news.full)
                self.failures.update(news.failures)
                self.watch(Status(done + news.finished, total, news.best, news.rounds))

    def search(self) -> list[Cell]:
        """Compute the settings that Optuna proposes."""
        from tune.search import FairAsha, FairSearch

        study = self.study
        proposals, stops = (self.storage.parent / name for name in ("proposals.json", "stops.json"))
        if self.options.fresh:
            for memory in (proposals, stops):
                memory.unlink(missing_ok=True)
        is_new = functools.partial(_is_new, self.options.out, self.options.fresh)
        searcher = FairSearch(study, proposals, is_new)
        check_place(searcher.examples, self.options)  # refused before anything is proposed
        self._room()
        scheduler = FairAsha(study, searcher.rounds, stops) if study.search.scheduler == "asha" else None
        total = searcher.budget * len(study.seeds)
        self.watch(Status(0, total, float("-inf")))
        work: dict[str, Any] = {"searcher": searcher, "scheduler": scheduler}
        for trial, reason in self._fit({}, self.instructions, lambda finished: (finished, total), **work):
            point = ", ".join(f"{key} {value}" for key, value in trial["point"].items())
            self.failures[f"{trial['case']} with {point}"] = reason
        self.computed += len([config for config in searcher.new if run_folder.latest(config, self.options.out)])
        return searcher.proposed

    def _packed(self, work: Sequence[RunConfig]) -> list[Pack]:
        if len(work) <= 4 * self._slots:
            return [[config] for config in work]
        refused: list[UserError] = []
        estimate = Estimate(measure_apart(self.options.resources, refused))
        packed = packs(work, self._slots, estimate.seconds)
        if len(refused) == estimate.kinds:  # the data are not there, say: no run can be computed
            raise refused[0]
        return packed

    def _fit(
        self,
        space: dict[str, Any],
        instructions: Instructions,
        count: Callable[[int], tuple[int, int]],
        work: Sequence[Pack] = (),
        searcher: Any = None,
        scheduler: Any = None,
    ) -> "list[Crash]":
        from tune.trial import Reporter, Trial

        ray_tune = _ray()
        workers = self._workers(len(work) or self._slots)
        wanted = Workers(workers, resources=self.options.resources)
        trainable = ray_tune.with_resources(
            ray_tune.with_parameters(
                Trial,
                packs=[compact(pack) for pack in work],
                instructions=instructions.with_workers(wanted),
            ),
            _occupied(self.options.resources, workers),
        )
        # Ray counts by itself what a cluster holds, also when nodes join; a search is given so many settings at once.
        at_once = self.options.max_concurrent or None if self.options.address and searcher is None else self._slots
        name = f"{time.time_ns()}"
        reporter = Reporter(self.watch, count, self.failures)
        tuner = ray_tune.Tuner(
            trainable,
            param_space=space,
            tune_config=ray_tune.TuneConfig(
                search_alg=searcher,
                scheduler=scheduler,
                num_samples=1 if searcher is None else searcher.budget,
                max_concurrent_trials=at_once,
                reuse_actors=True,
            ),
            run_config=ray_tune.RunConfig(
                name=name,
                storage_path=str(self.storage.resolve()),
                failure_config=ray_tune.FailureConfig(max_failures=MAX_FAILURES),
                checkpoint_config=ray_tune.CheckpointConfig(checkpoint_at_end=False),
                callbacks=[reporter],
                stop=reporter,
                verbose=0,
            ),
        )
        try:
            tuner.fit()
        except Exception:
            program.check_temporary()  # Ray says of a full disk whatever was the first to fail
            program.check_room(self.options.out, "runs", "make room there; the same command goes on")
            raise
        finally:
            shutil.rmtree(self.storage / name, ignore_errors=True)
            with suppress(OSError):  # another phase, or another driver, may be using it
                self.storage.rmdir()
        if reporter.full:
            raise DiskFull(reporter.full)
        return reporter.crashes


def _occupied(resources: Resources, workers: int) -> Any:
    """What a trial asks of the cluster: a process, or a group of workers and a process that only waits for them."""
    cpu, gpu = resources
    if workers == 1:
        return {"cpu": cpu, "gpu": gpu}
    return _ray().PlacementGroupFactory([{}, *[{"CPU": cpu, "GPU": gpu}] * workers])


def _ray() -> Any:
    from ray import tune

    return tune
