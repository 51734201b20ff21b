"""FedSGD against gradient descent on the pooled data, and against FedAvg with one full batch."""

import pytest
import torch

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedsgd import FedSGD
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, ragged

ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=8), "lightning": Lightning()}
SETTINGS = {
    "plain": {},
    "partial cohorts": {"fraction": 0.5},
    "uniform weights": {"weighting": "uniform"},
    "decaying learning rate": {"lr_decay": 0.5},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.1},
    "clipping": {"clip_norm": 0.3},
    "clipping and weight decay": {"clip_norm": 0.3, "weight_decay": 0.1},
}


def reference(case, rounds, clip_norm=None):
    """x - lr sum_n p_n g_n, with the gradients of all clients at x."""
    members = references.members(case)
    weights = references.weights(case, members)
    x = references.initial(case)
    for _ in range(rounds):
        step = {name: torch.zeros_like(value) for name, value in x.items()}
        for n in members:
            grad = references.gradient(case, x, case.clients[n])
            norm = sum(float((g * g).sum()) for g in grad.values()) ** 0.5
            scale = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
            step = {name: step[name] + weights[n] * scale * grad[name] for name in x}
        x = {name: x[name] - case.training.lr * step[name] for name in x}
    return x


@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("engine", ENGINES)
def test_equals_brute_force(engine, clip_norm):
    case = ragged()
    records = case.run(FedSGD(), ENGINES[engine], clip_norm=clip_norm)
    assert largest_difference(final(records), reference(case, 3, clip_norm)) < 1e-13


def test_clipping_matters_in_that_comparison():
    case = ragged()
    assert largest_difference(reference(case, 3), reference(case, 3, 0.3)) > 1e-3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_a_round_is_one_step_of_gradient_descent_on_the_pooled_data(dtype, tolerance):
    case = ragged(dtype)
    x = references.initial(case)
    pooled = torch.cat(case.clients)
    for record in case.run(FedSGD()):
        grad = references.gradient(case, x, pooled)
        x = {name: x[name] - case.training.lr * grad[name] for name in x}
        assert largest_difference(record.after.state.params, x) < tolerance


@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_fedavg_with_one_full_batch(setting):
    case = ragged()
    ours = case.run(FedSGD(), **SETTINGS[setting])
    fedavg = case.run(FedAvg(), epochs=1, batch_size=None, **SETTINGS[setting])
    for mine, theirs in zip(ours, fedavg, strict=True):
        assert mine.cohort.members == theirs.cohort.members
        assert largest_difference(mine.after.state.params, theirs.after.state.params) < 1e-13
        for a, b in zip(mine.clients, theirs.clients, strict=True):
            assert largest_difference(a.local.params, b.local.params) < 1e-13  # LA is the same
            assert mine.round > 1 or equal_bits(a.local.params, b.local.params)
    assert largest_difference(final(ours), final(case.run(FedAvg(), **SETTINGS[setting]))) > 1e-3


def test_epochs_and_batch_size_do_not_matter():
    case = ragged()
    records = case.run(FedSGD(), epochs=5, batch_size=3)
    assert equal_bits(final(records), final(case.run(FedSGD(), epochs=1, batch_size=None)))
    assert records[0].gradient_evaluations == sum(len(indices) for indices in case.clients)


def test_there_are_no_stragglers_in_one_step():
    case = ragged()
    records = case.run(FedSGD(), epochs=5, straggler_fraction=1.0)
    assert records[0].cohort.members == tuple(references.members(case))
    assert equal_bits(final(records), final(case.run(FedSGD())))


@pytest.mark.parametrize("engine", ENGINES)
def test_reports_the_gradient_at_the_servers_model(engine):
    case = ragged()
    record = case.run(FedSGD(), ENGINES[engine], rounds=1)[0]
    for n, report in zip(record.cohort.members, record.reports, strict=True):
        expected = references.gradient(case, references.initial(case), case.clients[n])
        assert largest_difference(report.grad, expected) < 1e-14


def test_reports_the_gradient_even_at_learning_rate_zero():
    """A difference of models divided by the learning rate would not exist."""
    case = ragged()
    record = case.run(FedSGD(), rounds=1, lr=0.0)[0]
    assert equal_bits(record.reports[0].grad, case.run(FedSGD(), rounds=1)[0].reports[0].grad)
    assert equal_bits(record.after.state.params, references.initial(case))


def test_traffic():
    case = ragged()
    size = case.task().num_params
    for record in case.run(FedSGD(), fraction=0.5):
        assert len(record.cohort.members) == 2
        assert record.bytes_down == record.bytes_up == 4 * size * 2
