"""The workers of a run, as Ray actors: a free one gets the next job, a dead one is replaced.

A job that a worker dies at is given to another. It costs what was computed of it, and changes no number. Ray's own
restarts (`max_restarts`, `max_task_retries`) would keep a job with its actor, and so wait forever for an actor whose
node is gone and which no other node has room for.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from fl_lightning.engines.parallel.code_version import Code
from fl_lightning.engines.parallel.ray_cluster import Resources, living, offers, passed_on, slots
from fl_lightning.engines.parallel.worker import Failure, Worker
from fl_lightning.errors import require
from fl_lightning.system import activity, interrupts

Job = TypeVar("Job", bound=Hashable)

# A job is given up when so many workers have died at it.
ATTEMPTS = 3
# Jobs that a worker has before it: one that it computes, and one that it need not wait for.
AHEAD = 2
# Seconds after which the program looks whether it was interrupted, and whether any node has room for a worker.
LOOK_EVERY = 0.5
# Seconds until training begins without the workers that have not started.
PATIENCE = 60.0


class Call(NamedTuple):
    """What a worker was asked to do; it is free when nothing is left.

    Attributes:
        actor: The worker.
        place: Its number.
        job: None for preparing itself.
        wanted: Whether anything still depends on the answer.
    """

    actor: Any
    place: int
    job: Any = None
    wanted: bool = True


class Answer(NamedTuple, Generic[Job]):
    """What came of a job: what the worker returned."""

    job: Job
    value: Any


class Pool:
    """Workers on the cluster that this process is connected to.

    Args:
        number: Of workers.
        resources: Of each.
    """

    def __init__(self, number: int, resources: Resources) -> None:
        self.number, self.resources = number, resources
        self._actors = [self._start(place) for place in range(number)]
        self._calls: dict[Any, Call] = {}
        self._problem: Sequence[Any] | None = None
        self._stillborn = 0

    def close(self) -> None:
        """End all workers now, whatever they do."""
        for actor in self._actors:
            _kill(actor)

    def prepare(self, problem: Sequence[Any]) -> None:
        """Send a problem to all workers, and wait until each could use it; on one node the first speaks for all.

        Args:
            problem: References to its serialized parts.

        Raises:
            UserError: If a worker cannot use it, because a plug-in or a package differs on its node.
        """
        self._send(problem)
        wanted = self.number if len(living()) > 1 else 1
        late = time.monotonic() + PATIENCE
        while (free := len(self._free())) < wanted and (not free or time.monotonic() < late):
            self._come(Counter())

    def answers(
        self, problem: Sequence[Any], jobs: Sequence[Job], give: Callable[[Any, Job], Any]
    ) -> Generator[Answer[Job], None, None]:
        """Have jobs done, the first ones first, and yield what comes of them as it comes.

        Args:
            problem: References to the serialized parts of the problem that they belong to.
            jobs: By anything that can be hashed.
            give: Gives a job to an actor, and returns the reference of the answer.
        """
        if problem is not self._problem:
            self._send(problem)
        waiting, deaths, left = deque(jobs), Counter[Job](), len(jobs)
        try:
            while left:
                while waiting and (free := self._free()):
                    job, actor = waiting.popleft(), self._actors[free[0]]
                    self._calls[give(actor, job)] = Call(actor, free[0], job)
                call, value = self._come(deaths)
                if call is None or call.job is None or not call.wanted:
                    continue
                if value is LOST:
                    waiting.appendleft(call.job)
                    continue
                left -= 1
                yield Answer(call.job, value)
        finally:
            self._forget(lambda call: call.job is not None)

    def _send(self, problem: Sequence[Any]) -> None:
        self._problem = problem
        self._forget(lambda call: True)
        for place in range(self.number):
            self._prepare(place)

    def _prepare(self, place: int) -> None:
        actor = self._actors[place]
        self._calls[actor.prepare.remote(self._problem, passed_on(), Code.here())] = Call(actor, place)

    def _forget(self, which: Callable[[Call], bool]) -> None:
        """Take the answers of such calls for a sign that their worker is free, and for nothing else."""
        self._calls = {ref: call._replace(wanted=call.wanted and not which(call)) for ref, call in self._calls.items()}

    def _free(self) -> list[int]:
        """The workers that may be given a job, the least busy one first."""
        busy = Counter[int]()
        for call in self._calls.values():
            busy[call.place] += AHEAD if call.job is None else 1
        return sorted((place for place in range(self.number) if busy[place] < AHEAD), key=busy.__getitem__)

    def _come(self, deaths: Counter[Any]) -> tuple[Call | None, Any]:
        """The next call that is answered, and its answer: `LOST` if its worker has died; None after a while."""
        import ray

        # Of each worker its oldest call alone: if it dies, that is the one it has died at.
        oldest = {call.place: ref for ref, call in reversed(self._calls.items())}
        come, _ = ray.wait(list(oldest.values()), timeout=LOOK_EVERY)
        interrupts.check()
        if not come:
            self._check_room()
            return None, None
        call = self._calls.pop(come[0])
        try:
            value = ray.get(come[0])
        except ray.exceptions.RayTaskError:
            raise  # a mistake of ours
        except ray.exceptions.RayError as death:
            if call.actor is self._actors[call.place]:  # else it has been replaced
                self._replace(call, deaths, death)
            return call, LOST
        if call.job is None and call.wanted:
            self._stillborn = 0
            if isinstance(value, Failure):
                raise value.error
        return call, value

    def _replace(self, call: Call, deaths: Counter[Any], death: Exception) -> None:
        """Start another worker in place of a dead one, unless too many have died."""
        reason = " ".join(str(death).split())[:200]
        if call.job is None:
            self._stillborn += 1
            require(
                self._stillborn < ATTEMPTS * self.number,
                f"workers die as soon as they are started, last error: {reason}; is fl_lightning installed on all "
                "nodes, and is there enough memory?",
            )
        else:
            deaths[call.job] += 1
            require(
                deaths[call.job] < ATTEMPTS,
                f"{ATTEMPTS} workers have died at {call.job}, last error: {reason}; there may be too little "
                "memory for so many workers, or a hook that writes into its inputs",
            )
        activity.say("a worker has died; another takes its place")
        _kill(call.actor)
        self._actors[call.place] = self._start(call.place)
        self._prepare(call.place)

    def _start(self, place: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cpu, gpu = self.resources
        options: dict[str, Any] = {"num_cpus": cpu, "num_gpus": gpu, "max_restarts": 0, "max_task_retries": 0}
        group = ray.util.get_current_placement_group()
        if group is not None:  # of the trial that this process is
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, place)
        return ray.remote(Worker).options(**options).remote(gpu)

    def _check_room(self) -> None:
        """Refuse to wait for workers that no node has a place for."""
        if any(call.job is not None and call.wanted for call in self._calls.values()):
            return  # a worker computes
        activity.wait("waiting for a worker to start")
        nodes = living()
        require(
            slots(nodes, self.resources) > 0,
            f"no node is left that has {self.resources.cpu:g} CPU and {self.resources.gpu:g} GPU for a worker "
            f"({offers(nodes)}); finished rounds are saved, start the same command again when there is one",
        )


LOST = object()


def _kill(actor: Any) -> None:
    import ray

    if ray.is_initialized():
        with suppress(Exception):  # it is gone already, or the cluster is
            ray.kill(actor)
