"""Nothing computed twice in round 1: one training serves several methods and several numbers of epochs.

Before the first aggregation no method has anything to tell its clients, so most train alike: FOLA, FedCurv, FedNova and
FedBE exactly as FedAvg does. And a client that trains 20 epochs passes through the models of 1, 5 and 10 epochs on its
way. So runs of one round that differ in method and epochs alone are read off one trajectory; each equals, to the bit,
the run by itself. Whether a method trains alike is not declared but seen from its hooks: it has no penalty and starts
at the initial model, on the clients' own data.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fl_lightning import experiment
from fl_lightning.config import RunConfig
from fl_lightning.engines.engine import Fit, mean_loss
from fl_lightning.errors import UserError
from fl_lightning.experiment import Outputs, Problem, Progress
from fl_lightning.federation import draw_cohort
from fl_lightning.loop import Stage, beginning, close_round, plans_of, set_up
from fl_lightning.method import Cohort, Context, Local, Method, Step, with_round_lr
from fl_lightning.params import Params, zip_map
from fl_lightning.probes.accuracy import score
from fl_lightning.record import RoundRecord, Snapshot
from fl_lightning.runs import folder as run_folder
from fl_lightning.task import Score, Weights


class Candidate(NamedTuple):
    """A run whose first round is about to be trained."""

    config: RunConfig
    stage: Stage
    before: Snapshot
    cohort: Cohort
    context: Context


class Kept(NamedTuple):
    """A client after some of its epochs: its model, what each method has folded up, the steps it took."""

    params: Params
    traces: tuple[Any, ...]
    num_steps: int


class Way(NamedTuple):
    """A client's way through all epochs."""

    traces: tuple[Any, ...]
    losses: list[Tensor]
    shares: list[float]
    kept: dict[int, Kept]


@dataclass(frozen=True)
class Bundle(Method):
    """Several methods that watch the same training, and the epochs after which they want to see the client."""

    methods: tuple[Method, ...] = ()
    epochs: frozenset[int] = frozenset()

    def init(self, params: Params, num_clients: int) -> Any:
        raise NotImplementedError("a bundle only trains")

    def trace(self, context: Context) -> Way:
        traces = tuple(
            method.trace(Context(context.start, shared, own))
            for method, shared, own in zip(self.methods, context.shared, context.own, strict=True)
        )
        return Way(traces, [], [], {})

    def observe(self, trace: Way, step: Step) -> Way:
        without = step._replace(squares=None)
        traces = tuple(
            method.observe(one, step if method.needs_squares else without) if method.observes else one
            for method, one in zip(self.methods, trace.traces, strict=True)
        )
        trace.losses.append(step.loss)
        trace.shares.append(float(step.fraction))
        if step.epoch_ends and step.epoch + 1 in self.epochs:
            trace.kept[int(step.epoch) + 1] = Kept(zip_map(torch.clone, step.params), traces, step.number + 1)
        return trace._replace(traces=traces)

    def report(self, local: Local, context: Context) -> Any:
        raise NotImplementedError("a bundle only trains")

    def aggregate(self, state: Any, cohort: Cohort, reports: Sequence[Any]) -> Any:
        raise NotImplementedError("a bundle only trains")

    @property
    def needs_squares(self) -> bool:
        return any(method.needs_squares for method in self.methods)

    @property
    def observes(self) -> bool:
        return True

    @property
    def one_by_one(self) -> bool:
        return True


def share_first_round(
    configs: Sequence[RunConfig],
    out: Path,
    fresh: bool = False,
    outputs: Callable[[RunConfig], Outputs] = lambda _: Outputs(),
) -> Iterator[tuple[RunConfig, Progress]]:
    """Runs of one round that differ in method and epochs alone, trained together as far as that is exact.

    Args:
        configs: The runs.
        out: Folder of all runs and of the MLflow store.
        fresh: Compute them even if they are there.
        outputs: What stays of each.

    Yields:
        Each run and its progress; those that cannot share train by themselves when it is consumed.
    """
    todo = [config for config in configs if fresh or run_folder.finished(config, out) is None]
    by_itself = [config for config in configs if config not in todo]
    together: list[Candidate] = []
    problem = experiment.build(todo[0]) if len(todo) > 1 else None
    for config in todo:
        candidate = None if problem is None else _candidate(config, problem)
        if candidate is not None and (not together or _train_alike(candidate, together)):
            together.append(candidate)
        else:
            by_itself.append(config)
    if problem is not None and len(together) > 1:
        records = _records(together, problem)
        for candidate, record in zip(together, records, strict=True):
            config = candidate.config
            yield config, experiment.rounds(config, out, fresh, outputs(config), problem, record)
    else:
        by_itself += [candidate.config for candidate in together]
    for config in by_itself:
        yield config, experiment.rounds(config, out, fresh, outputs(config))


