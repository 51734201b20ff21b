"""The workers of a run, as Ray actors: who is free gets the next job, who dies is replaced.

A job that a worker dies at is given to another. It costs what was computed of it, and changes no number.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from fl_lightning.cluster.connection import Resources, offers, passed_on, slots
from fl_lightning.errors import require
from fl_lightning.system import activity, interrupts
from fl_lightning.workers.code import Code
from fl_lightning.workers.nodes import check_nodes
from fl_lightning.workers.worker import Failure, Worker

Job = TypeVar("Job", bound=Hashable)

# A job is given up when so many workers have died at it.
ATTEMPTS = 3
# Jobs that a worker has before it: one that it computes, and one that it need not wait for.
AHEAD = 2
# Seconds after which the program looks whether it was interrupted, and whether there is anybody left to wait for.
LOOK_EVERY = 0.5


class Member:
    """A place in the pool, and the worker that fills it at present.

    Attributes:
        actor: The worker.
        problem: The references of the problem that it was asked to prepare.
        preparing: Its answer to that; None as soon as it is there.
        jobs: What it was given, the present one first, each with the answer that is to come.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.problem: Sequence[Any] = ()
        self.preparing: Any = None
        self.jobs: deque[tuple[Any, Any]] = deque()


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
        self._members = [Member(self._hire(place)) for place in range(number)]
        self._stillborn = 0

    def close(self) -> None:
        """End all workers now, whatever they do."""
        for member in self._members:
            self._dismiss(member)

    def prepare(self, problem: Sequence[Any]) -> None:
        """Send a problem to all workers, and wait until one of them has it, and all nodes could use it.

        Args:
            problem: References to its parcels.

        Raises:
            UserError: If a worker cannot use it.
        """
        check_nodes(self.resources, problem, passed_on())
        for _ in self.answers(problem, [], lambda actor, job: None):
            pass

    def answers(
        self, problem: Sequence[Any], jobs: Sequence[Job], give: Callable[[Any, Job], Any]
    ) -> Generator[Answer[Job], None, None]:
        """Have jobs done, the first ones first, and yield what comes of them as it comes.

        Args:
            problem: References to the parcels of the problem that they belong to.
            jobs: By anything that can be hashed.
            give: Gives a job to an actor, and returns the reference of the answer.
        """
        import ray

        waiting, deaths = deque(jobs), Counter[Job]()
        left = len(waiting)
        try:
            for place, member in enumerate(self._members):
                if member.actor is None:
                    member.actor = self._hire(place)
                self._prepare(member, problem)
            while left or not any(member.preparing is None for member in self._members):
                self._hand_out(waiting, give)
                expected = {ref: member for member in self._members for ref in _expected(member)}
                come, _ = ray.wait(list(expected), timeout=LOOK_EVERY)
                interrupts.check()
                if not come:
                    self._check_alive()
                for ref in come:
                    member = expected[ref]
                    try:
                        value = ray.get(ref)
                    except ray.exceptions.RayTaskError:
                        raise  # a mistake of ours
                    except ray.exceptions.RayError as death:
                        waiting.extendleft(self._bury(member, problem, deaths, death))
                        break  # its other answers are as lost as this one
                    if ref == member.preparing:
                        member.preparing, self._stillborn = None, 0
                        if isinstance(value, Failure):
                            raise value.error
                        continue
                    job, _ = member.jobs.popleft()
                    left -= 1
                    yield Answer(job, value)
        finally:
            for member in self._members:
                if member.jobs:  # nobody waits for it any more
                    self._dismiss(member)

    def _hand_out(self, waiting: deque[Job], give: Callable[[Any, Job], Any]) -> None:
        """Who has least gets the next job."""
        ready = [member for member in self._members if member.preparing is None]
        while waiting and ready:
            member = min(ready, key=lambda one: len(one.jobs))
            if len(member.jobs) >= AHEAD:
                return
            job = waiting.popleft()
            member.jobs.append((job, give(member.actor, job)))

    def _bury(self, member: Member, problem: Sequence[Any], deaths: Counter[Job], death: Exception) -> list[Job]:
        """Replace a worker that has died, and say which jobs are to be done again, the last one first."""
        lost: list[Job] = [job for job, _ in member.jobs]
        deaths.update(lost[:1])
        self._stillborn += member.preparing is not None
        require(
            self._stillborn < ATTEMPTS * self.number,
            f"workers die as soon as they are started, the last one so: {_in_one_line(death)}; is fl_lightning "
            "installed on all nodes, and is there enough memory?",
        )
        require(
            not lost or deaths[lost[0]] < ATTEMPTS,
            f"{ATTEMPTS} workers have died at {', '.join(map(str, lost[:1]))}, the last one so: {_in_one_line(death)}; "
            "there may be too little memory for so many workers, or a hook that writes into its inputs",
        )
        activity.say("a worker has died; another takes its place")
        place = self._members.index(member)
        self._dismiss(member)
        member.actor = self._hire(place)
        self._prepare(member, problem)
        return lost[::-1]

    def _prepare(self, member: Member, problem: Sequence[Any]) -> None:
        if member.problem is not problem:
            member.problem = problem
            member.preparing = member.actor.prepare.remote(problem, passed_on(), Code.here())

    def _dismiss(self, member: Member) -> None:
        import ray

        actor, member.actor, member.problem, member.preparing = member.actor, None, (), None
        member.jobs.clear()
        if actor is not None and ray.is_initialized():
            with suppress(Exception):  # it is gone already, or the cluster is
                ray.kill(actor)

    def _hire(self, place: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cpu, gpu = self.resources
        options: dict[str, Any] = {"num_cpus": cpu, "num_gpus": gpu, "max_restarts": 0, "max_task_retries": 0}
        group = ray.util.get_current_placement_group()
        if group is not None:  # of the trial that this process is
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, place)
        return ray.remote(Worker).options(**options).remote(gpu > 0)

    def _check_alive(self) -> None:
        """Refuse to wait for workers that no node has a place for."""
        import ray

        if all(member.preparing is not None for member in self._members):
            activity.wait("waiting for a worker to start")
            nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
            require(
                slots(nodes, self.resources) > 0,
                f"no node is left that has {self.resources.cpu:g} CPU and {self.resources.gpu:g} GPU for a worker "
                f"({offers(nodes)}); finished rounds are saved, start the same command again when there is one",
            )


def _expected(member: Member) -> list[Any]:
    if member.preparing is not None:
        return [member.preparing]
    return [member.jobs[0][1]] if member.jobs else []


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
