"""What an engine is: it turns the client hooks of a method into training."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fl_lightning.data.plan import Plan
from fl_lightning.method import ClientHooks, Context, Local
from fl_lightning.params import Params
from fl_lightning.task import Task, Weights


class Fit(NamedTuple):
    """A finished local training.

    Attributes:
        local: What the method may look at.
        train_loss: Mean task loss over the samples of all steps, without penalty, as it was met along the way.
    """

    local: Local
    train_loss: float


def finished_client(task: Task, plan: Plan, weights: Weights, trace: Any, rule_state: Any = ()) -> Local:
    """The client as the method sees it after the last step of its plan."""
    return Local(
        client=plan.data.client,
        params=weights.params,
        buffers=weights.buffers,
        trace=trace,
        num_steps=plan.num_steps,
        num_epochs=plan.num_epochs,
        training=plan.training,
        task=task,
        data=plan.data,
        plan=plan,
        rule_state=rule_state,
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

    def trains_apart(self, task: Task, plans: Sequence[Plan]) -> bool:
        """Whether each of these clients is trained by itself, so that its bits do not depend on the others."""
        return True

    @abstractmethod
    def fit(
        self, hooks: ClientHooks, task: Task, context: Context, buffers: Params, plans: Sequence[Plan]
    ) -> Iterator[Fit]:
        """Train one client per plan, each from `context.start`, and yield them in the order of the plans."""
