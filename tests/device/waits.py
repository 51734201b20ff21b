"""How often the host waits for the device in a round, and where."""

from collections import Counter

import torch
from torch import nn

from fl_lightning import Dataset, Federation, Problem, Task, Training, federate, measure
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.scaffold import Scaffold
from tests.device import simulated

SAMPLES, BATCH = 48, 16
ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=100), "lightning": Lightning()}
METHODS = {"FedAvg": FedAvg(), "FedProx": FedProx(mu=0.1), "SCAFFOLD": Scaffold(), "FOLA": Fola(strength=10.0)}


def network(layers):
    torch.manual_seed(5)
    hidden = [module for _ in range(layers) for module in (nn.Linear(20, 20), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(20, 3))


def problem(clients, layers, tests=100):
    torch.manual_seed(0)
    x = torch.randn(clients * SAMPLES + tests, 20)
    y, cut = (x @ torch.randn(20, 3)).argmax(1), clients * SAMPLES
    dataset = Dataset(x[:cut], y[:cut], x[cut:], y[cut:], num_classes=3)
    return Problem(Task(network(layers).to("sim")), dataset, list(torch.arange(cut).split(SAMPLES)))


def place(stack):
    """The innermost line of ours."""
    ours = (line.partition("/fl_lightning/")[2] for line in stack if "/fl_lightning/" in line)
    return next((line for line in ours if not line.startswith("tests")), "backward pass")


def of_second_round(method, engine, clients=4, epochs=1, layers=1, tests=100):
    """The waits of round 2: in training with aggregation, and in measuring. Nothing is done for the first time."""
    given = problem(clients, layers, tests)
    training = Training(lr=0.1, epochs=epochs, batch_size=BATCH)
    records = federate(method, given, training, Federation(rounds=2), engine)
    measure(method, given.task, given.dataset, next(records))
    with simulated.counting() as trained:
        record = next(records)
    with simulated.counting() as measured:
        measure(method, given.task, given.dataset, record)
    return tuple(Counter(by_place(seen)) for seen in (trained, measured))


def by_place(seen):
    found = Counter()
    for (kind, _, stack), number in seen.items():
        found[("upload" if kind == "h2d" else "wait", place(stack))] += number
    return found


def total(counter, kind="wait"):
    return sum(number for (found, _), number in counter.items() if found == kind)


def cost(method, engine):
    """(training, measuring): each a dict of total, per step of a client, per client, per layer of two tensors."""
    found = []
    base, steps, more, deeper = (
        of_second_round(method, engine, **changes) for changes in ({}, {"epochs": 2}, {"clients": 8}, {"layers": 2})
    )
    for which in (0, 1):
        one = total(base[which])
        found.append(
            {
                "round": one,
                "step": total(steps[which]) - one,
                "client": (total(more[which]) - one) / 4,
                "layer": total(deeper[which]) - one,
                "uploads": total(base[which], "upload"),
            }
        )
    return found


if __name__ == "__main__":
    simulated.register()
    for name, method in METHODS.items():
        for kind, engine in ENGINES.items():
            training, measuring = zip(cost(method, engine), of_second_round(method, engine), strict=True)
            for phase, (found, where) in (("training", training), ("measuring", measuring)):
                print(f"{name:9} {kind:10} {phase:10} {found}")
                for (what, line), number in where.most_common(12):
                    print(f"      {number:4} {what:6} {line}")
