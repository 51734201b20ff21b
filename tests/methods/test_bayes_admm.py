"""BayesADMM: exact on conjugate clients, convergent for any rho, and brute force on networks."""

import pytest
import torch

from fl_lightning.errors import UserError
from fl_lightning.methods.bayes_admm import BayesADMM
from fl_lightning.methods.parts.ep_cavity import Report
from fl_lightning.params import flatten
from fl_lightning.runs.config.run_config import configure
from tests.support import references
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged
from tests.support.conjugate import ORIGIN, SIZES, cohort_of, distance, exact_posterior, quadratics


def exact_round(method, state, members, clients, sizes=SIZES):
    """lambda_n = lambda_S + (lik_n - eta_n) / rho, in natural parameters; what IVON would find for quadratic losses."""
    cohort = cohort_of(members, sizes)
    rho = method.rho or 1 / len(sizes)
    s, reports = state.precision["w"], []
    for n in members:
        a, b = clients[n]
        dual = state.duals[n]
        precision = s + (sizes[n] * a / method.temperature - dual.precision["w"]) / rho
        moment = s * (state.params["w"] - ORIGIN["w"])
        moment = moment + (sizes[n] * a * (b - ORIGIN["w"]) / method.temperature - dual.moment["w"]) / rho
        reports.append(Report({"w": ORIGIN["w"] + moment / precision}, {"w": precision}))
    return method.aggregate(state, cohort, reports)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_1_exact_after_one_round(temperature):
    method, clients = BayesADMM(rho=None, prior=0.3, temperature=temperature), quadratics()
    state = exact_round(method, method.init(ORIGIN, 4), range(4), clients)
    assert distance(state, exact_posterior(method, clients)) < 1e-13


@pytest.mark.parametrize("rho", [0.05, 0.25, 1.0])
def test_1_any_rho_converges(rho):
    method, clients = BayesADMM(prior=0.3, rho=rho, temperature=1.0), quadratics()
    state, target = method.init(ORIGIN, 4), exact_posterior(method, clients)
    start = distance(state, target)
    for _ in range(400):
        state = exact_round(method, state, range(4), clients)
    assert distance(state, target) < 1e-8 * start
    for n, (a, b) in enumerate(clients):  # the dual is the client's likelihood
        assert torch.allclose(state.duals[n].precision["w"], SIZES[n] * a, rtol=1e-6)
        assert torch.allclose(state.duals[n].moment["w"], SIZES[n] * a * (b - ORIGIN["w"]), rtol=1e-6)


def test_1_the_exact_posterior_stays():
    method, clients = BayesADMM(rho=None, prior=0.3), quadratics()
    state = exact_round(method, method.init(ORIGIN, 4), range(4), clients)
    target = exact_posterior(method, clients)
    for members in (range(4), (1,), (0, 3)):
        state = exact_round(method, state, tuple(members), clients)
        assert distance(state, target) < 1e-12


def test_6_without_duals_a_large_rho_takes_the_mean_of_natural_parameters():
    method = BayesADMM(prior=0.3, rho=1e12, damping=1e-12)
    state = method.init(ORIGIN, 4)
    reports = [
        Report({"w": torch.full((3,), float(n)).double()}, {"w": torch.full((3,), 1.0 + n).double()}) for n in range(4)
    ]
    after = method.aggregate(state, cohort_of(range(4)), reports)
    precision = sum(1.0 + n for n in range(4)) / 4
    moment = sum((1.0 + n) * (n - ORIGIN["w"]) for n in range(4)) / 4
    assert torch.allclose(after.precision["w"], torch.full((3,), precision).double(), rtol=1e-9)
    assert torch.allclose(after.params["w"], ORIGIN["w"] + moment / precision, rtol=1e-9)


