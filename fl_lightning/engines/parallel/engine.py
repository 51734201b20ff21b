"""An engine around an engine: the clients of a round are trained in several processes, to the same bits.

What decides a client's bits goes with it: its batches and noise are keyed by seed, round and client, clients that are
trained at once stay together, and sums over clients are formed by the driver in the order of their ids. So it does not
matter how many workers there are, which clients each trains, and which workers die.

Clients are handed out longest first, so that nothing waits for one at the end. Short ones go together, because every
call costs about a millisecond; but never more of them than a worker may lose.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fl_lightning.data.batches import Plan
from fl_lightning.data.dataset import Dataset
from fl_lightning.engines.base import Engine, Finished, Finisher, Fit
from fl_lightning.engines.parallel.pool import Pool
from fl_lightning.engines.parallel.serialization import Serialized, pack, unpack
from fl_lightning.engines.parallel.worker import Failure, Problem, Start, TorchSettings, group_of, names_of
from fl_lightning.errors import UserError, require
from fl_lightning.method import Context, Method
from fl_lightning.models.task import Task
from fl_lightning.params import Params
from fl_lightning.system import activity
from fl_lightning.system.activity import Pace

# Parts into which each worker's share of the work is cut, at least.
PARTS = 8
# Seconds of work that are worth a call, and those that may be lost with a worker beside its present client.
LEAST, MOST = 0.02, 0.2


class Bundle(NamedTuple):
    """Groups of clients that are handed out together.

    Attributes:
        groups: Positions in the cohort.
        clients: The ids of all of them.
    """

    groups: tuple[range, ...]
    clients: tuple[int, ...]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.clients[:5])) + (" and others" if len(self.clients) > 5 else "")
        return f"client {shown}"


def bundles(
    groups: Sequence[range], clients: Sequence[int], work: Sequence[float], workers: int, seconds_per_work: float | None
) -> list[Bundle]:
    """What to hand out, the longest first.

    Args:
        groups: Clients that are trained at once, by position in the cohort.
        clients: The ids of all clients of the cohort.
        work: How long each client takes, in any unit.
        workers: How many there are.
        seconds_per_work: How long a unit takes, if that is known; otherwise each group goes alone.

    >>> found = bundles([range(n, n + 1) for n in range(5)], [0, 3, 4, 7, 9], [1, 9, 1, 1, 4], 2, 0.01)
    >>> [bundle.clients for bundle in found]
    [(3,), (9,), (0, 4), (7,)]
    """

    def length(group: range) -> float:
        return sum(work[position] for position in group)

    longest_first = sorted(groups, key=length, reverse=True)
    room = 0.0
    if seconds_per_work:
        shortest, largest = LEAST / seconds_per_work, MOST / seconds_per_work
        room = min(max(sum(work) / (PARTS * workers), shortest), largest)
    packed: list[list[range]] = []
    filled = 0.0
    for group in longest_first:
        if packed and filled + length(group) <= room:
            packed[-1].append(group)
            filled += length(group)
        else:
            packed.append([group])
            filled = length(group)
    return [Bundle(tuple(one), tuple(clients[p] for group in one for p in group)) for one in packed]


class Sent:
    """What the workers have: the last dataset and problem, and how long a unit of work takes on them."""

    dataset: Dataset | None = None
    dataset_reference: Any = None
    problem: Problem | None = None
    references: Sequence[Any] = ()
    seconds_per_work: float | None = None
    warned: bool = False  # that some workers have nothing to do


@dataclass(frozen=True)
class Parallel(Engine):
    """Trains clients in workers.

    Attributes:
        engine: How a worker trains.
        pool: The workers.
        threads: Of torch in each worker.
    """

    engine: Engine
    pool: Pool
    threads: int = 1
    sent: Sent = field(default_factory=Sent, compare=False)

    def in_groups(self, method: Method, task: Task, plans: Sequence[Plan]) -> tuple[Engine, int]:
        return self.engine.in_groups(method, task, plans)

    @property
    def workers(self) -> int:
        return self.pool.number

    def prepare(self, method: Method, task: Task, dataset: Dataset, finish: Finisher[Any]) -> None:
        check_movable(self.engine)
        require(
            task.device.type == "cpu" or self.pool.resources.gpu > 0,
            f"the model is on {task.device}, but workers were given no GPU; --resources.gpu 0.5 puts two on each, "
            "--compute.device cpu does without",
        )
        self.pool.prepare(self._send(method, task, finish, dataset))

    def fit(
        self, method: Method, task: Task, context: Context, buffers: Params, plans: Sequence[Plan]
    ) -> Iterator[Fit]:
        work = [float(plan.num_steps) for plan in plans]
        return self.train(method, task, context, buffers, plans, _as_they_are, work)

    def train(
        self,
        method: Method,
        task: Task,
        context: Context,
        buffers: Params,
        plans: Sequence[Plan],
        finish: Finisher[Finished],
        work: Sequence[float],
    ) -> Iterator[Finished]:
        import ray

        dataset = plans[0].data.dataset
        problem = self._send(method, task, finish, dataset)
        known = {"task": task, "dataset": dataset}
        engine, size = self.engine.in_groups(method, task, plans)
        for_all = context._replace(own=(), start={} if context.own_start else context.start)
        shared = pack(Start(engine, for_all, buffers), known, task.device)
        start = [ray.put(shared)]
        groups = [range(first, min(first + size, len(plans))) for first in range(0, len(plans), size)]
        self._warn_of_idle_workers(len(groups), len(plans))
        ids = [plan.data.client for plan in plans]
        jobs = bundles(groups, ids, work, self.pool.number, self.sent.seconds_per_work)

        def give(actor: Any, job: Bundle) -> Any:
            mine = [group_of(group, plans, context) for group in job.groups]
            return actor.train.remote(problem, start, pack(mine, known, task.device))

        done: dict[int, list[Finished] | Failure] = {}
        pace, began = Pace("clients trained", work), time.monotonic()
        following = iter(groups)
        due = next(following, None)
        with closing(self.pool.answers(problem, jobs, give)) as answers:
            for job, answer in answers:
                if isinstance(answer, Failure):
                    raise answer.error
                for group in job.groups:
                    known |= names_of(group, [plans[p] for p in group])
                results = unpack(answer, known, task.device)
                done |= {group.start: result for group, result in zip(job.groups, results, strict=True)}
                pace.done(*(position for group in job.groups for position in group))
                while due is not None and due.start in done:
                    result = done.pop(due.start)
                    if isinstance(result, Failure):
                        raise result.error
                    yield from result
                    due = next(following, None)
        self.sent.seconds_per_work = (time.monotonic() - began) * self.pool.number / sum(work)

    def _warn_of_idle_workers(self, groups: int, clients: int) -> None:
        number = self.pool.number
        if groups < min(number, clients) and not self.sent.warned:
            self.sent.warned = True
            activity.note(
                f"{clients} clients are trained in {groups} groups, so {number - groups} of {number} workers have "
                f"nothing to do; --engine.chunk {-(-clients // number)} would employ all"
            )

    def _send(self, method: Method, task: Task, finish: Finisher[Any], dataset: Dataset) -> Sequence[Any]:
        """The references of a problem; the one that was sent last is not sent again."""
        import ray

        sent, device = self.sent, task.device
        if sent.dataset is not dataset:
            sent.dataset, sent.problem = dataset, None
            sent.dataset_reference = ray.put(_packed(dataset, "the data", {}, device))
        problem = Problem(method, task, finish, TorchSettings.of_this_process(self.threads), self.engine)
        if sent.problem is None or any(
            mine is not its for mine, its in zip(problem[:3], sent.problem[:3], strict=True)
        ):
            serialized = _packed(problem, "the method, the model or the engine", {"dataset": dataset}, device)
            sent.problem, sent.references = problem, [sent.dataset_reference, ray.put(serialized)]
            sent.seconds_per_work = None
        return sent.references


def check_movable(engine: Engine) -> None:
    """Refuse an engine that cannot leave this process."""
    require(
        not engine.needs_driver,
        f"the engine {type(engine).__name__} trains in this process only, because {engine.needs_driver}; use one "
        "worker",
    )


def _packed(value: Any, what: str, known: dict[str, Any], device: Any) -> Serialized:
    try:
        return pack(value, known, device)
    except Exception as error:  # whatever a class of the user's does when it is pickled
        raise UserError(
            f"{what} cannot be sent to workers ({type(error).__name__}: {' '.join(str(error).split())[:200]}); let it "
            "hold nothing but data, or use --workers 1"
        ) from error


def _as_they_are(trained: Iterable[tuple[Fit, Context]]) -> Iterator[Fit]:
    return (fit for fit, _ in trained)
