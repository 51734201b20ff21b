"""The host waits for the device a few times per client and round, and never in a step: exact numbers.

docs/gpu.md has them in a table.
"""

import pytest
import torch

from fl_lightning import Training, configure, discovery, run
from fl_lightning.data.batches import ClientData, Plan
from fl_lightning.gaussian import kronecker_solve
from fl_lightning.gaussian.kronecker_solve import KronSum
from tests.device import simulated
from tests.device.runs_on_device import DEVICE
from tests.device.waits import ENGINES, METHODS, by_place, cost, of_second_round, problem, total

# Of a round of four clients, and what one more client adds. Steps and tensors add nothing.
TRAINING = {
    "FedAvg": {"loop": (9, 2), "vmap": (7, 1), "lightning": (9, 2)},
    "FedProx": {"loop": (13, 3), "vmap": (11, 2), "lightning": (13, 3)},
    "SCAFFOLD": {"loop": (13, 3), "vmap": (11, 2), "lightning": (13, 3)},
    "FOLA": {"loop": (14, 3), "vmap": (12, 2), "lightning": (14, 3)},
}
MEASURING = {"FedAvg": (4, 0), "FedProx": (4, 0), "SCAFFOLD": (5, 0), "FOLA": (13, 0)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_waits(method, engine):
    training, measuring = cost(METHODS[method], ENGINES[engine])
    assert (training["step"], training["layer"]) == (0, 0)
    assert (measuring["step"], measuring["layer"]) == (0, 0)
    assert (training["round"], training["client"]) == TRAINING[method][engine]
    assert (measuring["round"], measuring["client"]) == MEASURING[method]


def test_a_further_block_of_the_test_set_costs_one_wait():
    """A block has 1000 samples."""
    (_, one), (_, five) = (of_second_round(METHODS["FedAvg"], ENGINES["loop"], tests=n) for n in (1000, 5000))
    assert total(five) - total(one) == 4


def test_a_run_moves_its_test_set_once(out):
    settings = {"data": "digits", "data.clients": 2, "model": "softmax", "federation.rounds": 2}
    with simulated.counting() as seen:
        run(configure({**settings, "compute.device": DEVICE}), out)
    assert [place for (kind, place) in by_place(seen) if kind == "upload" and place.startswith("metrics")] == []


# What one more layer of two tensors adds to training, and to measuring.
GROWTH = {
    **dict.fromkeys(["bayes_admm", "ep", "fedivon", "fedlap", "fola_code", "fola_extended", "pvi"], (0, 0)),
    **{"fedsparse": (4, 0), "regmean": (6, 0), "fedlpa": (7, 0), "fedfisher": (14, 0)},
}


@pytest.mark.parametrize("name", GROWTH)
def test_waits_for_another_layer(name):
    method = discovery.find("methods", name)()
    few, more = (of_second_round(method, ENGINES["loop"], layers=layers) for layers in (1, 2))
    assert tuple(total(b) - total(a) for a, b in zip(few, more, strict=True)) == GROWTH[name]


def waits_of(function):
    with simulated.counting() as seen:
        function()
    return sum(number for (kind, *_), number in seen.items() if kind != "h2d")


def factors(size):
    stream = torch.Generator().manual_seed(size)
    roots = [torch.randn(size, size, generator=stream, dtype=torch.float64) for _ in range(3)]
    return [(root @ root.T).to(DEVICE) for root in roots]


def test_an_iteration_of_conjugate_gradients_waits_twice(monkeypatch):
    """For its length, and for what is left."""
    equation = KronSum(factors(6), factors(5), [0.2, 0.3, 0.5], 0.0, 0.0, 1e-3)
    right = torch.ones(6, 5, dtype=torch.float64, device=DEVICE)
    found = {}
    for most in (2, 5):
        monkeypatch.setattr(kronecker_solve, "MOST_ITERATIONS", most)
        found[most] = waits_of(lambda: equation.solved(right))
    assert found[5] - found[2] == 3 * 2


def test_noise_is_drawn_on_the_device():
    given = problem(clients=1, layers=1)
    data = ClientData(0, given.dataset, given.clients[0], torch.float32)
    plan = Plan(data, seed=0, round=1, training=Training(), num_epochs=1)
    with simulated.counting() as seen:
        noise = plan.noise(0, given.task.initial.params)
    assert not seen
    assert {value.device.type for value in noise.values()} == {DEVICE}