def run_by_hand(case, records, method):
    """All of it in plain loops and natural parameters, the noise from its stream."""
    x = references.initial(case)
    owners = references.members(case)
    rho = method.rho or 1 / len(owners)
    a = 1 / (1 + rho * len(owners))
    s = {k: torch.full_like(p, method.prior) for k, p in x.items()}
    r = {k: torch.zeros_like(p) for k, p in x.items()}  # S (mu - x_0)
    dual_s = {n: {k: torch.zeros_like(p) for k, p in x.items()} for n in owners}
    dual_r = {n: {k: torch.zeros_like(p) for k, p in x.items()} for n in owners}
    history = []
    for record in records:
        found = {}
        for result, epochs in zip(record.clients, record.cohort.epochs, strict=True):
            n, plan = result.local.client, result.local.plan
            lam = len(case.clients[n]) / (method.temperature * rho)
            prior = {k: (s[k] - dual_s[n][k] / rho).clamp(min=method.prior) for k in x}
            d = {k: prior[k] / lam for k in x}
            # The gradient of the prior's term: precision clipped, slope at mu_S as it is.
            mu = {k: x[k] + r[k] / s[k] for k in x}
            slope = {k: (dual_s[n][k] * (mu[k] - x[k]) - dual_r[n][k]) / rho for k in x}
            h = {k: (dual_s[n][k] / rho / lam).clamp(min=method.curvature_start) for k in x}
            m, g_bar = dict(mu), {k: torch.zeros_like(p) for k, p in x.items()}
            b1, b2 = method.gradient_decay, method.curvature_decay
            for step, batch in enumerate(references.batches(case, n, record.round, epochs)):
                noise = plan.noise(step, x)
                theta = {k: m[k] + noise[k] / (lam * (h[k] + d[k])) ** 0.5 for k in x}
                g = references.gradient(case, theta, batch)
                for k in x:
                    h_hat = lam * (theta[k] - m[k]) * g[k] * (h[k] + d[k])
                    h[k] = b2 * h[k] + (1 - b2) * h_hat + 0.5 * (1 - b2) ** 2 * (h[k] - h_hat) ** 2 / (h[k] + d[k])
                    g_bar[k] = b1 * g_bar[k] + (1 - b1) * g[k]
                    pull = (prior[k] * (m[k] - mu[k]) - slope[k]) / lam
                    total = g_bar[k] / (1 - b1 ** (step + 1)) + pull
                    m[k] = m[k] - case.training.lr * method.curvature_start * total / (h[k] + d[k])
            found[n] = m, {k: prior[k] + lam * h[k] for k in x}
        natural = {n: ({k: p[k] * (m[k] - x[k]) for k in x}, p) for n, (m, p) in found.items()}
        for n, (moment, precision) in natural.items():
            dual_r[n] = {k: dual_r[n][k] + method.damping * rho * (moment[k] - r[k]) for k in x}
            dual_s[n] = {k: dual_s[n][k] + method.damping * rho * (precision[k] - s[k]) for k in x}
        mean_r = {k: sum(moment[k] for moment, _ in natural.values()) / len(natural) for k in x}
        mean_s = {k: sum(precision[k] for _, precision in natural.values()) / len(natural) for k in x}
        r = {k: (1 - a) * mean_r[k] + a * sum(dual_r[n][k] for n in owners) for k in x}
        s = {k: (1 - a) * mean_s[k] + a * (method.prior + sum(dual_s[n][k] for n in owners)) for k in x}
        s = {k: s[k].clamp(min=method.prior) for k in x}
        history.append(({k: x[k] + r[k] / s[k] for k in x}, s))
    return history


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("changes", [{"fraction": 0.5, "rounds": 4}, {"straggler_fraction": 0.5, "epochs": 3}], ids=str)
def test_matches_brute_force_on_every_engine(engine, changes):
    """C3 (7) with it: the same noise for the same (seed, round, client, step)."""
    case = ragged().changed(**changes)
    for method in (BayesADMM(rho=0.7, damping=0.5, temperature=0.5, curvature_start=0.2), BayesADMM(rho=None)):
        records = case.run(method, engine)
        for record, (mean, precision) in zip(records, run_by_hand(case, records, method), strict=True):
            assert largest_difference(record.after.state.params, mean) < 1e-11
            assert largest_difference(record.after.state.precision, precision) < 1e-9


