"""Small problems in float64 on which everything is checked against brute force."""

from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning.data.dataset import Dataset
from fl_lightning.engines.engine import Engine
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.federation import Federation
from fl_lightning.loop import federate
from fl_lightning.method import Method
from fl_lightning.params import Params, flatten
from fl_lightning.record import RoundRecord
from fl_lightning.task import Task
from fl_lightning.training import Training

ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=4), "lightning": Lightning()}


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
        return Task(deepcopy(self.model))

    def changed(self, **changes) -> "Case":
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

    def run(self, method: Method, engine: Engine | None = None, **changes) -> list[RoundRecord]:
        """All rounds, with some settings changed."""
        case = self.changed(**changes)
        engine = engine or Functional(chunk=1)
        arguments = (case.dataset, case.clients, case.training, case.federation, engine, case.seed, case.holdout)
        return list(federate(method, case.task(), *arguments))


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
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hidden = [nn.Linear(5, 6), nn.Tanh(), *([nn.Dropout(dropout)] if dropout else [])]
        return nn.Sequential(*hidden, nn.Linear(6, 3)).to(dtype)


def final(records: list[RoundRecord]) -> Params:
    """The global model after the last round."""
    return records[-1].after.state.params


def equal_bits(a: Params, b: Params) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a) and a.keys() == b.keys()


def largest_difference(a: Params, b: Params) -> float:
    return float((flatten(a) - flatten(b)).abs().max())
