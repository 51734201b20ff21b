"""Expectation propagation on networks against brute force: every kind of inference in plain loops."""

import pytest
import torch

from fl_lightning.engines.functional import Functional
from fl_lightning.methods.ep import EP
from fl_lightning.params import flatten
from tests.support import references
from tests.support.cases import ENGINES, final, largest_difference, ragged


def sample_squares(case, params, indices):
    """sum_i g_i^2, sample by sample."""
    slopes = [references.gradient(case, params, index.unsqueeze(0)) for index in indices]
    return {k: sum(slope[k] ** 2 for slope in slopes) for k in params}


def run_by_hand(case, cohorts, method):
    """EP with laplace and the implicit step in plain loops; states after every round."""
    prior = method.prior
    x = references.initial(case)
    v = {n: {k: torch.zeros_like(p) for k, p in x.items()} for n in range(len(case.clients))}
    precisions = {n: {k: torch.zeros_like(p) for k, p in x.items()} for n in range(len(case.clients))}
    mu, s = dict(x), {k: torch.full_like(p, prior) for k, p in x.items()}
    history = []
    for number, cohort in enumerate(cohorts, start=1):
        rho, news = method.damping or 1 / len(cohort), {}
        for n, epochs in cohort.items():
            m, y = len(case.clients[n]), dict(mu)
            c_precision = {k: s[k] - precisions[n][k] for k in x}
            centre = {k: x[k] + (s[k] * (mu[k] - x[k]) - v[n][k]) / c_precision[k] for k in x}
            path = {k: torch.zeros_like(p) for k, p in x.items()}
            for batch in references.batches(case, n, number, epochs):
                slope = references.gradient(case, y, batch)
                squares = sample_squares(case, y, batch)
                path = {k: path[k] + squares[k] / epochs for k in x}
                pull = {k: case.training.lr * c_precision[k] / m for k in x}
                y = {k: (y[k] - case.training.lr * slope[k] + pull[k] * centre[k]) / (1 + pull[k]) for k in x}
            squares = path if method.curvature == "path" else sample_squares(case, y, case.clients[n])
            level = method.floor * float(torch.cat([a.flatten() for a in squares.values()]).mean())
            news[n] = y, {k: c_precision[k] + squares[k] + level for k in x}
        for n, (y, p) in news.items():
            v[n] = {k: v[n][k] + rho * (p[k] * (y[k] - x[k]) - s[k] * (mu[k] - x[k])) for k in x}
            precisions[n] = {k: precisions[n][k] + rho * (p[k] - s[k]) for k in x}
        s = {k: prior + sum(precisions[n][k] for n in precisions) for k in x}
        mu = {k: x[k] + sum(v[n][k] for n in v) / s[k] for k in x}
        history.append((mu, s))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize(
    "changes", [{}, {"fraction": 0.5, "rounds": 5}, {"straggler_fraction": 0.5, "epochs": 4}], ids=str
)
def test_matches_brute_force_on_every_engine(engine, changes):
    case = ragged().changed(**changes)
    for method in (EP(prior=0.2, curvature="end"), EP(prior=1.0, damping=0.5, floor=0.3)):
        records = case.run(method, engine)
        history = run_by_hand(case, references.cohorts(records), method)
        for record, (mean, precision) in zip(records, history, strict=True):
            assert largest_difference(record.after.state.params, mean) < 1e-11
            assert largest_difference(record.after.state.precision, precision) < 1e-11


def test_4_a_single_client_is_trained_with_the_prior_and_gets_its_laplace_approximation():
    """Round 1 with rho = 1: N(y, (prior + sum_i g_i^2)^-1), as laplace-torch's DiagLaplace with EF would have it."""
    case = ragged(sizes=(0, 20, 0))
    record = case.run(EP(prior=2.0, damping=1.0, curvature="end"), rounds=1)[0]
    y = references.initial(case)
    start = dict(y)
    for batch in references.batches(case, 1, 1):
        slope = references.gradient(case, y, batch)
        pull = case.training.lr * 2.0 / 20
        y = {k: (y[k] - case.training.lr * slope[k] + pull * start[k]) / (1 + pull) for k in y}
    assert largest_difference(record.after.state.params, y) < 1e-12
    squares = sample_squares(case, y, case.clients[1])
    assert largest_difference(record.after.state.precision, {k: 2.0 + squares[k] for k in y}) < 1e-12


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_samples_are_means_of_epochs(engine):
    """Mean and shrunk variance of the epochs' mean models after the burn-in, by keeping them all."""
    case = ragged().changed(epochs=5, rounds=1)
    method = EP(inference="samples", burn_in=2, shrinkage=0.5, scale=0.2, prior=0.7)
    for report, result in zip(*(lambda r: (r.reports, r.clients))(case.run(method, engine)[0]), strict=True):
        n, y = result.local.client, references.initial(case)
        start, size = dict(y), len(case.clients[n])
        pull = case.training.lr * 0.7 / size
        batches = references.batches(case, n, 1)
        per_epoch, iterates = len(batches) // 5, []
        for batch in batches:
            slope = references.gradient(case, y, batch)
            y = {k: (y[k] - case.training.lr * slope[k] + pull * start[k]) / (1 + pull) for k in y}
            iterates.append(torch.cat([value.flatten() for value in y.values()]))
        samples = torch.stack([torch.stack(iterates[i * per_epoch : (i + 1) * per_epoch]).mean(0) for i in (2, 3, 4)])
        trust = 1 / (1 + 2 * 0.5)
        variance = trust / (0.7 + size * 0.2) + (1 - trust) * samples.var(0)
        assert torch.allclose(flatten(report.params), samples.mean(0), rtol=0, atol=1e-12)
        assert torch.allclose(flatten(report.precision), 1 / variance, rtol=1e-9)