def _candidate(config: RunConfig, problem: Problem) -> Candidate | None:
    """The run at the start of its first round, or None if that cannot be shared."""
    method, task, federation = config.method, problem.task, config.federation
    if federation.rounds > 1 or federation.straggler_fraction > 0 or task.initial.buffers:
        return None
    if method.one_by_one:
        return None
    try:
        stage = set_up(
            method,
            task,
            problem.dataset,
            problem.clients,
            config.training,
            federation,
            config.seed,
            problem.holdout,
        )
    except UserError:
        return None  # it fails by itself, where somebody listens
    before = beginning(method, task, stage.server)
    cohort = draw_cohort(method, stage.server, with_round_lr(stage.training, 1), federation, 1)
    if method.gather(cohort, stage.data)[0] is not cohort:
        return None
    context = method.broadcast(before.state, cohort)
    plain = all(method.penalty(context.of_member(position)) is None for position in range(len(cohort.members)))
    own_data = all(torch.equal(d.indices.cpu(), c) for d, c in zip(stage.data, problem.clients, strict=True))
    alone = config.engine.one_by_one(task, plans_of(cohort, stage.data))
    if plain and own_data and alone and _equal(context.start, task.initial.params):
        return Candidate(config, stage, before, cohort, context)
    return None


def _train_alike(candidate: Candidate, others: Sequence[Candidate]) -> bool:
    """Whether a run's clients train as those of the others do, up to the number of epochs."""
    first = others[0].cohort
    alike = (
        candidate.cohort.members == first.members
        and replace(candidate.cohort.training, epochs=first.training.epochs) == first.training
    )
    # What a method tells its clients must not depend on the number of epochs.
    same = [other for other in others if other.config.method == candidate.config.method]
    return alike and all(_equal(other.context, candidate.context) for other in same)


def _records(together: Sequence[Candidate], problem: Problem) -> Iterator[Iterator[RoundRecord]]:
    """Train once; then the round of each run, made when it is asked for."""
    task, longest = problem.task, max(together, key=lambda one: one.config.training.epochs)
    methods: dict[Method, Context] = {}
    for candidate in together:
        methods.setdefault(candidate.config.method, candidate.context)
    bundle = Bundle(tuple(methods), frozenset(candidate.config.training.epochs for candidate in together))
    contexts = methods.values()
    context = Context(task.initial.params, tuple(c.shared for c in contexts), tuple(c.own for c in contexts))
    plans = plans_of(longest.cohort, longest.stage.data)
    fits = list(longest.config.engine.fit(bundle, task, context, task.initial.buffers, plans))
    scores: dict[int, list[Score]] = {}
    for candidate in together:
        yield _record(candidate, problem, fits, list(methods).index(candidate.config.method), scores)


def _record(
    candidate: Candidate, problem: Problem, fits: Sequence[Fit], place: int, scores: dict[int, list[Score]]
) -> Iterator[RoundRecord]:
    epochs, cohort = candidate.config.training.epochs, candidate.cohort
    plans = plans_of(cohort, candidate.stage.data)
    own = []
    for fit, plan in zip(fits, plans, strict=True):
        way: Way = fit.local.trace
        params, traces, steps = way.kept[epochs]
        local = fit.local._replace(
            params=params,
            trace=traces[place],
            num_steps=steps,
            num_epochs=epochs,
            training=cohort.training,
            plan=plan,
        )
        own.append(Fit(local, mean_loss(way.losses[:steps], way.shares[:steps], epochs)))
    method = candidate.config.method
    record = close_round(method, cohort, candidate.before, candidate.context, plans, own, seconds_broadcast=0.0)
    if epochs not in scores:  # the clients' models are the same for every method
        models = [Weights(result.local.params, result.local.buffers) for result in record.clients]
        scores[epochs] = score(problem.task, models, problem.dataset)
    clients = [result._replace(score=score) for result, score in zip(record.clients, scores[epochs], strict=True)]
    yield record._replace(clients=clients)


def _equal(one: Any, other: Any) -> bool:
    """Whether two trees hold the same numbers, to the bit."""
    left, left_shape = pytree.tree_flatten(one)
    right, right_shape = pytree.tree_flatten(other)
    return left_shape == right_shape and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(left, right, strict=True)
    )