def test_duals_add_up_to_what_the_server_sees():
    """Full participation: mean_n lambda_n - lambda_S = sum_n (change of eta_n) / (N damping rho)."""
    case, method = ragged(), BayesADMM(rho=0.5, damping=0.5)
    for record in case.run(method):
        before, after = record.before.state, record.after.state
        members = record.cohort.members
        moved = sum(flatten(after.duals[n].precision) - flatten(before.duals[n].precision) for n in members)
        seen = sum(flatten(report.precision) - flatten(before.precision) for report in record.reports)
        assert torch.allclose(moved, 0.25 * seen, rtol=1e-10, atol=1e-10)


def test_8_traffic_is_two_models_each_way():
    case = ragged()
    for record in case.run(BayesADMM(), fraction=0.5):
        exact = 2 * 4 * case.task().num_params * len(record.cohort.members)
        assert (record.bytes_down, record.bytes_up) == (exact, exact)


def test_order_of_clients_does_not_matter():
    method, clients = BayesADMM(prior=0.3, rho=0.5), quadratics()
    state = exact_round(method, method.init(ORIGIN, 4), range(4), clients)
    cohort = cohort_of((0, 1, 3))
    reports = [Report({"w": state.params["w"] + n}, {"w": state.precision["w"] * (n + 0.1)}) for n in (0, 1, 3)]
    one = method.aggregate(state, cohort, reports)
    other = method.aggregate(state, cohort._replace(members=(3, 1, 0)), reports[::-1])
    assert equal_bits(one.params, other.params)
    assert equal_bits(one.precision, other.precision)


def test_memory_holds_those_who_were_seen():
    seen = set()
    for record in ragged().run(BayesADMM(), rounds=3, cohort=1):
        seen |= set(record.cohort.members)
        assert set(record.after.state.duals.seen) == seen


def test_diagnostics_count_clips():
    case = ragged()
    for method, some in ((BayesADMM(rho=1.0, damping=0.1), False), (BayesADMM(rho=0.01), True)):
        last = case.run(method, rounds=3)[-1]
        numbers = method.diagnose(last.before.state, last.cohort, last.reports, last.after.state)
        assert (sum(numbers["prior_clips"]) > 0) == some
        assert numbers["precision_min"] >= method.prior


def test_a_server_below_the_prior_is_clipped_and_counted():
    method = BayesADMM(prior=0.3)
    record = ragged().run(method, rounds=1)[0]
    before, cohort = record.before.state, record.cohort
    for share, clipped in ((0.1, 6.0), (1.0, 0.0)):  # of the prior, which is all there is before the first round
        precision = {k: share * v if k == "0.bias" else v for k, v in before.precision.items()}
        reports = [Report(before.params, precision)] * len(cohort.members)
        after = method.aggregate(before, cohort, reports)
        assert method.diagnose(before, cohort, reports, after)["server_clips"] == clipped
        assert all(torch.equal(value, torch.full_like(value, 0.3)) for value in after.precision.values())


@pytest.mark.parametrize(
    "wrong", [{"rho": 0.0}, {"damping": 0.0}, {"damping": 2.0}, {"prior": 0.0}, {"temperature": -1.0}], ids=str
)
def test_refuses_impossible_settings(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(UserError, match=rf"method\.{name} must .*, got {value}"):
        BayesADMM(**wrong)


def test_refuses_momentum():
    with pytest.raises(UserError, match=r"expected training.momentum 0, got 0.9"):
        ragged().run(BayesADMM(), momentum=0.9)


def test_settings_from_the_command_line():
    assert configure({"method": "bayes_admm", "method.rho": "0.2"}).method == BayesADMM(rho=0.2)


def test_learns():
    case = ragged().changed(rounds=30)
    records = case.run(BayesADMM(rho=1.0))
    assert records[-1].clients[0].train_loss < records[0].clients[0].train_loss
    assert torch.isfinite(flatten(final(records))).all()