def test_samples_without_trust_are_identity():
    case = ragged().changed(epochs=4)
    records = {kind: case.run(EP(inference=kind, shrinkage=0.0), rounds=1)[0] for kind in ("samples", "identity")}
    for one, other in zip(records["samples"].reports, records["identity"].reports, strict=True):
        assert torch.allclose(flatten(one.precision), flatten(other.precision), rtol=1e-14)
        assert largest_difference(one.params, other.params) > 1e-6  # the mean of the samples is not the last iterate


def ivon_by_hand(case, plan, mu, s, factor, method, epochs=None):
    """A client's IVON in plain numbers: the mean and the precision that it ends with."""
    n, number = plan.data.client, plan.round
    lam = len(case.clients[n]) / method.temperature
    v, a, x = factor
    c_precision = {k: s[k] - a[k] for k in mu}
    centre = {k: x[k] + (s[k] * (mu[k] - x[k]) - v[k]) / c_precision[k] for k in mu}
    d = {k: c_precision[k] / lam for k in mu}
    h = {k: torch.maximum(a[k] / lam, torch.tensor(method.curvature_start, dtype=torch.float64)) for k in mu}
    b1, b2, m = method.gradient_decay, method.curvature_decay, dict(mu)
    g_bar = {k: torch.zeros_like(p) for k, p in mu.items()}
    for step, batch in enumerate(references.batches(case, n, number, epochs)):
        noise = plan.noise(step, mu)
        theta = {k: m[k] + noise[k] / (lam * (h[k] + d[k])) ** 0.5 for k in mu}
        g = references.gradient(case, theta, batch)
        for k in mu:
            h_hat = lam * (theta[k] - m[k]) * g[k] * (h[k] + d[k])
            h[k] = b2 * h[k] + (1 - b2) * h_hat + 0.5 * (1 - b2) ** 2 * (h[k] - h_hat) ** 2 / (h[k] + d[k])
            g_bar[k] = b1 * g_bar[k] + (1 - b1) * g[k]
            slope = g_bar[k] / (1 - b1 ** (step + 1)) + d[k] * (m[k] - centre[k])
            m[k] = m[k] - case.training.lr * method.curvature_start * slope / (h[k] + d[k])
    return m, {k: lam * (h[k] + d[k]) for k in mu}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("changes", [{"fraction": 0.5, "rounds": 4}, {"straggler_fraction": 0.5, "epochs": 3}], ids=str)
def test_vi_matches_brute_force_on_every_engine(engine, changes):
    case = ragged().changed(**changes)
    method = EP(inference="vi", prior=1.5, temperature=0.5, curvature_start=0.2)
    for record in case.run(method, engine):
        before = record.before.state
        for report, result, epochs in zip(record.reports, record.clients, record.cohort.epochs, strict=True):
            v, a = before.factors[result.local.client]
            plan = result.local.plan
            mean, precision = ivon_by_hand(
                case, plan, before.params, before.precision, (v, a, before.origin), method, epochs
            )
            assert largest_difference(report.params, mean) < 1e-12
            assert torch.allclose(flatten(report.precision), flatten(precision), rtol=1e-10)


def test_explicit_and_implicit_steps_agree_for_a_weak_pull_only():
    case = ragged()
    for prior, alike in ((1e-6, True), (1e3, False)):
        one, other = (final(case.run(EP(prior=prior, prior_step=how), rounds=1)) for how in ("implicit", "explicit"))
        assert (largest_difference(one, other) < 1e-8) == alike


def test_float32_stays_close_to_float64():
    """Sums are in float64, rounded once: after some rounds float32 is as far off as its own rounding."""
    one = final(ragged(torch.float32).run(EP(), Functional(chunk=1), rounds=4))
    other = final(ragged().run(EP(), rounds=4))
    assert largest_difference({k: v.double() for k, v in one.items()}, other) < 1e-3
