"""Nothing computed twice in round 1: one training serves several methods and several numbers of epochs.

Before the first aggregation no method has anything to tell its clients, so most train alike: FOLA, FedCurv, FedNova and
FedBE exactly as FedAvg does. And a client that trains 20 epochs passes through the models of 1, 5 and 10 epochs on its
way. So runs of one round that differ in method and epochs alone are read off one trajectory; each equals, to the bit,
the run by itself. Whether a method trains alike is not declared but seen from its hooks: it has no penalty and no rule
of its own and starts at the initial model, on the clients' own data, with the same settings once it has adapted them.
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
from fl_lightning.errors import Diverged, UserError
from fl_lightning.experiment import Outputs, Problem, Progress
from fl_lightning.federation import draw_cohort
from fl_lightning.loop import Finish, Setup, beginning, close_round, plans_of, set_up
from fl_lightning.method import Cohort, Context, Method, Step, with_round_lr
from fl_lightning.params import Params, zip_map
from fl_lightning.probes.accuracy import score_local
from fl_lightning.record import RoundRecord, Snapshot
from fl_lightning.rules.rule import Rule
from fl_lightning.rules.usual import is_usual, usual
from fl_lightning.runs import folder as run_folder
from fl_lightning.task import Score, Weights
from fl_lightning.training import Training
from fl_lightning.workers.crew import Crew, hired


class Candidate(NamedTuple):
    """A run whose first round is about to be trained."""

    config: RunConfig
    setup: Setup
    before: Snapshot
    cohort: Cohort
    context: Context

    @property
    def epochs(self) -> int:
        """The epochs that its clients train: what the settings say, unless the method prescribes them."""
        return self.cohort.training.epochs


class Observer(NamedTuple):
    """A method that watches the training, and after how many epochs its clients stop; they may differ between runs."""

    method: Method
    epochs: frozenset[int]


class Milestone(NamedTuple):
    """A client after some of its epochs: its model, what each observer has folded up, the steps it took."""

    params: Params
    traces: tuple[Any, ...]
    num_steps: int


class Trajectory(NamedTuple):
    """A client's training so far: what each observer has folded up, the steps, the milestones by epochs."""

    traces: tuple[Any, ...]
    losses: list[Tensor]
    shares: list[float]
    milestones: dict[int, Milestone]


@dataclass(frozen=True)
class Bundle:
    """The client hooks of several methods that watch the same training, none of which has a penalty."""

    observers: tuple[Observer, ...]

    def frozen(self, context: Context) -> frozenset[str]:
        return frozenset()

    def penalty(self, context: Context) -> None:
        return None

    def rule(self, training: Training, context: Context) -> Rule:
        return usual(training)

    def trace(self, context: Context) -> Trajectory:
        traces = tuple(
            observer.method.trace(Context(context.start, shared, own))
            for observer, shared, own in zip(self.observers, context.shared, context.own, strict=True)
        )
        return Trajectory(traces, [], [], {})

    def observe(self, trace: Trajectory, step: Step) -> Trajectory:
        traces = tuple(_shown(observer, one, step) for observer, one in zip(self.observers, trace.traces, strict=True))
        trace.losses.append(step.loss)
        trace.shares.append(float(step.fraction))
        done = int(step.epoch) + 1
        if step.epoch_ends and any(done in observer.epochs for observer in self.observers):
            folded = tuple(
                pytree.tree_map_only(Tensor, torch.clone, one) if done in observer.epochs else ()  # others go on
                for observer, one in zip(self.observers, traces, strict=True)
            )
            trace.milestones[done] = Milestone(zip_map(torch.clone, step.params), folded, step.number + 1)
        return trace._replace(traces=traces)

    @property
    def observes(self) -> bool:
        return True

    @property
    def needs_squares(self) -> bool:
        return any(observer.method.needs_squares for observer in self.observers)

    @property
    def one_by_one(self) -> bool:
        return True


def share_first_round(
    configs: Sequence[RunConfig],
    out: Path,
    fresh: bool = False,
    outputs: Callable[[RunConfig], Outputs] = lambda _: Outputs(),
    workers: Crew = 1,
) -> Iterator[tuple[RunConfig, Progress]]:
    """Runs of one round that differ in method and epochs alone, trained together as far as that is exact.

    Args:
        configs: The runs.
        out: Folder of all runs and of the MLflow store.
        fresh: Compute them even if they are there.
        outputs: What stays of each.
        workers: Who trains the clients.

    Yields:
        Each run and its progress; those that cannot share train by themselves when it is consumed.
    """
    todo = [config for config in configs if fresh or run_folder.finished(config, out) is None]
    by_itself = [config for config in configs if config not in todo]
    if len(todo) > 1:
        problem = experiment.build(todo[0])
        for config, records in train_together(todo, problem, workers):
            if records is None:
                by_itself.append(config)
            else:
                yield config, experiment.rounds(config, out, fresh, outputs(config), problem, records)
    else:
        by_itself += todo
    for config in by_itself:
        yield config, experiment.rounds(config, out, fresh, outputs(config), workers=workers)


