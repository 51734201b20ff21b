"""FedFisher against the objective that it minimises, and its degenerate cases."""

from dataclasses import replace

import pytest
import torch

from fl_lightning.gaussian import kronecker_solve
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.presets import FedFisher, RegMean
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged
from tests.support.layer_references import LAYERS, factors_of, joint


@pytest.fixture(autouse=True)
def converged(monkeypatch):
    monkeypatch.setattr(kronecker_solve, "TOLERANCE", 1e-13)


def objective(merged, models, factors, weights, damping, damping_slopes):
    """sum_n p_n <M - M_n, G_n (M - M_n) A_n>, both factors damped in units of their weighted mean."""
    mean = [sum(p * f[i] for p, f in zip(weights, factors, strict=True)) for i in (0, 1)]
    eyes = [torch.eye(len(m), dtype=torch.float64) for m in mean]
    ridges = [c * m.trace() / len(m) * e for c, m, e in zip((damping, damping_slopes), mean, eyes, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for p, model, (a, g) in zip(weights, models, factors, strict=True):
        offset = merged - model
        total = total + p * (offset * ((g + ridges[1]) @ offset @ (a + ridges[0]))).sum()
    return total


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("settings", [{}, {"damping": 0.01, "damping_slopes": 0.3}], ids=str)
def test_it_minimises_its_objective(settings, engine):
    """The gradient of the objective, by autograd, is zero at the server's model, and not at the average."""
    method = FedFisher(**settings)
    case = ragged().changed(rounds=2, fraction=0.75)
    for record in case.run(method, engine):
        members, weights = record.cohort.members, record.cohort.weights
        models = [result.local.params for result in record.clients]
        found = [factors_of(case, y, case.clients[n], "exact") for n, y in zip(members, models, strict=True)]
        for layer in LAYERS:
            own = [joint(model, layer) for model in models]
            average = sum(p * one for p, one in zip(weights, own, strict=True))
            slopes = []
            for point in (joint(record.after.state.params, layer), average):
                at = point.clone().requires_grad_()
                value = objective(at, own, [f[layer] for f in found], weights, method.damping, method.damping_slopes)
                slopes.append(float(torch.autograd.grad(value, at)[0].norm()))
            assert slopes[0] < 1e-9 * slopes[1]


def test_labels_do_not_matter_to_the_merging():
    """The Fisher's labels are the model's own, all of them by their probabilities."""
    case = ragged()
    shuffled = case._replace(dataset=replace(case.dataset, train_y=case.dataset.train_y.flip(0)))
    one, other = (c.run(FedFisher(), rounds=1, lr=1e-300)[0].reports for c in (case, shuffled))
    for mine, theirs in zip(one, other, strict=True):
        assert equal_bits(mine.posterior.parts(), theirs.posterior.parts())


def test_with_slopes_that_are_all_alike_it_is_regmean():
    """G_n + gamma_G I with a large gamma_G is the same for everybody, and drops out."""
    case = ragged()
    one, other = FedFisher(damping=0.05, damping_slopes=1e12), RegMean(damping=0.05)
    assert largest_difference(final(case.run(one)), final(case.run(other))) < 1e-8


def test_with_large_damping_it_is_fedavg():
    case, damped = ragged(), FedFisher(damping=1e12, damping_slopes=1e12)
    assert largest_difference(final(case.run(damped)), final(case.run(FedAvg()))) < 1e-7


def test_a_single_client_is_fedavg_bit_for_bit():
    case = ragged(sizes=(0, 20, 0))
    assert equal_bits(final(case.run(FedFisher())), final(case.run(FedAvg())))


def test_clients_train_as_fedavgs_in_every_round():
    case = ragged()
    for record in case.run(FedFisher()):
        assert all(result.prior_loss == 0 for result in record.clients)
    mine, fedavg = (case.run(method, rounds=1)[0] for method in (FedFisher(), FedAvg()))
    for a, b in zip(mine.clients, fedavg.clients, strict=True):
        assert equal_bits(a.local.params, b.local.params)


def test_rounds_aggregate_and_do_not_remember():
    """The published code aggregates outside its loop over rounds: here each starts at the last one's server."""
    case = ragged()
    first, second = case.run(FedFisher(), rounds=2)
    assert equal_bits(second.before.state.params, first.after.state.params)
    flat = first.after.state._replace(posterior=first.after.state.posterior.damped(7.0))
    (other,) = case.go_on(FedFisher(), resume=first.after._replace(state=flat))[:1]
    assert equal_bits(other.after.state.params, second.after.state.params)


def test_traffic_is_a_model_and_two_triangles_for_every_layer():
    case = ragged()
    for record in case.run(FedFisher(), fraction=0.5):
        numbers = case.task().num_params + sum(n * (n + 1) // 2 for n in (6, 6, 7, 3))
        assert record.bytes_up == 4 * numbers * len(record.cohort.members)
