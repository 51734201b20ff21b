"""FedProx against a plain loop, its degenerate cases, and the minimum of a quadratic in closed form."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.func import grad

from fl_lightning.data.dataset import Dataset
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.loop import Problem, federate
from fl_lightning.method import Context
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.models.task import Task
from fl_lightning.params import flatten
from fl_lightning.training import Federation, Training
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, ragged

ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=8), "lightning": Lightning()}
SETTINGS = {
    "plain": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 1e-3},
    "clipping": {"clip_norm": 0.5},
    "partial cohorts": {"fraction": 0.5},
    "uniform weights": {"weighting": "uniform"},
}


def reference(case, mu, rounds, momentum=0.0):
    """Both gradients at the same y; the velocity starts at zero in every round."""
    members = references.members(case)
    weights = references.weights(case, members)
    x = references.initial(case)
    for number in range(1, rounds + 1):
        total = {name: torch.zeros_like(value) for name, value in x.items()}
        for n in members:
            y = dict(x)
            velocity = {name: torch.zeros_like(value) for name, value in x.items()}
            for batch in references.batches(case, n, number):
                slope = references.gradient(case, y, batch)
                velocity = {name: momentum * velocity[name] + slope[name] + mu * (y[name] - x[name]) for name in y}
                y = {name: y[name] - case.training.lr * velocity[name] for name in y}
            total = {name: total[name] + weights[n] * y[name] for name in x}
        x = total
    return x


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("mu", [0.1, 1.0])
@pytest.mark.parametrize("engine", ENGINES)
def test_equals_brute_force(engine, mu, momentum):
    case = ragged()
    records = case.run(FedProx(mu=mu), ENGINES[engine], momentum=momentum)
    assert largest_difference(final(records), reference(case, mu, 3, momentum)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("setting", SETTINGS)
def test_without_pull_it_is_fedavg(setting, dtype):
    case = ragged(dtype)
    ours = case.run(FedProx(mu=0.0), **SETTINGS[setting])
    fedavg = case.run(FedAvg(), **SETTINGS[setting])
    for mine, theirs in zip(ours, fedavg, strict=True):
        assert equal_bits(mine.after.state.params, theirs.after.state.params)
        for a, b in zip(mine.clients, theirs.clients, strict=True):
            assert equal_bits(a.local.params, b.local.params)
    assert FedProx(mu=0.0).penalty(Context(final(ours))) is None


def test_without_pull_and_with_stragglers_it_is_fedavg_that_keeps_them():
    case = ragged()
    changes = {"straggler_fraction": 0.5, "epochs": 4}
    ours = final(case.run(FedProx(mu=0.0), **changes))
    assert equal_bits(ours, final(case.run(FedAvg(stragglers="keep"), **changes)))
    assert not equal_bits(ours, final(case.run(FedAvg(), **changes)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("engine", ENGINES)
def test_one_local_step_does_not_feel_the_pull(engine, dtype):
    case = ragged(dtype)
    one_step = {"epochs": 1, "batch_size": None}
    weak, strong = (final(case.run(FedProx(mu=mu), ENGINES[engine], **one_step)) for mu in (0.001, 5.0))
    assert equal_bits(weak, strong)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_local_steps_feel_the_pull(engine):
    """A pull made of detached tensors would have a value but no effect."""
    case = ragged()
    two_steps = {"epochs": 2, "batch_size": None, "rounds": 1}
    free, bound = (case.run(FedProx(mu=mu), ENGINES[engine], **two_steps)[0] for mu in (0.0, 1.0))
    for a, b in zip(free.clients, bound.clients, strict=True):
        assert largest_difference(a.local.params, b.local.params) > 1e-4
    assert all(result.prior_loss > 0 for result in bound.clients)


def test_the_penalty_is_half_mu_times_the_squared_distance():
    case = ragged()
    record = case.run(FedProx(mu=0.3), rounds=1)[0]
    start = flatten(references.initial(case))
    for result in record.clients:
        distance = float((flatten(result.local.params) - start).square().sum())
        assert result.prior_loss == pytest.approx(0.15 * distance, rel=1e-12)
    penalty = FedProx(mu=0.3).penalty(Context(references.initial(case)))
    slope = grad(penalty.value)(record.clients[0].local.params)
    expected = 0.3 * (flatten(record.clients[0].local.params) - start)
    assert torch.allclose(flatten(slope), expected, rtol=1e-12)


def test_a_stronger_pull_keeps_clients_closer():
    case = ragged()
    start = flatten(references.initial(case))
    drifts = []
    for mu in (0.0, 0.1, 1.0, 5.0):
        clients = case.run(FedProx(mu=mu), rounds=1, epochs=10)[0].clients
        drifts.append([float((flatten(result.local.params) - start).norm()) for result in clients])
    for weaker, stronger in pairwise(drifts):
        assert all(b < a for a, b in zip(weaker, stronger, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mu", [0.1, 2.0])
def test_many_steps_reach_the_minimum_of_a_quadratic(mu):
    """L(y) = 1/2 (y - a)^T A (y - a) is least squares with A = X^T X / m and A a = X^T t / m."""
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(30, 4, generator=stream, dtype=torch.float64)
    t = torch.randn(30, generator=stream, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double()
    start = torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64)
    model.weight.data.copy_(start)

    def half_square(output, label, reduction):  # sample i has label i and target t_i
        losses = 0.5 * (output.squeeze(1) - t[label]).square()
        return losses.mean() if reduction == "mean" else losses

    task = Task(model, half_square)
    label = torch.arange(30)
    dataset = Dataset(x, label, x[:1], label[:1], num_classes=30)
    training, federation = Training(lr=0.1, epochs=3000, batch_size=None), Federation(rounds=1)
    record = next(
        federate(FedProx(mu=mu), Problem(task, dataset, [torch.arange(30)]), training, federation, Functional(1))
    )
    curvature = x.T @ x / 30
    expected = torch.linalg.solve(curvature + mu * torch.eye(4), x.T @ t / 30 + mu * start[0])
    assert torch.allclose(record.after.state.params["weight"][0], expected, rtol=1e-10)


def test_traffic():
    case = ragged()
    size = case.task().num_params
    for record in case.run(FedProx(), fraction=0.5):
        assert len(record.cohort.members) == 2
        assert record.bytes_down == record.bytes_up == 4 * size * 2


@pytest.mark.parametrize("mu", [-0.1, float("inf"), float("nan")])
def test_impossible_strengths_are_refused(mu):
    with pytest.raises(UserError, match=r"method\.mu must be finite and >= 0, got"):
        FedProx(mu=mu)


def test_a_whole_number_will_do():
    case = ragged()
    assert equal_bits(final(case.run(FedProx(mu=1))), final(case.run(FedProx(mu=1.0))))