def train_together(
    configs: Sequence[RunConfig], problem: Problem, workers: Crew = 1
) -> Iterator[tuple[RunConfig, Iterator[RoundRecord] | None]]:
    """The only round of each run, or None if nobody trains as it does.

    Args:
        configs: Runs that differ in method and epochs alone.
        problem: Their data and model.
        workers: Who trains the clients.
    """
    groups: list[list[Candidate]] = []
    for config in configs:
        candidate = _candidate(config, problem)
        if candidate is None:
            yield config, None
        elif group := next((group for group in groups if _train_alike(candidate, group)), None):
            group.append(candidate)
        else:
            groups.append([candidate])
    for group in groups:
        if len(group) > 1:
            yield from _rounds_of(group, problem, workers)
        else:
            yield group[0].config, None


def _candidate(config: RunConfig, problem: Problem) -> Candidate | None:
    """The run at the start of its first round, or None if that cannot be shared."""
    method, task, federation = config.method, problem.task, config.federation
    if federation.rounds > 1 or federation.straggler_fraction > 0 or task.initial.buffers:
        return None
    if not config.training.is_steady or task.step is not None:  # a longer training may begin otherwise
        return None
    if method.one_by_one or type(method).network is not Method.network:
        return None
    try:
        setup = set_up(
            method,
            task,
            problem.dataset,
            problem.clients,
            config.training,
            federation,
            config.seed,
            problem.holdout,
        )
        before = beginning(method, task, setup.server)
    except (UserError, Diverged):
        return None  # it fails by itself, where somebody listens
    cohort = draw_cohort(method, setup.server, with_round_lr(setup.training, 1), federation, 1)
    if method.gather(cohort, setup.data)[0] is not cohort:
        return None
    context = method.broadcast(before.state, cohort)
    members = [context.of_member(position) for position in range(len(cohort.members))]
    plain = all(
        method.penalty(own) is None and not method.frozen(own) and is_usual(method.rule(cohort.training, own))
        for own in members
    )
    own_data = all(torch.equal(setup.data[n].indices.cpu(), problem.clients[n]) for n in cohort.members)
    apart = config.engine.trains_apart(task, plans_of(cohort, setup.data))
    if plain and own_data and apart and _equal(context.start, task.initial.params):
        return Candidate(config, setup, before, cohort, context)
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


def _rounds_of(
    group: Sequence[Candidate], problem: Problem, workers: Crew
) -> Iterator[tuple[RunConfig, Iterator[RoundRecord]]]:
    """Train once; then the round of each run, made when it is asked for."""
    task, longest = problem.task, max(group, key=lambda candidate: candidate.epochs)
    contexts: dict[Method, Context] = {}
    epochs: dict[Method, set[int]] = {}
    for candidate in group:
        contexts.setdefault(candidate.config.method, candidate.context)
        epochs.setdefault(candidate.config.method, set()).add(candidate.epochs)
    methods = list(contexts)
    bundle = Bundle(tuple(Observer(method, frozenset(epochs[method])) for method in methods))
    told = contexts.values()
    context = Context(task.initial.params, tuple(c.shared for c in told), tuple(c.own for c in told))
    plans = plans_of(longest.cohort, longest.setup.data)
    with hired(longest.config.engine, workers, 1, longest.config.compute.threads) as engine:
        fits = list(engine.fit(bundle, task, context, task.initial.buffers, plans))
    scores: dict[int, list[Score]] = {}
    for candidate in group:
        place = methods.index(candidate.config.method)
        yield candidate.config, _record(candidate, problem, fits, place, scores)


def _record(
    candidate: Candidate, problem: Problem, fits: Sequence[Fit], place: int, scores: dict[int, list[Score]]
) -> Iterator[RoundRecord]:
    epochs, cohort = candidate.epochs, candidate.cohort
    plans = plans_of(cohort, candidate.setup.data)
    own = []
    for fit, plan in zip(fits, plans, strict=True):
        trajectory: Trajectory = fit.local.trace
        params, traces, steps = trajectory.milestones[epochs]
        local = fit.local._replace(
            params=params,
            trace=traces[place],
            num_steps=steps,
            num_epochs=epochs,
            training=cohort.training,
            plan=plan,
        )
        own.append(Fit(local, mean_loss(trajectory.losses[:steps], trajectory.shares[:steps], epochs)))
    method = candidate.config.method
    context = candidate.context
    finished = Finish(method)((fit, context.of_member(position)) for position, fit in enumerate(own))
    record = close_round(method, cohort, candidate.before, context, plans, finished, 0.0, candidate.config.engine)
    if not candidate.config.evaluation.local:
        yield record
        return
    if epochs not in scores:  # the clients' models are the same for every method
        models = [Weights(result.local.params, result.local.buffers) for result in record.clients]
        scores[epochs] = score_local(problem.task, models, problem.dataset, candidate.config.evaluation)
    clients = [result._replace(score=score) for result, score in zip(record.clients, scores[epochs], strict=True)]
    yield record._replace(clients=clients)


def _shown(observer: Observer, trace: Any, step: Step) -> Any:
    """An observer's statistics after a step that it might have seen in a training of its own."""
    method, epochs = observer
    if not method.observes or step.epoch >= max(epochs):
        return trace
    return method.observe(trace, step if method.needs_squares else step._replace(squares=None))


def _equal(one: Any, other: Any) -> bool:
    """Whether two trees hold the same numbers, to the bit."""
    left, left_shape = pytree.tree_flatten(one)
    right, right_shape = pytree.tree_flatten(other)
    return left_shape == right_shape and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(left, right, strict=True)
    )
