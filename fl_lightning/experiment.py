"""One run from its configuration to its results, on one page: build, train, evaluate, save, sync, stop."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from fl_lightning.engines.parallel.executor import Executor, Workers, executing
from fl_lightning.errors import Diverged
from fl_lightning.federation import cohort_size
from fl_lightning.loop import Problem, federate
from fl_lightning.method import task_of
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.metrics.metric import Measurement
from fl_lightning.metrics.round_metrics import check_metric
from fl_lightning.models.task import Weights
from fl_lightning.record import RoundRecord
from fl_lightning.runs import final_round, saved_model
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.evaluator import Evaluator
from fl_lightning.runs.features import with_features
from fl_lightning.runs.folder import Result, clear, ended, folder_of, latest, locked
from fl_lightning.runs.open_run import OpenRun, RunOptions
from fl_lightning.runs.problem import problem_of
from fl_lightning.runs.resume import saved_rounds
from fl_lightning.runs.tracking.description import run_name
from fl_lightning.runs.tracking.sync import sync_ended
from fl_lightning.system.plugins import plugin_errors

# Called after every round with the number of the round and what was measured; also, first, for the rounds of an
# earlier process that are not computed again.
Watch = Callable[[int, Measurement], None]

# The rounds of a run as they become known.
Rounds = Generator[tuple[int, Measurement], None, None]


def run(
    config: RunConfig,
    out: Path | str = "runs",
    fresh: bool = False,
    watch: Watch | None = None,
    tags: Mapping[str, str] = MappingProxyType({}),
    workers: Executor = 1,
    stop: Stop | None = None,
) -> Result:
    """Run a configuration, or go on where an earlier process stopped; a finished run is only read.

    Args:
        config: The settings.
        out: Folder of all runs and of the MLflow store.
        fresh: Forget what an earlier process has done for this configuration.
        watch: Called after every round.
        tags: Further tags of the MLflow run; `case` is what tables and figures call it.
        workers: How many processes train the clients, or `Workers` with more to say; no number depends on it.
        stop: When it need not go on; no number of any round depends on it.

    Returns:
        How it ended; all numbers are in its folder and in MLflow.
    """
    out = Path(out)
    options = RunOptions(tags, model=True, fresh=fresh, workers=workers, stop=stop)
    result = complete(config, out, options, watch)
    if result.reused and (merged := {**result.tags, **tags}) != result.tags:
        whole = latest(config, out) or result  # also what lies beyond the rule
        known = sync_ended(out, whole, name=run_name(config, merged), tags=merged)
        result = replace(result, run_id=known.run_id, name=known.name, tags=known.tags, unsent=known.unsent)
    return result


def complete(config: RunConfig, out: Path, options: RunOptions, watch: Watch | None = None) -> Result:
    """Take a run to its end, and read how it ended from its folder."""
    reused = not options.fresh and ended(config, out, options.stop) is not None
    steps = rounds(config, out, options)
    for number, measurement in steps:
        try:
            if watch is not None:
                watch(number, measurement)
        except BaseException as reason:
            steps.throw(reason)  # so that the run is recorded as what it is: interrupted, or failed
    result = ended(config, out, options.stop)
    assert result is not None
    return replace(result, reused=reused)


@plugin_errors()
def check(config: RunConfig) -> None:
    """Raise `UserError` if the configuration cannot run: data missing, settings that do not go together."""
    problem = problem_of(config)
    Evaluator(config, problem, Path())
    federate(config.method, problem, config.training, config.federation, config.engine)


def rounds(config: RunConfig, out: Path, options: RunOptions = RunOptions()) -> Rounds:  # noqa: B008 - immutable
    """A run, round by round; the caller decides whether there is a next one. How it ended is in its folder.

    Args:
        config: The settings.
        out: Folder of all runs and of the MLflow store.
        options: What stays of it, the executor, the rule for stopping.

    Yields:
        The number of the round and what was measured; also, first, for rounds that an earlier process has computed.
        Closed before its end, the run is recorded as stopped, and can be resumed.
    """
    if options.stop is not None:
        check_metric("stop.metric", options.stop.metric, config.classes, config.split.validation)
    folder = folder_of(config, out)
    known = None if options.fresh else ended(config, out, options.stop)
    if known is not None and not known.unsent:  # only read: its folder may be one that cannot be written to
        yield from enumerate(known.history, start=1)
        return
    with locked(folder), plugin_errors():
        if options.fresh:
            clear(folder, keep=("lock",))
        if (known := ended(config, out, options.stop)) is not None:
            yield from enumerate(known.history, start=1)
            sync_ended(out, latest(config, out) or known)  # also what lies beyond the rule
            return
        yield from _computed(config, out, options)


def _computed(config: RunConfig, out: Path, options: RunOptions) -> Rounds:
    """The rounds of a run whose lock is held: those of earlier processes, then the others."""
    problem = problem_of(config)  # data, clients, model
    whole, problem = problem, with_features(config, problem)
    problem = problem._replace(dataset=problem.dataset.to(problem.task.device))  # once, for training and measuring
    evaluator = Evaluator(config, problem, folder_of(config, out), whole)
    saved = saved_rounds(config, out, evaluator.start, options.fresh, evaluator.user_metrics)
    history = list(saved.history) if saved else []
    known, last = _enough(options.stop, history), config.federation.rounds
    is_over = known is not None or len(history) == last
    most = 0 if is_over else cohort_size(config.federation, len(problem.clients))
    if not is_over:  # the numbers of a final round stand in none that others follow
        history = [one._replace(metrics=final_round.without(one.metrics)) for one in history]
    if isinstance(options.workers, Workers):
        options.workers.check_device(config.compute.device)
    with executing(config.engine, options.workers, most, config.compute.threads) as engine:
        records: Iterator[RoundRecord] = iter(())
        if not is_over:  # settings are refused here, before anything is written
            if engine is not config.engine:  # in one process several models are measured faster at once
                problem = problem._replace(evaluate_clients=evaluator.evaluate_clients)
            snapshot = saved.snapshot if saved else None
            records = federate(config.method, problem, config.training, config.federation, engine, snapshot)
        with OpenRun(config, out, options, problem, history) as open_run:
            yield from enumerate(history[:known], start=1)
            try:
                for record in records:
                    history.append(evaluator.evaluate(record))
                    is_last = record.round == last or _is_enough(options.stop, history)
                    if is_last:
                        history[-1].metrics.update(evaluator.conclude(record, options.pictures))
                    if is_last and options.model:
                        _save_model(config, whole, record, open_run.folder)
                    open_run.save(record.after, with_state=options.checkpoint or record.round < last)
                    yield record.round, history[-1]
                    del record  # the models of all its clients
                    if is_last:
                        break
            except Diverged as divergence:
                open_run.diverge(divergence)
            open_run.finish()


def _save_model(config: RunConfig, problem: Problem, record: RoundRecord, folder: Path) -> None:
    """Write the network after the last round; of one that is partly frozen, the trained part."""
    final, task = Weights(record.after.state.params, record.after.buffers), task_of(config.method, problem.task)
    is_part = config.model.tuning.train != "all"
    saved_model.write(folder, task, final, problem.dataset.preparation, apart=is_part)


def _enough(stop: Stop | None, history: Sequence[Measurement]) -> int | None:
    """After how many of the rounds a rule has seen enough; None if not yet, or without one."""
    return None if stop is None else stop.enough(stop.values([measurement.metrics for measurement in history]))


def _is_enough(stop: Stop | None, history: Sequence[Measurement]) -> bool:
    """Whether a rule has seen enough in the latest round."""
    return stop is not None and stop.reached(stop.values([measurement.metrics for measurement in history]))
