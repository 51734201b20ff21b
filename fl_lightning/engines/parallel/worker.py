"""What runs in a worker: it holds the data and the model of one problem, and trains the clients it is given."""

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from fl_lightning.data.batches import Plan
from fl_lightning.data.dataset import Dataset
from fl_lightning.engines.base import Engine, Finisher, Fit
from fl_lightning.engines.parallel.code_version import Code
from fl_lightning.engines.parallel.ray_session import enrol
from fl_lightning.engines.parallel.serialization import Serialized, pack, unpack
from fl_lightning.errors import Diverged, UserError
from fl_lightning.method import Context, Method
from fl_lightning.models.task import Task
from fl_lightning.params import Params
from fl_lightning.system import devices
from fl_lightning.system.plugins import plugin_error


class TorchSettings(NamedTuple):
    """What decides the bits of a computation beside its operands; as the driver has it."""

    threads: int
    default_dtype: torch.dtype
    matmul_precision: str
    tf32_in_convolutions: bool
    deterministic: bool

    @classmethod
    def of_this_process(cls, threads: int) -> "TorchSettings":
        return cls(
            threads,
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
        )

    def apply(self) -> None:
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.allow_tf32 = self.tf32_in_convolutions
        if self.deterministic != torch.are_deterministic_algorithms_enabled():  # even a no imports for seconds
            torch.use_deterministic_algorithms(self.deterministic)


class Problem(NamedTuple):
    """What all rounds of a run have in common.

    The engine comes anew with every round; it is here so that what cannot be used is refused before the first.
    """

    method: Method
    task: Task
    finish: Finisher[Any]
    settings: TorchSettings
    engine: Engine


class Start(NamedTuple):
    """What all clients of a round have in common."""

    engine: Engine
    context: Context
    buffers: Params


class Group(NamedTuple):
    """Clients that are trained at once.

    Attributes:
        positions: In the cohort.
        plans: Their batches.
        own: Their part of what is stacked in `Context.own`.
        start: Likewise of `Context.start`, if each starts at a model of its own.
    """

    positions: range
    plans: Sequence[Plan]
    own: Any
    start: Params

    def context(self, shared: Context) -> Context:
        """What they start from, given what all clients of the round start from."""
        return shared._replace(own=self.own, start=self.start if shared.own_start else shared.start)


def group_of(positions: range, plans: Sequence[Plan], context: Context) -> Group:
    """Some clients of a cohort."""
    theirs = context.of_members(lambda leaf: leaf[positions.start : positions.stop])
    return Group(positions, [plans[p] for p in positions], theirs.own, theirs.start if context.own_start else {})


def names_of(positions: range, plans: Sequence[Plan]) -> dict[str, Any]:
    """What driver and worker both have of some clients, by the names under which they speak of it."""
    named: dict[str, Any] = {}
    for position, plan in zip(positions, plans, strict=True):
        named |= {f"plan {position}": plan, f"data {position}": plan.data}
    return named


class Failure(NamedTuple):
    """An error that a worker met; it is raised where the clients were asked for."""

    error: Exception


class Unpacked(NamedTuple):
    """Something that a worker has unpacked, and the name of the reference it came by."""

    name: str
    content: Any


class Worker:
    """The body of a Ray actor.

    Args:
        gpu: How many GPUs it was given, or which part of one.
    """

    def __init__(self, gpu: float) -> None:
        enrol(os.getpid())
        self._gpu = gpu
        self._unpacked: dict[str, Unpacked] = {}

    def prepare(self, problem: Sequence[Any], variables: Mapping[str, str], code: Code) -> Failure | None:
        """Unpack data and model; refuses what this process cannot use.

        Args:
            problem: References to the references of the data and of the problem.
            variables: Of the environment, as the driver has them.
            code: What the driver computes with.
        """
        os.environ.update(variables)
        try:
            code.check()
            self._problem(problem)
        except BaseException as error:
            return _failure(error)
        return None

    def train(self, problem: Sequence[Any], start: Sequence[Any], groups: Serialized) -> Serialized | Failure:
        """Train some clients of a round.

        Args:
            problem: References to the references of the data and of the problem.
            start: Reference to the serialized start of the round.
            groups: Which clients.

        Returns:
            For every group what `finish` has made of its clients, or a `Failure`.
        """
        try:
            (method, task, finish, *_), dataset, device = self._problem(problem)
            known = {"task": task, "dataset": dataset}
            engine, context, buffers = self._cached("start", start[0], known, device, views=True)
            mine: Sequence[Group] = unpack(groups, known, device, views=True)

            def trained(groups: Sequence[Group]) -> Iterator[tuple[Fit, Context]]:
                for group in groups:
                    theirs = group.context(context)
                    contexts = map(theirs.of_member, range(len(group.plans)))
                    yield from zip(engine.fit(method, task, theirs, buffers, group.plans), contexts, strict=True)

            def finished(groups: Sequence[Group]) -> list[Any]:
                try:
                    clients = finish(trained(groups))
                    return [list(islice(clients, len(group.plans))) for group in groups]
                except BaseException as error:  # once more one by one, to see whose it is
                    failure = _failure(error)
                    return [failure] if len(groups) == 1 else [finished([group])[0] for group in groups]

            answer = finished(mine)
            for group in mine:
                known |= names_of(group.positions, group.plans)
            return pack(answer, known, device)
        except BaseException as error:
            return _failure(error)

    def _problem(self, references: Sequence[Any]) -> tuple[Problem, Dataset, torch.device]:
        device = self._device()
        dataset: Dataset = self._cached("dataset", references[0], {}, device, views=True)
        problem: Problem = self._cached("problem", references[1], {"dataset": dataset}, device, views=False)
        problem.settings.apply()
        return problem, dataset, device

    def _cached(self, slot: str, reference: Any, known: dict[str, Any], device: torch.device, views: bool) -> Any:
        """What a reference stands for, unpacked once; the one before it is forgotten."""
        import ray

        if slot not in self._unpacked or self._unpacked[slot].name != reference.hex():
            self._unpacked.pop(slot, None)
            content = unpack(ray.get(reference), known, device, views)
            self._unpacked[slot] = Unpacked(reference.hex(), content)
        return self._unpacked[slot].content

    def _device(self) -> torch.device:
        return devices.given(self._gpu) if self._gpu else torch.device("cpu")


def _failure(error: BaseException) -> Failure:
    """The error itself where it can travel, with the place where it arose; raises what ends this process."""
    from ray import cloudpickle

    if not _of_ray(error):
        error = plugin_error(error)
    if not isinstance(error, Exception):
        raise error
    if not isinstance(error, UserError | Diverged):
        error.add_note(f"in a worker:\n{traceback.format_exc()}")
    try:
        cloudpickle.loads(cloudpickle.dumps(error))  # type: ignore[no-untyped-call]
    except Exception:
        return Failure(RuntimeError(f"{type(error).__name__}: {error}"))
    return Failure(error)


def _of_ray(error: BaseException) -> bool:
    """Whether Ray ends this process: its handler of signals raises SystemExit in the midst of whatever goes on."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, SystemExit) and str(frame.f_globals.get("__name__")).startswith("ray.")
