"""What an engine is: it turns the client hooks of a method into training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fl_lightning.data.batches import Plan
from fl_lightning.data.dataset import Dataset
from fl_lightning.method import Context, Local, Method
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params
from fl_lightning.system.activity import Pace

Finished = TypeVar("Finished")


class Fit(NamedTuple):
    """A finished local training.

    Attributes:
        local: What the method may look at.
        train_loss: Mean task loss over the samples of all steps, without penalty, as it was met along the way.
    """

    local: Local
    train_loss: float


def finished_client(task: Task, plan: Plan, weights: Weights, path_statistics: Any, optimiser_state: Any = ()) -> Local:
    """The client as the method sees it after the last step of its plan."""
    return Local(
        client=plan.data.client,
        params=weights.params,
        buffers=weights.buffers,
        path_statistics=path_statistics,
        num_steps=plan.num_steps,
        num_epochs=plan.num_epochs,
        training=plan.training,
        task=task,
        data=plan.data,
        plan=plan,
        optimiser_state=optimiser_state,
    )


def mean_loss(losses: Sequence[Tensor], shares: Sequence[float], num_epochs: int) -> float:
    """The mean loss along a client's path, each batch counting by its share of the data; added up in step order."""
    values: list[float] = torch.stack(list(losses)).tolist()
    return sum(loss * share for loss, share in zip(values, shares, strict=True)) / num_epochs


@dataclass(frozen=True)
class Engine(ABC):
    """Trains a cohort. All engines give the same numbers up to rounding: same method, same batches.

    `version` is part of a run's identity: raise it when the numbers change, or a default of its fields does.
    """

    version: ClassVar[int] = 1

    def in_groups(self, method: Method, task: Task, plans: Sequence[Plan]) -> tuple["Engine", int]:
        """How to train a part of these clients so that its bits are those it has among all of them.

        Returns:
            An engine, and the size of a group: it may be given any of the groups [0, size), [size, 2 size), ... alone.
        """
        return self, 1

    @property
    def needs_driver(self) -> str:
        """Why clients cannot be trained in other processes than the one that asks for it; mostly nothing."""
        return ""

    @property
    def workers(self) -> int:
        """How many processes train."""
        return 1

    def prepare(self, method: Method, task: Task, dataset: Dataset, finish: "Finisher[Any]") -> None:  # noqa: B027
        """Raise `UserError` for what cannot be trained, before anything is; see `train`."""

    def train(
        self,
        method: Method,
        task: Task,
        context: Context,
        buffers: Params,
        plans: Sequence[Plan],
        finish: "Finisher[Finished]",
        work: Sequence[float],
    ) -> Iterator[Finished]:
        """Train one client per plan, and finish each where it was trained.

        Args:
            method: The method.
            task: Model and likelihood.
            context: What the round starts from.
            buffers: Of the model that the round starts from.
            plans: Of the cohort.
            finish: Called with trained clients, each with the context as it sees it.
            work: How long each client takes, in any unit.

        Returns:
            What `finish` makes of each client, in the order of the plans.
        """

        def trained() -> Iterator[tuple[Fit, Context]]:
            pace = Pace("clients trained", work)
            for position, fit in enumerate(self.fit(method, task, context, buffers, plans)):
                yield fit, context.of_member(position)
                pace.done(position)

        return finish(trained())

    @abstractmethod
    def fit(
        self, method: Method, task: Task, context: Context, buffers: Params, plans: Sequence[Plan]
    ) -> Iterator[Fit]:
        """Train one client per plan, each from `context.start`, and yield them in the order of the plans."""


Finisher = Callable[[Iterable[tuple[Fit, Context]]], Iterator[Finished]]
