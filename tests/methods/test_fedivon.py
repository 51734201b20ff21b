"""FedIvon: IVON and the product in plain loops, exact on quadratic clients, and what it is in degenerate cases."""

import pytest
import torch

from fl_lightning.errors import UserError
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.methods import fola
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedivon import FedIvon, Report
from fl_lightning.params import flatten
from fl_lightning.runs.config.run_config import configure
from tests.support import references
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged

SETTINGS = {"prior": 0.05, "temperature": 0.5, "curvature_start": 0.2, "curvature_decay": 0.9}


def ivon_by_hand(case, plan, epochs, mean, curvature, method):
    """One client in plain numbers: m and h after its steps."""
    n, m, h = plan.data.client, dict(mean), dict(curvature)
    lam, delta = len(case.clients[n]) / method.temperature, method.prior
    b1, b2 = method.gradient_decay, method.curvature_decay
    g_bar = {k: torch.zeros_like(p) for k, p in m.items()}
    for step, batch in enumerate(references.batches(case, n, plan.round, epochs)):
        noise = plan.noise(step, m)
        theta = {k: m[k] + noise[k] / (lam * (h[k] + delta)) ** 0.5 for k in m}
        g = references.gradient(case, theta, batch)
        for k in m:
            h_hat = lam * (theta[k] - m[k]) * g[k] * (h[k] + delta)
            h[k] = b2 * h[k] + (1 - b2) * h_hat + 0.5 * (1 - b2) ** 2 * (h[k] - h_hat) ** 2 / (h[k] + delta)
            g_bar[k] = b1 * g_bar[k] + (1 - b1) * g[k]
            slope = g_bar[k] / (1 - b1 ** (step + 1)) + delta * m[k]
            m[k] = m[k] - case.training.lr * method.curvature_start * slope / (h[k] + delta)
    return m, h


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("changes", [{"fraction": 0.5, "rounds": 4}, {"straggler_fraction": 0.5, "epochs": 3}], ids=str)
def test_matches_brute_force_on_every_engine(engine, changes):
    """C3 (7) with it: the same noise for the same (seed, round, client, step)."""
    case, method = ragged().changed(**changes), FedIvon(**SETTINGS)
    mu = references.initial(case)
    h = {k: torch.full_like(p, method.curvature_start) for k, p in mu.items()}
    for record in case.run(method, engine):
        cohort, found = record.cohort, []
        for result, epochs in zip(record.clients, cohort.epochs, strict=True):
            found.append(ivon_by_hand(case, result.local.plan, epochs, mu, h, method))
            assert largest_difference(result.local.params, found[-1][0]) < 1e-11
        share = references.weights(case, list(cohort.members)).values()
        weights = {k: [p * (b[k] + method.prior) for p, (_, b) in zip(share, found, strict=True)] for k in mu}
        mu = {k: sum(w * m[k] for w, (m, _) in zip(weights[k], found, strict=True)) / sum(weights[k]) for k in mu}
        h = {k: sum(p * b[k] for p, (_, b) in zip(share, found, strict=True)) for k in mu}
        assert largest_difference(record.after.state.params, mu) < 1e-11
        precision = {k: h[k] + method.prior for k in h}
        assert largest_difference(record.after.state.posterior.precision, precision) < 1e-10


def test_4_the_server_is_folas_product():
    case, method = ragged(), FedIvon()
    product = fola.Fola(damping=0.0, strength=0.0)
    for record in case.run(method):
        reports = [fola.Report(report.posterior) for report in record.reports]
        theirs = product.aggregate(fola.State(record.before.state.posterior), record.cohort, reports)
        assert equal_bits(record.after.state.params, theirs.params)
        assert equal_bits(record.after.state.posterior.precision, theirs.posterior.precision)


def test_quadratic_clients_that_have_converged_give_the_optimum_of_all():
    """mu_n the minimum and h_n the curvature of each: mu_S is where the weighted sum of the losses is flat."""
    record = ragged().run(FedIvon(), rounds=1)[0]
    stream, like = torch.Generator().manual_seed(2), record.after.state.params
    draw = [{k: torch.rand(p.shape, generator=stream).double() + 0.1 for k, p in like.items()} for _ in range(8)]
    curvatures, minima = draw[:4], draw[4:]
    reports = [Report(Diagonal(b, a)) for a, b in zip(curvatures, minima, strict=True)]
    found = FedIvon().aggregate(record.before.state, record.cohort, reports).params
    for k in like:
        slopes = [
            p * a[k] * (found[k] - b[k]) for p, a, b in zip(record.cohort.weights, curvatures, minima, strict=True)
        ]
        assert float(sum(slopes).abs().max()) < 1e-15


