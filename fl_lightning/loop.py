"""The federated loop, as a generator: one record per round. The caller measures, logs, saves and stops."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.client_state import Snapshot
from fl_lightning.data.batches import SERVER, AllClients, ClientData, Plan
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.model_checks import check_batches, check_fit, smallest_batch
from fl_lightning.data.shares import sizes_of
from fl_lightning.engines.base import Engine, Fit
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.parallel.executor import Executor, executing
from fl_lightning.engines.returned import (
    check_context,
    check_first_state,
    check_samples,
    check_state,
    check_traffic,
    check_type,
)
from fl_lightning.errors import Diverged, UserError, require
from fl_lightning.federation import check_participation, cohort_size, draw_cohort
from fl_lightning.method import (
    Cohort,
    Context,
    Method,
    Server,
    ServerData,
    StateFromNetwork,
    adapted,
    task_of,
    traffic,
    with_round_lr,
)
from fl_lightning.models.inputs import each
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, all_finite, zip_map
from fl_lightning.record import ClientResult, RoundRecord
from fl_lightning.system import activity
from fl_lightning.system.plugins import plugin_errors, wrong
from fl_lightning.training import Federation, Training

# Traffic is counted in float32, whatever the simulation computes in.
BYTES_PER_NUMBER = 4


class Problem(NamedTuple):
    """What the clients of a federation are to learn.

    Attributes:
        task: Model and likelihood; its initial weights are where round 1 starts. A method with a network of its own
            trains that one, made from the model: `task_of(method, task)`.
        dataset: The samples of all clients, and the test set.
        clients: Indices into the training set, one tensor per client; empty ones never take part.
        holdout: Indices of training samples that belong to no client, for methods whose server has data.
        seed: Key of all random draws.
        evaluate_clients: Measures clients where they were trained, such as `ClientEvaluator`; without one, the caller
            measures the records.
    """

    task: Task
    dataset: Dataset
    clients: Sequence[Tensor]
    holdout: Tensor = torch.empty(0, dtype=torch.long)
    seed: int = 0
    evaluate_clients: "EvaluateClients | None" = None


def federate(
    method: Method,
    problem: Problem,
    training: Training = Training(),  # noqa: B008 - frozen
    federation: Federation = Federation(),  # noqa: B008 - frozen
    engine: Engine = Functional(),  # noqa: B008 - frozen
    resume: Snapshot | None = None,
    workers: Executor = 1,
) -> Iterator[RoundRecord]:
    """The rounds of a method: settings are checked now, each round is computed when it is asked for.

    Args:
        method: What is sent, learnt and aggregated.
        problem: Model, data, and the samples of each client.
        training: How clients train.
        federation: Rounds and participation.
        engine: How the training is carried out.
        resume: Go on after this round instead of starting anew.
        workers: How many processes train the clients, or `Workers` with more to say; `auto` takes all cores. Unless it
            is 1, torch computes with one thread everywhere while a round lasts, and the numbers are the same for all of
            them; and for 1 after `torch.set_num_threads(1)`.

    Returns:
        An iterator over one record per round. It raises `Diverged` when a model is no longer finite.

    Raises:
        UserError: If the settings do not go together.
    """
    with plugin_errors(method):
        task = task_of(method, problem.task)
        setup = set_up(method, problem._replace(task=task), training, federation)
        finish = Finish(method, problem.evaluate_clients)
        engine.prepare(method, task, setup.dataset, finish)

    def rounds() -> Iterator[RoundRecord]:
        with plugin_errors(method):
            now = resume or beginning(method, task, setup.server)
        most = cohort_size(federation, len(problem.clients)) if now.round < federation.rounds else 0
        with executing(engine, workers, most) as trainer:
            alike = nullcontext if trainer is engine else _one_thread
            with alike():
                trainer.prepare(method, task, setup.dataset, finish)
            for number in range(now.round + 1, federation.rounds + 1):
                cohort = draw_cohort(method, setup.server, with_round_lr(setup.training, number), federation, number)
                with alike(), plugin_errors(method):
                    cohort, data = _gathered(method, cohort, setup.data)
                    record = run_round(task, data, trainer, cohort, now, finish)
                now = record.after
                yield record
                del record  # its clients' models need not stay while the next round is computed

    return rounds()


def _gathered(method: Method, cohort: Cohort, data: Sequence[ClientData]) -> tuple[Cohort, Sequence[ClientData]]:
    if not isinstance(method, ServerData):
        return cohort, data
    gathered = method.gather(cohort, data)
    expected = "a tuple of a Cohort and the data of its members"
    check_type(method, "gather", gathered, tuple, expected)
    if len(gathered) != 2 or not isinstance(gathered[0], Cohort):
        raise wrong(method, "gather", expected, f"a tuple of {', '.join(type(one).__name__ for one in gathered)}")
    return gathered


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


def set_up(method: Method, problem: Problem, training: Training, federation: Federation) -> Setup:
    """Check the settings, and put everything in its place; see `federate`."""
    task, clients, seed = problem.task, problem.clients, problem.seed
    dataset = problem.dataset.to(task.device)
    held = ClientData(SERVER, dataset, problem.holdout.to(task.device), task.dtype)
    check_fit(task, held)
    server = Server(
        task=task,
        sizes=sizes_of(clients),
        holdout=held,
        seed=seed,
        smallest_batch=smallest_batch(task, held),
    )
    training = adapted(method, with_user_optimiser(training, task))
    check_type(method, "adapt", training, Training, "the Training that is used")
    check_participation(federation, server.sizes)
    method.check(training, server)
    indices = clients
    if isinstance(method, ServerData):
        indices = method.local_data(clients, problem.holdout, seed)
        check_samples(method, indices, len(clients))
    check_batches(training, sizes_of(indices), server.smallest_batch)
    return Setup(server, training, AllClients(dataset, indices, task.dtype), dataset)


def with_user_optimiser(training: Training, task: Task) -> Training:
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
    if not isinstance(method, ServerData):
        return start
    state = method.prepare(start.state, server)
    check_state(method, "prepare", state, start.state)
    return start._replace(state=state)


def initial(method: Method, task: Task, num_clients: int, dataset: Dataset) -> Snapshot:
    """The server before it has prepared anything, on a copy of the weights: the task's own are there for other runs,
    even beside a method that breaks the rules and writes into its state.
    """
    params, buffers = (zip_map(torch.clone, part) for part in task.initial)
    if isinstance(method, StateFromNetwork):
        x = dataset.inputs(each(lambda one: one[:1].to(task.device), dataset.train_x), task.dtype)
        state = method.begin(params, num_clients, task, x)
    else:
        state = method.init(params, num_clients)
    check_first_state(method, state, task.initial.params)
    return Snapshot(0, state, buffers)


# Measures clients that have finished: returns them with what it has found.
EvaluateClients = Callable[[Sequence[ClientResult]], list[ClientResult]]
# What a client costs beside its samples, in samples.
LEAST_WORK = 100.0


class Finished(NamedTuple):
    """A client at the end of its round.

    Attributes:
        result: For the caller.
        report: For the server.
        seconds: That it took.
    """

    result: ClientResult
    report: Any
    seconds: float


@dataclass(frozen=True)
class Finish:
    """What becomes of clients where they were trained: they report and are evaluated; their statistics stay there.

    Attributes:
        method: The method.
        evaluate_clients: Measures them.
    """

    method: Method
    evaluate_clients: EvaluateClients | None = None

    def __call__(self, trained: Iterable[tuple[Fit, Context]]) -> Iterator[Finished]:
        if self.evaluate_clients is None:
            yield from self._report(trained)
            return
        finished = list(self._report(trained))
        start = time.perf_counter()
        evaluated = self.evaluate_clients([one.result for one in finished])
        each = (time.perf_counter() - start) / max(1, len(finished))
        for one, result in zip(finished, evaluated, strict=True):
            yield Finished(result, one.report, one.seconds + each)

    def _report(self, trained: Iterable[tuple[Fit, Context]]) -> Iterator[Finished]:
        start = time.perf_counter()
        known, penalty = None, None
        for fit, context in trained:
            if not all_finite(fit.local.params):
                raise Diverged(fit.local.plan.round, fit.local.client)
            report = self.method.report(fit.local, context)
            if report is None:
                raise wrong(self.method, "report", "what the client sends, a NamedTuple of tensors", "None")
            if context is not known:  # the same for all clients, unless they remember anything
                known, penalty = context, self.method.penalty(context)
            prior_loss = 0.0 if penalty is None else float(penalty.value(fit.local.params))
            result = ClientResult(
                fit.local._replace(path_statistics=(), optimiser_state=()), fit.train_loss, prior_loss
            )
            now = time.perf_counter()
            yield Finished(result, report, now - start)
            start = time.perf_counter()

    def work(self, plan: Plan) -> float:
        """About how long a client takes: the samples that it sees, a test sample counting a third."""
        data = plan.data
        tested = 0.0 if self.evaluate_clients is None else len(data.dataset.test_y) / 3
        return LEAST_WORK + len(data) * (plan.num_epochs + self.method.traits.extra_passes) + tested


def run_round(
    task: Task, data: Sequence[ClientData], engine: Engine, cohort: Cohort, before: Snapshot, finish: Finish
) -> RoundRecord:
    """One round: broadcast, train, report, aggregate."""
    method, number = finish.method, cohort.round
    start_time = time.perf_counter()
    context = method.broadcast(before.state, cohort)
    broadcast_time = time.perf_counter()
    check_context(method, context, cohort, before.state.params)
    plans = [
        Plan(data[n], cohort.server.seed, number, cohort.training, epochs, cohort.server.smallest_batch)
        for n, epochs in zip(cohort.members, cohort.epochs, strict=True)
    ]
    work = [finish.work(plan) for plan in plans]
    sent_time = time.perf_counter()
    finished = list(engine.train(method, task, context, before.buffers, plans, finish, work))
    trained_time = time.perf_counter()

    activity.say("aggregating")
    results, reports = [one.result for one in finished], [one.report for one in finished]
    state = method.aggregate(before.state, cohort, reports)
    check_state(method, "aggregate", state, before.state)
    trained = [Weights(one.local.params, one.local.buffers) for one in results]
    buffers = task.merged_buffers(before.buffers, trained, cohort.weights)
    if not all_finite(state.params):
        raise Diverged(number, None)
    end_time = time.perf_counter()

    busy, extra = sum(one.seconds for one in finished), method.traits.extra_passes
    return RoundRecord(
        round=number,
        cohort=cohort,
        before=before,
        clients=results,
        reports=reports,
        after=Snapshot(number, state, buffers),
        bytes_down=bytes_down(method, context, before.buffers, len(plans)),
        bytes_up=bytes_up(method, task, reports, results),
        gradient_evaluations=sum(len(plan.data) * (plan.num_epochs + extra) for plan in plans),
        seconds_local=trained_time - sent_time,
        seconds_server=(broadcast_time - start_time) + (end_time - trained_time),
        workers_idle=_idle(busy, engine.workers, trained_time - sent_time),
    )


def bytes_of(method: Method, message: Any, buffers: Params) -> int:
    """What it takes to send a context or a report, with the model's buffers, in whole bytes."""
    numbers = traffic(method, (message, buffers))
    check_traffic(method, numbers)
    return math.ceil(BYTES_PER_NUMBER * numbers)


def bytes_up(method: Method, task: Task, reports: Sequence[Any], results: Sequence[ClientResult]) -> int:
    """What it takes to send all reports, each with the buffers that training changes."""
    pairs = zip(reports, results, strict=True)
    return sum(bytes_of(method, report, task.sent_buffers(one.local.buffers)) for report, one in pairs)


def bytes_down(method: Method, context: Context, buffers: Params, number: int) -> int:
    """What it takes to send the context to all members of the cohort, each of which has the rest in its memory."""
    sent = context._replace(own=())
    if not context.own_start:
        return number * bytes_of(method, sent, buffers)
    return sum(bytes_of(method, sent.of_member(position), buffers) for position in range(number))


def _idle(busy: float, workers: int, seconds: float) -> float | None:
    """The share of the workers' time spent waiting; None without workers."""
    return max(0.0, 1 - busy / (workers * seconds)) if workers > 1 else None
