"""The federated loop, as a generator: one record per round. Whoever consumes it measures, logs, saves and stops."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning import streams
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.plan import ClientData, Plan
from fl_lightning.engines.engine import Engine, Fit
from fl_lightning.engines.functional import Functional
from fl_lightning.errors import Diverged, require
from fl_lightning.method import Cohort, Context, Local, Method, Server, with_round_lr
from fl_lightning.params import Params, all_finite, count, weighted_sum, zip_map
from fl_lightning.task import Task
from fl_lightning.training import Training

if TYPE_CHECKING:
    from fl_lightning.probes import Score

# Traffic is counted in float32, whatever the simulation computes in.
BYTES_PER_NUMBER = 4
# The id under which the server's own data go.
SERVER = -1


@dataclass(frozen=True)
class Federation:
    """How many rounds, and who takes part in them.

    Attributes:
        rounds: Communication rounds (R).
        fraction: Share of the clients that takes part in a round (participation, C); at least one client does.
        cohort: Number of clients per round, instead of the fraction.
        straggler_fraction: Share of the cohort that manages only some of its epochs, 1 to E - 1 at random.
        start: Folder of a saved run whose final model is where round 1 starts; null starts from new weights.
        weighting: Clients count by their numbers of samples (p_n = m_n / sum m), or all the same.
    """

    rounds: int = 20
    fraction: float = 1.0
    cohort: int | None = None
    straggler_fraction: float = 0.0
    start: str | None = None
    weighting: Literal["samples", "uniform"] = "samples"

    def __post_init__(self) -> None:
        require(self.rounds >= 1, f"federation.rounds must be at least 1, got {self.rounds}")
        require(0 < self.fraction <= 1, f"federation.fraction must lie in (0, 1], got {self.fraction}")
        require(
            self.cohort is None or self.cohort >= 1,
            f"federation.cohort must be at least 1, or null to use federation.fraction, got {self.cohort}",
        )
        require(
            self.cohort is None or self.fraction == 1,
            f"federation.cohort {self.cohort} and federation.fraction {self.fraction} both say how many clients take "
            "part; give only one of them",
        )
        require(
            0 <= self.straggler_fraction <= 1,
            f"federation.straggler_fraction must lie in [0, 1], got {self.straggler_fraction}",
        )


class ClientResult(NamedTuple):
    """A client of a round, as the consumer sees it.

    Attributes:
        local: The finished client; its model is `local.params`.
        train_loss: Mean task loss along its training.
        prior_loss: Value of the method's penalty at its final model, 0 without one.
        score: Its model on the test set, if somebody has measured that already.
    """

    local: Local
    train_loss: float
    prior_loss: float
    score: "Score | None" = None


class Snapshot(NamedTuple):
    """The server after a round: all that is needed to go on."""

    round: int
    state: Any
    buffers: Params


class RoundRecord(NamedTuple):
    """What happened in a round.

    Attributes:
        round: r = 1, 2, ...
        cohort: Who took part.
        before: The server before the round.
        clients: The members of the cohort after training and before aggregation.
        reports: What they sent.
        after: The server after the round.
        bytes_down: Sent to all clients of the cohort, in float32.
        bytes_up: Sent by all of them.
        gradient_evaluations: Gradients of single samples that were computed.
        seconds_local: Time of the local training.
        seconds_server: Time of broadcast and aggregation.
    """

    round: int
    cohort: Cohort
    before: Snapshot
    clients: list[ClientResult]
    reports: list[Any]
    after: Snapshot
    bytes_down: int
    bytes_up: int
    gradient_evaluations: int
    seconds_local: float
    seconds_server: float


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
) -> Iterator[RoundRecord]:
    """The rounds of a method: settings are checked now, each round is computed when it is asked for.

    Args:
        method: What is sent, learnt and aggregated.
        task: Model and likelihood; its initial weights are where round 1 starts.
        dataset: The samples of all clients, and the test set.
        clients: Indices into the training set, one tensor per client; empty ones never take part.
        training: How clients train.
        federation: Rounds and participation.
        engine: How the training is carried out.
        seed: Key of all random draws.
        holdout: Indices of training samples that belong to no client, for methods whose server has data.
        resume: Go on after this round instead of starting anew.

    Returns:
        An iterator over one record per round. It raises `Diverged` when a model is no longer finite.

    Raises:
        UserError: If the settings do not go together.
    """
    stage = set_up(method, task, dataset, clients, training, federation, seed, holdout)

    def rounds() -> Iterator[RoundRecord]:
        now = resume or beginning(method, task, stage.server)
        for number in range(now.round + 1, federation.rounds + 1):
            cohort = draw_cohort(method, stage.server, with_round_lr(stage.training, number), federation, number)
            data: Sequence[ClientData] = stage.data
            if method.pools:
                cohort, data = in_one_place(cohort, data)
            record = run_round(method, task, data, engine, cohort, now)
            now = record.after
            yield record
            del record  # its clients' models need not stay while the next round is computed

    return rounds()


class Stage(NamedTuple):
    """What all rounds have in common.

    Attributes:
        server: What the server has beside its state.
        training: How clients train.
        data: The samples each client trains on.
    """

    server: Server
    training: Training
    data: list[ClientData]


def set_up(
    method: Method,
    task: Task,
    dataset: Dataset,
    clients: Sequence[Tensor],
    training: Training,
    federation: Federation,
    seed: int,
    holdout: Tensor | None,
) -> Stage:
    """Check the settings, and put everything in its place; see `federate`."""
    dataset, device = dataset.to(task.device), task.device
    spare = torch.empty(0, dtype=torch.long) if holdout is None else holdout
    server = Server(
        task=task,
        sizes=tuple(len(indices) for indices in clients),
        holdout=ClientData(SERVER, dataset, spare.to(device), task.dtype),
        seed=seed,
    )
    training = method.adapt(training)
    check_participation(federation, server.sizes)
    method.check(training, server)
    indices = method.local_data(clients, spare, seed)
    data = [ClientData(n, dataset, places.to(device), task.dtype) for n, places in enumerate(indices)]
    return Stage(server, training, data)


def beginning(method: Method, task: Task, server: Server) -> Snapshot:
    """The server before round 1."""
    start = initial(method, task, len(server.sizes))
    return start._replace(state=method.prepare(start.state, server))


def initial(method: Method, task: Task, num_clients: int) -> Snapshot:
    """The server before it has prepared anything, on a copy of the weights: the task's own are there for other runs,
    even beside a method that breaks the rules and writes into its state.
    """
    params, buffers = (zip_map(torch.clone, part) for part in task.initial)
    return Snapshot(0, method.init(params, num_clients), buffers)


def run_round(
    method: Method, task: Task, data: Sequence[ClientData], engine: Engine, cohort: Cohort, before: Snapshot
) -> RoundRecord:
    """One round: broadcast, train, report, aggregate."""
    start_time = time.perf_counter()
    context = method.broadcast(before.state, cohort)
    seconds_broadcast = time.perf_counter() - start_time
    plans = plans_of(cohort, data)
    fits = engine.fit(method, task, context, before.buffers, plans)
    return close_round(method, cohort, before, context, plans, fits, seconds_broadcast)


def plans_of(cohort: Cohort, data: Sequence[ClientData]) -> list[Plan]:
    """The batches of every member of the cohort."""
    return [
        Plan(data[n], cohort.server.seed, cohort.round, cohort.training, epochs)
        for n, epochs in zip(cohort.members, cohort.epochs, strict=True)
    ]


def close_round(
    method: Method,
    cohort: Cohort,
    before: Snapshot,
    context: Context,
    plans: Sequence[Plan],
    fits: Iterable[Fit],
    seconds_broadcast: float,
) -> RoundRecord:
    """The second half of a round: clients, as they finish, report; then the server aggregates."""
    number = cohort.round
    start_time = time.perf_counter()
    results, reports = [], []
    for position, fit in enumerate(fits):
        if not all_finite(fit.local.params):
            raise Diverged(number, fit.local.client)
        own_context = context.of_member(position)
        reports.append(method.report(fit.local, own_context))
        penalty = method.penalty(own_context)
        prior_loss = 0.0 if penalty is None else float(penalty.value(fit.local.params))
        results.append(ClientResult(fit.local._replace(trace=()), fit.train_loss, prior_loss))
    trained_time = time.perf_counter()

    state = method.aggregate(before.state, cohort, reports)
    buffers = average_buffers([result.local.buffers for result in results], cohort.weights)
    if not all_finite(state.params):
        raise Diverged(number, None)
    end_time = time.perf_counter()

    travels = 0 if method.pools else BYTES_PER_NUMBER
    samples = sum(len(plan.data) * (plan.num_epochs + method.extra_passes) for plan in plans)
    return RoundRecord(
        round=number,
        cohort=cohort,
        before=before,
        clients=results,
        reports=reports,
        after=Snapshot(number, state, buffers),
        bytes_down=travels * len(plans) * count((context.start, context.shared, before.buffers)),
        bytes_up=travels * count((reports, [result.local.buffers for result in results])),
        gradient_evaluations=samples,
        seconds_local=trained_time - start_time,
        seconds_server=seconds_broadcast + (end_time - trained_time),
    )


def draw_cohort(method: Method, server: Server, training: Training, federation: Federation, round: int) -> Cohort:
    """The clients of a round, drawn without replacement, and how far each of them gets.

    Both draws are the same for every method at one seed; a method that drops stragglers goes on with the others.
    """
    eligible = [n for n, size in enumerate(server.sizes) if size > 0]
    number = cohort_size(federation, len(eligible))
    chosen = torch.randperm(len(eligible), generator=streams.generator(server.seed, "cohort", round))[:number]
    members = sorted(eligible[i] for i in chosen.tolist())
    epochs = dict.fromkeys(members, training.epochs)
    stragglers = draw_stragglers(members, training.epochs, federation, server.seed, round)
    if method.drops_stragglers and len(stragglers) < len(members):
        members = [n for n in members if n not in stragglers]
    epochs |= stragglers
    by_samples = federation.weighting == "samples"
    sizes = [server.sizes[n] if by_samples else 1 for n in members]
    population = sum(server.sizes) if by_samples else len(eligible)
    return Cohort(
        round=round,
        members=tuple(members),
        weights=tuple(size / sum(sizes) for size in sizes),
        shares=tuple(size / population for size in sizes),
        epochs=tuple(epochs[n] for n in members),
        num_clients=len(server.sizes),
        training=training,
        server=server,
    )


def draw_stragglers(
    members: Sequence[int], epochs: int, federation: Federation, seed: int, round: int
) -> dict[int, int]:
    """Which members manage only some epochs, and how many: uniform in 1 .. E - 1."""
    number = math.floor(federation.straggler_fraction * len(members) + 0.5)
    if number == 0 or epochs == 1:
        return {}
    stream = streams.generator(seed, "stragglers", round)
    slow = torch.randperm(len(members), generator=stream)[:number].tolist()
    managed = torch.randint(1, epochs, (number,), generator=stream).tolist()
    return {members[i]: done for i, done in zip(slow, managed, strict=True)}


def cohort_size(federation: Federation, num_eligible: int) -> int:
    """How many clients take part in every round."""
    return federation.cohort or max(1, math.floor(federation.fraction * num_eligible + 0.5))


def in_one_place(cohort: Cohort, data: Sequence[ClientData]) -> tuple[Cohort, list[ClientData]]:
    """The cohort's data as those of a single client; their order says nothing of who brought which."""
    indices = torch.cat([data[n].indices for n in cohort.members]).sort().values
    alone = cohort._replace(
        members=(0,), weights=(1.0,), shares=(sum(cohort.shares),), epochs=(cohort.training.epochs,), num_clients=1
    )
    return alone, [replace(data[0], client=0, indices=indices)]


def check_participation(federation: Federation, sizes: Sequence[int]) -> None:
    """Refuse a cohort that cannot be drawn."""
    eligible = sum(1 for size in sizes if size > 0)
    require(eligible > 0, "no client has any data; use more samples (data.subset) or fewer clients")
    require(
        federation.cohort is None or federation.cohort <= eligible,
        f"federation.cohort asks for {federation.cohort} clients per round, but only {eligible} of the {len(sizes)} "
        "clients have data; lower it or set federation.fraction instead",
    )


def average_buffers(buffers: Sequence[Params], weights: Sequence[float]) -> Params:
    """BatchNorm's statistics are averaged like models; counters take the largest value."""
    mean = weighted_sum(({k: v for k, v in b.items() if v.is_floating_point()} for b in buffers), weights)
    return {
        name: mean[name].to(value.dtype) if name in mean else torch.stack([other[name] for other in buffers]).amax(0)
        for name, value in buffers[0].items()
    }