def test_without_noise_and_with_fixed_curvature_it_is_fedavg():
    """T -> 0, b1 = 0, b2 = 1 and hardly any prior: IVON is SGD, and equal precisions average."""
    method = FedIvon(temperature=1e-16, prior=1e-12, gradient_decay=0.0, curvature_decay=1.0)
    case = ragged()
    assert largest_difference(final(case.run(method)), final(case.run(FedAvg()))) < 1e-6


def test_a_single_client_goes_on_where_it_was():
    case, method = ragged(sizes=(0, 20, 0)), FedIvon(**SETTINGS)
    mu = references.initial(case)
    h = {k: torch.full_like(p, method.curvature_start) for k, p in mu.items()}
    for record in case.run(method):
        mu, h = ivon_by_hand(case, record.clients[0].local.plan, None, mu, h, method)
        assert largest_difference(record.after.state.params, mu) < 1e-12


def test_a_strong_prior_shrinks_the_model_to_zero():
    """delta is the weight decay of IVON, around zero: its pull is lr h_0 per step where delta outweighs h."""
    case = ragged().changed(rounds=30, lr=1.0)
    assert float(flatten(final(case.run(FedIvon(prior=1e3)))).abs().max()) < 1e-3


def test_curvature_may_be_negative_and_the_precision_never_is():
    """A steep b2 on a few samples: some h_n are below zero, where weights h_n alone would make no average."""
    method = FedIvon(prior=0.5, curvature_start=0.01, curvature_decay=0.3, temperature=1.0)
    records = ragged().run(method, rounds=4)
    reported = torch.stack([flatten(report.posterior.precision) for r in records for report in r.reports])
    assert bool((reported < method.prior).any())
    assert bool((reported > 0).all())
    for record in records:
        models = torch.stack([flatten(result.local.params) for result in record.clients])
        found = flatten(record.after.state.params)
        assert bool(((found >= models.amin(0) - 1e-12) & (found <= models.amax(0) + 1e-12)).all())


def test_8_traffic_is_two_models_each_way():
    case = ragged()
    for record in case.run(FedIvon(), fraction=0.5):
        exact = 2 * 4 * case.task().num_params * len(record.cohort.members)
        assert (record.bytes_down, record.bytes_up) == (exact, exact)


def test_its_own_posterior_is_the_curvature_per_sample():
    """What predictions are made from: h_S = sum_n p_n h_n of the last round, without the prior."""
    case, method = ragged(), FedIvon(prior=0.5)
    last = case.run(method)[-1]
    own = method.posterior(last.after.state, last.round, case.training, [len(one) for one in case.clients])
    rows = [flatten(report.posterior.precision) - 0.5 for report in last.reports]
    mean = sum(p * row for p, row in zip(last.cohort.weights, rows, strict=True))
    assert torch.allclose(flatten(own.posterior.precision), mean, rtol=0, atol=1e-13)
    assert (own.scale, own.prior) == (1.0, None)


def test_diagnostics():
    method = FedIvon()
    last = ragged().run(method)[-1]
    numbers = method.diagnose(last.before.state, last.cohort, last.reports, last.after.state)
    precision = flatten(last.after.state.posterior.precision)
    assert numbers["precision_mean"] == pytest.approx(float(precision.mean()))
    assert (numbers["precision_min"], numbers["precision_max"]) == (float(precision.min()), float(precision.max()))
    assert sum(numbers["precision_share"]) == pytest.approx(1)
    rows = torch.stack([flatten(report.posterior.precision) for report in last.reports])
    weights = torch.tensor(last.cohort.weights, dtype=torch.float64)[:, None]
    shift = (weights * rows / (weights * rows).sum(0) - weights).abs().sum(0).mean()
    assert numbers["weight_shift"] == pytest.approx(float(shift))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prior": 0.0},
        {"temperature": -1.0},
        {"curvature_start": 0.0},
        {"gradient_decay": 1.0},
        {"curvature_decay": 1.5},
    ],
    ids=str,
)
def test_refuses_impossible_settings(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(UserError, match=rf"method\.{name} must .*, got {value}"):
        FedIvon(**wrong)


def test_refuses_sgds_momentum_and_decay():
    for name in ("momentum", "weight_decay"):
        with pytest.raises(UserError, match=rf"expected training.{name} 0, got 0.9"):
            ragged().run(FedIvon(), **{name: 0.9})


def test_settings_from_the_command_line():
    assert configure({"method": "fedivon", "method.prior": "0.2"}).method == FedIvon(prior=0.2)


def test_learns():
    records = ragged().changed(rounds=20).run(FedIvon())
    assert records[-1].clients[0].train_loss < records[0].clients[0].train_loss
