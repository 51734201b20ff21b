"""The federated loop, as a generator: one record per round. Whoever consumes it measures, logs, saves and stops."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.batching import check_batches, smallest_batch
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.plan import SERVER, AllClients, ClientData, Plan
from fl_lightning.data.shares import sizes_of
from fl_lightning.engines.engine import Engine, Fit
from fl_lightning.engines.functional import Functional
from fl_lightning.errors import Diverged, UserError, require
from fl_lightning.federation import Federation, check_participation, draw_cohort
from fl_lightning.fitting import check_fit
from fl_lightning.inputs import each
from fl_lightning.method import Cohort, Context, Method, Server, task_of, with_round_lr
from fl_lightning.params import Params, all_finite, weighted_sum, zip_map
from fl_lightning.record import ClientResult, RoundRecord, Snapshot
from fl_lightning.system import activity
from fl_lightning.task import Task
from fl_lightning.training import Training
from fl_lightning.workers.crew import Crew, hired

# Raised when the numbers of the loop or of what is measured change, or a default of training, federation, compute or
# probe does: part of every run's identity.
VERSION = 1
# Traffic is counted in float32, whatever the simulation computes in.
BYTES_PER_NUMBER = 4


def federate(
    method: Method,
    task: Task,
    dataset: Dataset,
    clients: Sequence[Tensor],
    training: Training = Training(),  # noqa: B008 - frozen
    federation: Federation = Federation(),  # noqa: B008 - frozen
    engine: Engine = Functional(),  # noqa: B008 - frozen
    seed: int = 0,
    holdout: Tensor | None = None,
    resume: Snapshot | None = None,
    workers: Crew = 1,
    judge: "Judge | None" = None,
) -> Iterator[RoundRecord]:
    """The rounds of a method: settings are checked now, each round is computed when it is asked for.

    Args:
        method: What is sent, learnt and aggregated.
        task: Model and likelihood; its initial weights are where round 1 starts. A method with a network of its own
            trains that one, made from the model: `task_of(method, task)`.
        dataset: The samples of all clients, and the test set.
        clients: Indices into the training set, one tensor per client; empty ones never take part.
        training: How clients train.
        federation: Rounds and participation.
        engine: How the training is carried out.
        seed: Key of all random draws.
        holdout: Indices of training samples that belong to no client, for methods whose server has data.
        resume: Go on after this round instead of starting anew.
        workers: How many processes train the clients, or `Workers` with more to say; `auto` takes what pays. Unless it
            is 1, torch computes with one thread everywhere while a round lasts, and the numbers are the same for all of
            them; and for 1 after `torch.set_num_threads(1)`.
        judge: Measures clients where they were trained, such as `ClientJudge`; otherwise whoever consumes the records
            does.

    Returns:
        An iterator over one record per round. It raises `Diverged` when a model is no longer finite.

    Raises:
        UserError: If the settings do not go together.
    """
    task = task_of(method, task)
    setup = set_up(method, task, dataset, clients, training, federation, seed, holdout)
    finish = Finish(method, judge)
    engine.prepare(method, task, setup.dataset, finish)

    def rounds() -> Iterator[RoundRecord]:
        now = resume or beginning(method, task, setup.server)
        with hired(engine, workers, federation.rounds - now.round) as trainer:
            alike = nullcontext if trainer is engine else _one_thread
            with alike():
                trainer.prepare(method, task, setup.dataset, finish)
            for number in range(now.round + 1, federation.rounds + 1):
                cohort = draw_cohort(method, setup.server, with_round_lr(setup.training, number), federation, number)
                cohort, data = method.gather(cohort, setup.data)
                with alike():
                    record = run_round(task, data, trainer, cohort, now, finish)
                now = record.after
                yield record
                del record  # its clients' models need not stay while the next round is computed

    return rounds()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute as workers do: with more threads sums are formed in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Setup(NamedTuple):
    """What all rounds have in common.

    Attributes:
        server: What the server has beside its state.
        training: How clients train.
        data: The samples each client trains on.
        dataset: Where these samples are, on the device of the task.
    """

    server: Server
    training: Training
    data: Sequence[ClientData]
    dataset: Dataset


def set_up(
    method: Method,
    task: Task,
    dataset: Dataset,
    clients: Sequence[Tensor],
    training: Training,
    federation: Federation,
    seed: int,
    holdout: Tensor | None,
) -> Setup:
    """Check the settings, and put everything in its place; see `federate`."""
    dataset, device = dataset.to(task.device), task.device
    spare = torch.empty(0, dtype=torch.long) if holdout is None else holdout
    held = ClientData(SERVER, dataset, spare.to(device), task.dtype)
    check_fit(task, held)
    server = Server(
        task=task,
        sizes=sizes_of(clients),
        holdout=held,
        seed=seed,
        smallest_batch=smallest_batch(task, held),
    )
    training = method.adapt(with_own_optimiser(training, task))
    check_participation(federation, server.sizes)
    method.check(training, server)
    indices = method.local_data(clients, spare, seed)
    check_batches(training, sizes_of(indices), server.smallest_batch)
    return Setup(server, training, AllClients(dataset, indices, task.dtype), dataset)


def with_own_optimiser(training: Training, task: Task) -> Training:
    """The settings with the optimiser that the model brings, unless they name another."""
    brings = task.step is not None and task.step.has_optimisers
    require(
        brings or training.optimiser != "own",
        f"training.optimiser own is that of a LightningModule with configure_optimizers, got "
        f"{type(task.model).__name__}; set --training.optimiser sgd, adam or adamw",
    )
    if not brings or training.optimiser != "auto":
        return training
    try:
        return replace(training, optimiser="own")
    except UserError as refusal:  # settings that only ours have
        raise UserError(
            f"{refusal}: {type(task.model).__name__} has configure_optimizers; set --training.optimiser sgd, adam or "
            "adamw to use ours instead"
        ) from None


def beginning(method: Method, task: Task, server: Server) -> Snapshot:
    """The server before round 1."""
    start = initial(method, task, len(server.sizes), server.holdout.dataset)
    return start._replace(state=method.prepare(start.state, server))


def initial(method: Method, task: Task, num_clients: int, dataset: Dataset) -> Snapshot:
    """The server before it has prepared anything, on a copy of the weights: the task's own are there for other runs,
    even beside a method that breaks the rules and writes into its state.
    """
    params, buffers = (zip_map(torch.clone, part) for part in task.initial)
    x = dataset.inputs(each(lambda one: one[:1].to(task.device), dataset.train_x), task.dtype)
    return Snapshot(0, method.begin(params, num_clients, task, x), buffers)


# Measures clients that have finished: returns them with what it has found.
Judge = Callable[[Sequence[ClientResult]], list[ClientResult]]
# What a client costs beside its samples, in samples.
LEAST_WORK = 100.0


class Finished(NamedTuple):
    """A client at the end of its round.

    Attributes:
        result: For whoever consumes the records.
        report: For the server.
        seconds: That it took.
    """

    result: ClientResult
    report: Any
    seconds: float


@dataclass(frozen=True)
class Finish:
    """What becomes of clients where they were trained: they report, and are judged; their traces stay there.

    Attributes:
        method: The method.
        judge: Measures them.
    """

    method: Method
    judge: Judge | None = None

    def __call__(self, trained: Iterable[tuple[Fit, Context]]) -> Iterator[Finished]:
        if self.judge is None:
            yield from self._report(trained)
            return
        finished = list(self._report(trained))
        start = time.perf_counter()
        judged = self.judge([one.result for one in finished])
        each = (time.perf_counter() - start) / max(1, len(finished))
        for one, result in zip(finished, judged, strict=True):
            yield Finished(result, one.report, one.seconds + each)

    def _report(self, trained: Iterable[tuple[Fit, Context]]) -> Iterator[Finished]:
        start = time.perf_counter()
        known, penalty = None, None
        for fit, context in trained:
            if not all_finite(fit.local.params):
                raise Diverged(fit.local.plan.round, fit.local.client)
            report = self.method.report(fit.local, context)
            if context is not known:  # the same for all clients, unless they remember anything
                known, penalty = context, self.method.penalty(context)
            prior_loss = 0.0 if penalty is None else float(penalty.value(fit.local.params))
            result = ClientResult(fit.local._replace(trace=(), rule_state=()), fit.train_loss, prior_loss)
            now = time.perf_counter()
            yield Finished(result, report, now - start)
            start = time.perf_counter()

    def work(self, plan: Plan) -> float:
        """About how long a client takes: the samples that it sees, a test sample counting a third."""
        data = plan.data
        tested = 0.0 if self.judge is None else len(data.dataset.test_y) / 3
        return LEAST_WORK + len(data) * (plan.num_epochs + self.method.extra_passes) + tested


def run_round(
    task: Task, data: Sequence[ClientData], engine: Engine, cohort: Cohort, before: Snapshot, finish: Finish
) -> RoundRecord:
    """One round: broadcast, train, report, aggregate."""
    method = finish.method
    start_time = time.perf_counter()
    context = method.broadcast(before.state, cohort)
    seconds_broadcast = time.perf_counter() - start_time
    plans = plans_of(cohort, data)
    work = [finish.work(plan) for plan in plans]
    finished = engine.train(method, task, context, before.buffers, plans, finish, work)
    return close_round(method, cohort, before, context, plans, finished, seconds_broadcast, engine)


def plans_of(cohort: Cohort, data: Sequence[ClientData]) -> list[Plan]:
    """The batches of every member of the cohort."""
    return [
        Plan(data[n], cohort.server.seed, cohort.round, cohort.training, epochs, cohort.server.smallest_batch)
        for n, epochs in zip(cohort.members, cohort.epochs, strict=True)
    ]


def close_round(
    method: Method,
    cohort: Cohort,
    before: Snapshot,
    context: Context,
    plans: Sequence[Plan],
    finished: Iterable[Finished],
    seconds_broadcast: float,
    engine: Engine,
) -> RoundRecord:
    """The second half of a round: clients, as they finish, report; then the server aggregates."""
    number = cohort.round
    start_time = time.perf_counter()
    results, reports, busy = [], [], 0.0
    for result, report, seconds in finished:
        results.append(result)
        reports.append(report)
        busy += seconds
    trained_time = time.perf_counter()

    activity.say("aggregating")
    state = method.aggregate(before.state, cohort, reports)
    buffers = average_buffers([result.local.buffers for result in results], cohort.weights)
    if not all_finite(state.params):
        raise Diverged(number, None)
    end_time = time.perf_counter()

    samples = sum(len(plan.data) * (plan.num_epochs + method.extra_passes) for plan in plans)
    return RoundRecord(
        round=number,
        cohort=cohort,
        before=before,
        clients=results,
        reports=reports,
        after=Snapshot(number, state, buffers),
        bytes_down=bytes_down(method, context, before.buffers, len(plans)),
        bytes_up=sum(bytes_of(method, r, c.local.buffers) for r, c in zip(reports, results, strict=True)),
        gradient_evaluations=samples,
        seconds_local=trained_time - start_time,
        seconds_server=seconds_broadcast + (end_time - trained_time),
        workers_idle=_idle(busy, engine.workers, trained_time - start_time),
    )


def bytes_of(method: Method, message: Any, buffers: Params) -> int:
    """What it takes to send a context or a report, with the model's buffers, in whole bytes."""
    return math.ceil(BYTES_PER_NUMBER * method.traffic((message, buffers)))


def bytes_down(method: Method, context: Context, buffers: Params, number: int) -> int:
    """What it takes to send the context to all members of the cohort, each of which has the rest in its memory."""
    sent = context._replace(own=())
    if not context.own_start:
        return number * bytes_of(method, sent, buffers)
    return sum(bytes_of(method, sent.of_member(position), buffers) for position in range(number))


def _idle(busy: float, workers: int, seconds: float) -> float | None:
    """The share of the workers' time in which they trained nobody; None without workers."""
    return max(0.0, 1 - busy / (workers * seconds)) if workers > 1 else None


def average_buffers(buffers: Sequence[Params], weights: Sequence[float]) -> Params:
    """BatchNorm's statistics are averaged like models; counters take the largest value."""
    mean = weighted_sum(({k: v for k, v in b.items() if v.is_floating_point()} for b in buffers), weights)
    return {
        name: mean[name].to(value.dtype) if name in mean else torch.stack([other[name] for other in buffers]).amax(0)
        for name, value in buffers[0].items()
    }
