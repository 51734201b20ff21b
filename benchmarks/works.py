"""The works that are timed: shapes and numbers of the real ones, synthetic samples."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning import streams
from fl_lightning.data.dataset import Dataset
from fl_lightning.engines.base import Engine
from fl_lightning.loop import Problem, federate
from fl_lightning.method import Method
from fl_lightning.models.networks.cnn import Cnn
from fl_lightning.models.networks.mlp import Mlp
from fl_lightning.models.networks.softmax import Softmax
from fl_lightning.models.task import Task
from fl_lightning.record import RoundRecord
from fl_lightning.training import Federation, Training

NUM_CLASSES = 10


class Aims(NamedTuple):
    """Largest acceptable times; None asks only what it costs.

    Attributes:
        functional: Of the functional engine, relative to the bare loop.
        lightning: Of the Lightning engine, relative to the bare loop.
        usual: Of the Lightning engine, relative to the usual loop with `torch.optim`, by method.
    """

    functional: float
    lightning: float | None
    usual: Mapping[str, float] = {}


@dataclass(frozen=True)
class Work:
    """A federated problem of fixed size.

    Attributes:
        name: What is printed.
        model: The initial network; every contestant copies it.
        dataset: All samples, also those of clients that the scale leaves out: fetching costs what it really costs.
        clients: Indices of the clients that are run.
        training: E, B and lr.
        cohort: Clients per round.
        rounds: Rounds to time; round 1 comes on top, as warm-up and to give FOLA its prior.
        aims: What the engines should reach.
        share: Which part of the full work is run.
        seed: Key of cohorts and batches.
    """

    name: str
    model: nn.Module
    dataset: Dataset
    clients: tuple[Tensor, ...]
    training: Training
    cohort: int
    rounds: int
    aims: Aims
    share: str
    seed: int = 0

    def run(self, method: Method, engine: Engine) -> Iterator[RoundRecord]:
        """The rounds, through the platform."""
        federation = Federation(rounds=self.rounds + 1, cohort=self.cohort)
        task = Task(deepcopy(self.model))
        problem = Problem(task, self.dataset, self.clients, seed=self.seed)
        return federate(method, problem, self.training, federation, engine)

    def in_double(self, samples: int) -> "Work":
        """The same work in float64 on the first samples of every client, to check that all do the same."""
        data, double = self.dataset, torch.float64
        clients = tuple(indices[:samples] for indices in self.clients)
        extent = int(max(indices.max() for indices in clients)) + 1
        train_x, test_x = data.train_x[:extent].to(double), data.test_x.to(double)
        dataset = replace(data, train_x=train_x, train_y=data.train_y[:extent], test_x=test_x)
        return replace(self, model=deepcopy(self.model).to(double), dataset=dataset, clients=clients)

    def members(self, round: int) -> list[int]:
        """The cohort of a round, by the platform's key."""
        stream = streams.generator(self.seed, "cohort", round)
        return sorted(torch.randperm(len(self.clients), generator=stream)[: self.cohort].tolist())


def mnist_mlp(scale: float, rounds: int = 6) -> Work:
    """Work 1: 784-500-300-10 on 60,000 samples, N=10, E=1, B=32. The scale leaves out clients, not their samples."""
    dataset = synthetic((784,), 60_000)
    clients, share = some_clients(60_000, 10, scale)
    model = seeded(lambda: Mlp((784,), NUM_CLASSES))
    aims = Aims(1.15, 1.6, usual={"fedavg": 1.3, "fola": 1.5})
    return Work("1 mlp", model, dataset, clients, Training(), len(clients), rounds, aims, share)


def cifar_cnn(scale: float, rounds: int = 4) -> Work:
    """Work 2: the CNN on 50,000 x 3x32x32, N=20, E=1, B=32."""
    dataset = synthetic((3, 32, 32), 50_000)
    clients, share = some_clients(50_000, 20, scale / 2)
    if scale < 1:  # a step takes so long that what a fit costs beside its steps does not show
        clients, share = tuple(indices[:1250] for indices in clients), share.replace("all", "half of")
    model = seeded(lambda: Cnn((3, 32, 32), NUM_CLASSES))
    return Work("2 cnn", model, dataset, clients, Training(), len(clients), rounds, Aims(1.15, 1.6), share)


def tiny_fits(scale: float, model: nn.Module | None = None, features: int = 784, cohort: int = 10) -> Work:
    """Work 3: softmax 784-10, 1000 clients of 60 samples, 10 per round, E=1, B=10. The scale leaves out rounds."""
    rounds = max(5, round(100 * min(1.0, scale)))
    return Work(
        name="3 tiny fits",
        model=model or seeded(lambda: Softmax((features,), NUM_CLASSES)),
        dataset=synthetic((features,), 60_000),
        clients=tuple(torch.arange(60_000).split(60)),
        training=Training(batch_size=10),
        cohort=cohort,
        rounds=rounds,
        aims=Aims(1.3, None),
        share=f"{rounds} of 100 rounds",
    )


def some_clients(num_samples: int, num_clients: int, scale: float) -> tuple[tuple[Tensor, ...], str]:
    """The first clients of an equal split; at least two, since a single model is not averaged at all."""
    number = min(num_clients, max(2, round(scale * num_clients)))
    clients = torch.arange(num_samples).split(num_samples // num_clients)
    return clients[:number], f"{number} of {num_clients} clients a round, all their samples"


def synthetic(shape: tuple[int, ...], num_samples: int) -> Dataset:
    """Ten noisy class means, as floats."""
    num_test = 10_000
    stream = torch.Generator().manual_seed(0)
    means = torch.randn(NUM_CLASSES, *shape, generator=stream)
    y = torch.randint(NUM_CLASSES, (num_samples + num_test,), generator=stream)
    x = torch.randn(num_samples + num_test, *shape, generator=stream)
    x.add_(means[y], alpha=0.05)
    return Dataset(x[:num_samples], y[:num_samples], x[num_samples:], y[num_samples:], NUM_CLASSES)


def as_bytes(work: Work) -> Work:
    """The same work on data as real images are stored."""

    def quantise(x: Tensor) -> Tensor:
        return x.mul(32).add_(128).clamp_(0, 255).to(torch.uint8)

    dataset = work.dataset
    train_x, test_x = quantise(dataset.train_x), quantise(dataset.test_x)
    return replace(work, dataset=replace(dataset, train_x=train_x, test_x=test_x, mean=(0.5,), std=(0.125,)))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()
