"""Small problems in float64 on which methods are checked to the last bit."""

from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.client_state import Snapshot
from fl_lightning.data.dataset import Dataset
from fl_lightning.engines.base import Engine
from fl_lightning.engines.functional import Functional
from fl_lightning.errors import PluginError
from fl_lightning.loop import Problem, federate
from fl_lightning.method import Method
from fl_lightning.models.task import Task
from fl_lightning.params import Params, flatten
from fl_lightning.record import RoundRecord
from fl_lightning.testing.checks import Broken
from fl_lightning.training import Federation, Training


class Case(NamedTuple):
    """A federated problem; `run` turns it into records."""

    model: nn.Module
    dataset: Dataset
    clients: list[Tensor]
    holdout: Tensor
    training: Training
    federation: Federation
    seed: int = 0

    def task(self) -> Task:
        """A task of its own for every run: engines work on its model."""
        return Task(deepcopy(self.model), self.dataset.likelihood)

    def problem(self) -> Problem:
        """What is to be learnt, with a task of its own."""
        return Problem(self.task(), self.dataset, self.clients, self.holdout, self.seed)

    def changed(self, **changes: Any) -> "Case":
        """The case with other settings: each goes to Training, Federation or the case, wherever the field is."""
        case = self
        for name, value in changes.items():
            if hasattr(case.training, name):
                case = case._replace(training=replace(case.training, **{name: value}))
            elif hasattr(case.federation, name):
                case = case._replace(federation=replace(case.federation, **{name: value}))
            else:
                case = case._replace(**{name: value})
        return case

    def run(self, method: Method, engine: Engine | None = None, **changes: Any) -> list[RoundRecord]:
        """All rounds, with some settings changed."""
        return self.changed(**changes).go_on(method, engine=engine)

    def go_on(
        self,
        method: Method,
        resume: Snapshot | None = None,
        task: Task | None = None,
        engine: Engine | None = None,
    ) -> list[RoundRecord]:
        """The rounds that follow, on a given task; client by client, unless an engine is given."""
        engine = engine or Functional(chunk=1)
        problem = self.problem()._replace(task=task or self.task())
        try:
            return list(federate(method, problem, self.training, self.federation, engine, resume))
        except PluginError as error:  # a bug, not a refusal
            raise Broken(str(error)) from error


def ragged(dtype: torch.dtype = torch.float64, seed: int = 0, sizes: tuple[int, ...] = (20, 7, 0, 33, 1)) -> Case:
    """Unequal clients, one empty and one with a single sample; a two-layer network; batches that do not divide."""
    stream = torch.Generator().manual_seed(seed)
    spare = 12
    total = sum(sizes) + spare
    x = torch.randn(total + 40, 5, generator=stream, dtype=torch.float64).to(dtype)
    y = torch.randint(3, (total + 40,), generator=stream)
    dataset = Dataset(x[:total], y[:total], x[total:], y[total:], num_classes=3)
    order = torch.randperm(total, generator=stream)
    clients = list(torch.split(order[: sum(sizes)], list(sizes)))
    return Case(
        model=network(dtype, seed),
        dataset=dataset,
        clients=clients,
        holdout=order[sum(sizes) :],
        training=Training(lr=0.1, epochs=2, batch_size=8),
        federation=Federation(rounds=3),
    )


def network(dtype: torch.dtype = torch.float64, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    """Five inputs, a hidden layer, three classes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hidden = [nn.Linear(5, 6), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else [])]
        return nn.Sequential(*hidden, nn.Linear(6, 3)).to(dtype)


def final(records: list[RoundRecord]) -> Params:
    """The global model after the last round."""
    params: Params = records[-1].after.state.params
    return params


def equal_bits(a: Params, b: Params) -> bool:
    """Whether two models are the same to the bit."""
    return all(torch.equal(a[name], b[name]) for name in a) and a.keys() == b.keys()


def largest_difference(a: Params, b: Params) -> float:
    """The largest absolute difference of two models' parameters."""
    return float((flatten(a) - flatten(b)).abs().max())
