"""`workers auto`: the first clients are trained here and timed; the rest goes to workers if that will be faster.

Numbers do not depend on it, so nothing of the measurement is thrown away.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.cluster.connection import connected, is_connected, local_nodes, slots
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.plan import Plan
from fl_lightning.engines.engine import Engine, Finished, Finisher, Fit
from fl_lightning.errors import UserError
from fl_lightning.method import ClientHooks, Context
from fl_lightning.params import Params, count
from fl_lightning.system import activity
from fl_lightning.task import Task
from fl_lightning.workers.crew import Workers, check_held, pool_of
from fl_lightning.workers.parallel import Parallel
from fl_lightning.workers.pool import Pool

# Seconds until Ray and the workers are there, on a quiet machine; those of workers alone; and of each client's journey:
# a call, and its numbers there and back.
START, START_WORKERS, CALL, BYTES_PER_SECOND = 12.0, 5.0, 0.002, 5e8
# Workers must save at least this share of the time.
WORTH = 0.2
# Clients that are timed, after one whose time is that of first calls and imports.
TIMED = 2


class Chosen:
    """What was found out: nothing at first, then the engine that trains."""

    engine: Engine | None = None


@dataclass(frozen=True)
class Auto(Engine):
    """The given engine, in this process or in workers.

    Attributes:
        engine: How a client is trained.
        wanted: Which workers are to be had.
        rounds: That are left.
        threads: Of torch in each worker.
        stack: Holds the workers as long as they are needed.
    """

    engine: Engine
    wanted: Workers
    rounds: int
    threads: int
    stack: ExitStack
    chosen: Chosen = field(default_factory=Chosen, compare=False)

    @property
    def workers(self) -> int:
        return self.chosen.engine.workers if self.chosen.engine is not None else 1

    def trains_apart(self, task: Task, plans: Sequence[Plan]) -> bool:
        return self.engine.trains_apart(task, plans)

    def in_groups(self, hooks: ClientHooks, task: Task, plans: Sequence[Plan]) -> tuple[Engine, int]:
        return self.engine.in_groups(hooks, task, plans)

    def prepare(self, hooks: ClientHooks, task: Task, dataset: Dataset, finish: Finisher[Any]) -> None:
        """What the engine refuses, and that no worker could be had, is said at once, not after some training."""
        self.engine.prepare(hooks, task, dataset, finish)
        if self.wanted.address is None and not is_connected():
            check_held(1, local_nodes(), self.wanted.resources)
        else:
            self._offered()

    def fit(
        self, hooks: ClientHooks, task: Task, context: Context, buffers: Params, plans: Sequence[Plan]
    ) -> Iterator[Fit]:
        return (self.chosen.engine or self.engine).fit(hooks, task, context, buffers, plans)

    def train(
        self,
        hooks: ClientHooks,
        task: Task,
        context: Context,
        buffers: Params,
        plans: Sequence[Plan],
        finish: Finisher[Finished],
        work: Sequence[float],
    ) -> Iterator[Finished]:
        if self.chosen.engine is not None:
            yield from self.chosen.engine.train(hooks, task, context, buffers, plans, finish, work)
            return
        engine, size = self.engine.in_groups(hooks, task, plans)

        def part(trainer: Engine, positions: range) -> Iterator[Finished]:
            places = slice(positions.start, positions.stop)
            theirs = context.of_members(lambda leaf: leaf[places])
            return trainer.train(hooks, task, theirs, buffers, plans[places], finish, work[places])

        paces: list[float] = []
        first = 0
        while first < len(plans) and len(paces) < 1 + TIMED:
            group = range(first, min(first + size, len(plans)))
            start = time.perf_counter()
            yield from part(engine, group)
            paces.append((time.perf_counter() - start) / sum(work[position] for position in group))
            first = group.stop
        seconds = min(paces[1:] or paces)
        pool = self._pool(seconds, work, first, size, task, _bytes((context.start, context.shared, buffers), task))
        if pool is not None:
            try:
                engine = settled = Parallel(engine, pool, self.threads)
                settled.sent.told = True  # there are no more workers than groups in a whole round
                settled.prepare(hooks, task, plans[0].data.dataset, finish)
                self.chosen.engine = Parallel(self.engine, pool, self.threads, settled.sent)
            except UserError as reason:
                activity.note(f"workers auto: clients are trained in this process, because {reason}")
                pool.close()
                engine, pool = self.engine.in_groups(hooks, task, plans)[0], None
        if pool is None:
            self.chosen.engine = self.engine
        if first < len(plans):
            yield from part(engine, range(first, len(plans)))

    def _pool(
        self, seconds: float, work: Sequence[float], first: int, size: int, task: Task, journey: int
    ) -> Pool | None:
        """Workers, if they pay.

        Args:
            seconds: That a unit of work takes here.
            work: Of every client.
            first: The first client that is left in this round.
            size: Of the groups that are trained at once.
            task: Model and likelihood.
            journey: Bytes that a round sends to a worker.
        """
        groups = [sum(work[place : place + size]) for place in range(0, len(work), size)]
        clients = self.rounds * len(work) - first
        here = seconds * (self.rounds * sum(work) - sum(work[:first]))
        start = START_WORKERS if is_connected() else START
        if self.engine.needs_driver or here < start:
            self._stay(here, self.engine.needs_driver)
            return None
        number = min(self._offered(), len(groups))
        spread = min(number, sum(groups) / max(groups))
        there = start + here / max(spread, 1) + clients * (CALL + 2 * journey / BYTES_PER_SECOND)
        elsewhere = self.wanted.resources.gpu > 0 and task.device.type == "cpu"  # a GPU is not measured by a CPU
        if number < 2 or (there > (1 - WORTH) * here and not elsewhere):
            self._stay(here)
            return None
        pool = self.stack.enter_context(pool_of(self.wanted, number))
        about = "" if elsewhere else f": about {_duration(there)} instead of {_duration(here)}"
        activity.note(f"workers auto: {number} workers{about}")
        return pool

    def _stay(self, here: float, reason: str = "") -> None:
        why = f", because {reason}" if reason else f": about {_duration(here)}, workers would not save time"
        activity.note(f"workers auto: clients are trained in this process{why}")

    def _offered(self) -> int:
        """How many workers there could be."""
        if self.wanted.address is None and not is_connected():
            return slots(local_nodes(), self.wanted.resources)
        return slots(
            self.stack.enter_context(connected(self.wanted.address, self.wanted.resources)), self.wanted.resources
        )


def _bytes(tree: Any, task: Task) -> int:
    return count(tree) * task.dtype.itemsize


def _duration(seconds: float) -> str:
    """In words.

    >>> _duration(0.2), _duration(42), _duration(600), _duration(7260)
    ('1 s', '42 s', '10 min', '2.0 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
