"""Plain gradients, which leave nothing behind, and the implicit step on a quadratic penalty."""

import torch

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.optimisers.base import Gradients
from fl_lightning.optimisers.sgd import ImplicitPenalty, Sgd
from fl_lightning.penalty import Quadratic
from fl_lightning.training import Training
from tests.support.cases import ENGINES, largest_difference, ragged


def test_sgd_leaves_no_memory_behind():
    case = ragged().changed(momentum=0.9)
    states = {}

    class Watching(FedAvg):
        def report(self, local, context):
            states[local.client] = local.optimiser_state
            return super().report(local, context)

    for engine in ENGINES.values():
        case.run(Watching(), engine, rounds=1)
        assert set(states.values()) == {()}


def quadratic(stiffness):
    return Quadratic(
        {"w": torch.tensor([3.0, -1.0], dtype=torch.float64)}, {"w": torch.tensor(stiffness, dtype=torch.float64)}
    )


def test_the_implicit_step_minimises_what_it_says():
    """argmin P(theta) + ||theta - theta'||^2 / (2 lr), by the zero of its derivative."""
    penalty, training = quadratic([0.5, 700.0]), Training(lr=0.1)
    params, g = (
        {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"w": torch.tensor([0.3, -0.2], dtype=torch.float64)},
    )
    new, _ = ImplicitPenalty(training, penalty).step(params, {}, Gradients(g, penalty.grad(params)), {}, 0)
    moved = params["w"] - 0.1 * g["w"]
    assert torch.allclose(penalty.grad(new)["w"] + (new["w"] - moved) / 0.1, torch.zeros(2).double(), atol=1e-11)


def test_the_implicit_step_never_overshoots_and_is_sgds_where_the_pull_is_weak():
    params, g = (
        {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"w": torch.tensor([0.3, -0.2], dtype=torch.float64)},
    )
    training = Training(lr=0.1)
    for size in (1e-6, 1e-3):
        penalty = quadratic([size, size])
        gradients = Gradients(g, penalty.grad(params))
        weak, _ = ImplicitPenalty(training, penalty).step(params, {}, gradients, {}, 0)
        explicit, _ = Sgd(training).step(params, {}, gradients, {}, 0)
        assert largest_difference(weak, explicit) < 0.1 * size  # O(lr a (lr g + lr a)): second order
    stiff, _ = ImplicitPenalty(training, quadratic([1e9, 1e9])).step(params, {}, Gradients(g), {}, 0)
    assert torch.allclose(stiff["w"], torch.tensor([3.0, -1.0], dtype=torch.float64), atol=1e-7)
