"""Expectation propagation: exact on conjugate clients, brute force on networks, and what the factors must obey."""

import pytest
import torch

from fl_lightning.config import configure
from fl_lightning.engines.functional import Functional
from fl_lightning.errors import UserError
from fl_lightning.method import Cohort, Server
from fl_lightning.methods.ep import EP, Report
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedep import FedEP
from fl_lightning.methods.fedlap_cov import FedLapCov
from fl_lightning.methods.fedsep import FedSEP
from fl_lightning.methods.pvi import PVI
from fl_lightning.methods.virtual import Virtual
from fl_lightning.params import flatten
from fl_lightning.system import memory
from fl_lightning.training import Training
from tests import references
from tests.cases import ENGINES, equal_bits, final, largest_difference, ragged

SIZES = (5, 40, 12, 3)
ORIGIN = {"w": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)}


def cohort_of(members, sizes=SIZES, number=1):
    """A cohort of clients whose losses are known in closed form: no task, no data."""
    total = sum(sizes)
    shares = tuple(sizes[n] / total for n in members)
    weights = tuple(share / sum(shares) for share in shares)
    server = Server(task=None, sizes=tuple(sizes), holdout=None, seed=0)
    return Cohort(number, tuple(members), weights, shares, (1,) * len(members), len(sizes), Training(), server)


def quadratics(sizes=SIZES):
    """Curvature A_n and minimum b_n of every client's mean loss 1/2 (theta - b_n)^T A_n (theta - b_n)."""
    stream = torch.Generator().manual_seed(1)
    draw = [torch.rand(2, 3, generator=stream, dtype=torch.float64) for _ in sizes]
    return [(0.1 + 2 * a, 4 * b - 2) for a, b in draw]


def exact_round(method, state, members, clients, sizes=SIZES, reverse=False):
    """A round in which every client minimises its loss and penalty exactly and knows its curvature."""
    cohort = cohort_of(members, sizes)
    context = method.broadcast(state, cohort)
    reports = []
    for position, n in enumerate(members):
        pull = method.penalty(context.of_member(position))
        (a, b), stiffness = clients[n], pull.stiffness["w"]
        y = (a * b + stiffness * pull.centre["w"]) / (a + stiffness)
        reports.append(Report({"w": y}, {"w": sizes[n] * (a + stiffness) / method.temperature}))
    if reverse:
        cohort, reports = cohort._replace(members=cohort.members[::-1]), reports[::-1]
    return method.aggregate(state, cohort, reports)


def exact_posterior(method, clients, sizes=SIZES):
    precision = method.prior + sum(m * a for m, (a, _) in zip(sizes, clients, strict=True)) / method.temperature
    moment = sum(m * a * (b - ORIGIN["w"]) for m, (a, b) in zip(sizes, clients, strict=True)) / method.temperature
    return ORIGIN["w"] + moment / precision, precision


def distance(state, target):
    mean, precision = target
    return max(float((state.params["w"] - mean).abs().max()), float((state.precision["w"] / precision - 1).abs().max()))


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_1_exact_after_one_round(temperature):
    method, clients = EP(damping=1.0, prior=0.3, temperature=temperature), quadratics()
    state = exact_round(method, method.init(ORIGIN, 4), range(4), clients)
    assert distance(state, exact_posterior(method, clients)) < 1e-14


def test_1_exact_as_soon_as_everybody_was_seen():
    method, clients = EP(damping=1.0, prior=0.3), quadratics()
    state, target = method.init(ORIGIN, 4), exact_posterior(method, clients)
    for members in ((1, 3), (0,), (1,)):
        state = exact_round(method, state, members, clients)
        assert distance(state, target) > 1e-3
    for members in ((2, 3), (0, 2), (0, 1, 2, 3)):
        state = exact_round(method, state, members, clients)
        assert distance(state, target) < 1e-13


def test_1_damping_shrinks_the_error_by_its_own_factor():
    method, clients = EP(prior=0.3), quadratics()
    state = method.init(ORIGIN, 4)
    mean, precision = exact_posterior(method, clients)
    moment = precision * (mean - ORIGIN["w"])
    for number in range(1, 6):
        state = exact_round(method, state, range(4), clients)
        left = (1 - 1 / 4) ** number
        found = state.precision["w"] * (state.params["w"] - ORIGIN["w"])
        assert torch.allclose(state.precision["w"] - precision, -left * (precision - 0.3), rtol=1e-12, atol=0)
        assert torch.allclose(found - moment, -left * moment, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("method", [EP(), EP(inference="identity", damping=0.7), EP(inference="vi")], ids=str)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_2_the_server_is_the_product_of_its_factors(method, fraction):
    case = ragged()
    for record in case.run(method, rounds=5, fraction=fraction):
        state = record.after.state
        rows = [state.factors[n] for n in range(len(case.clients))]
        precision = flatten(state.precision) - sum(flatten(row.precision) for row in rows)
        assert torch.allclose(precision, torch.full_like(precision, method.prior), atol=1e-12)
        offset = flatten(state.params) - flatten(state.origin)
        moment = flatten(state.precision) * offset - sum(flatten(row.moment) for row in rows)
        assert float(moment.abs().max()) < 1e-12
        assert equal_bits(state.origin, references.initial(case))


def test_3_the_exact_posterior_is_a_fixed_point():
    clients = quadratics()
    exact = exact_round(EP(damping=1.0, prior=0.3), EP(prior=0.3).init(ORIGIN, 4), range(4), clients)
    for method in (EP(damping=1.0, prior=0.3), EP(prior=0.3), EP(prior=0.3, damping=0.1)):
        state = exact
        for members in ((0, 1, 2, 3), (1,), (0, 3)):
            state = exact_round(method, state, members, clients)
            assert distance(state, (exact.params["w"], exact.precision["w"])) < 1e-12


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


def cohorts_of(records):
    return [dict(zip(r.cohort.members, r.cohort.epochs, strict=True)) for r in records]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize(
    "changes", [{}, {"fraction": 0.5, "rounds": 5}, {"straggler_fraction": 0.5, "epochs": 4}], ids=str
)
def test_matches_brute_force_on_every_engine(engine, changes):
    case = ragged().changed(**changes)
    for method in (EP(prior=0.2, curvature="end"), EP(prior=1.0, damping=0.5, floor=0.3)):
        records = case.run(method, engine)
        history = run_by_hand(case, cohorts_of(records), method)
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


def test_4_afterwards_its_cavity_is_the_prior_again():
    case, method = ragged(sizes=(0, 20, 0)), EP(prior=2.0, damping=1.0)
    last = case.run(method, rounds=3)[-1]
    pull = method.penalty(method.broadcast(last.before.state, last.cohort).of_member(0))
    assert largest_difference(pull.centre, references.initial(case)) < 1e-11
    assert torch.allclose(flatten(pull.stiffness), torch.tensor(2.0 / 20, dtype=torch.float64), rtol=1e-11)


def test_5_identity_at_its_level_averages_the_models():
    """No prior, V_n = h m_n already, rho = 1/N, equal sizes: V stays and mu_S is the plain mean of the y_n."""
    sizes, method = (6, 6, 6), EP(inference="identity", scale=0.3, prior=0.0)
    clients = quadratics(sizes)
    state = method.init(ORIGIN, 3)
    level = {"w": torch.full((3,), 0.3 * 6, dtype=torch.float64)}
    rows = {n: state.factors[n]._replace(precision=level) for n in range(3)}
    state = state._replace(factors=state.factors.replaced(rows), precision={"w": 3 * level["w"]})
    cohort = cohort_of(range(3), sizes)
    context = method.broadcast(state, cohort)
    models, reports = [], []
    for position, (a, b) in enumerate(clients):
        pull = method.penalty(context.of_member(position))
        y = (a * b + pull.stiffness["w"] * pull.centre["w"]) / (a + pull.stiffness["w"])
        models.append(y)
        reports.append(Report({"w": y}, {"w": pull.stiffness["w"] * 6 + 0.3 * 6}))
    after = method.aggregate(state, cohort, reports)
    assert torch.allclose(after.params["w"], sum(models) / 3, rtol=1e-14)
    assert torch.allclose(after.precision["w"], state.precision["w"], rtol=1e-14)


def test_5_identity_of_no_strength_is_fedavg_by_samples_in_round_1():
    """h -> 0 and no prior: nobody pulls, and precisions in proportion to m_n weigh the models."""
    case = ragged()
    mine = final(case.run(EP(inference="identity", scale=1e-13, prior=0.0), rounds=1))
    assert largest_difference(mine, final(case.run(FedAvg(), rounds=1))) < 1e-11


def test_6_a_strong_prior_holds_the_model():
    case = ragged()
    mine = final(case.run(EP(prior=1e12)))
    assert largest_difference(mine, references.initial(case)) < 1e-9


def test_7_sep_with_one_client_and_no_prior_pulls_at_nothing():
    case, method = ragged(sizes=(0, 20, 0)), EP(memory="sep", prior=0.0)
    for record in case.run(method):
        pull = method.penalty(method.broadcast(record.before.state, record.cohort).of_member(0))
        assert not flatten(pull.stiffness).any()
        assert equal_bits(pull.centre, record.before.state.params)
    assert largest_difference(final(case.run(method)), final(case.run(FedAvg()))) < 1e-12


def test_7_sep_with_one_client_is_ep():
    """Its factor is the whole but for the prior: nothing is lost by not remembering it."""
    case = ragged(sizes=(0, 20, 0))
    one, other = (case.run(EP(memory=memory, prior=3.0)) for memory in ("sep", "ep"))
    for mine, theirs in zip(one, other, strict=True):
        assert largest_difference(mine.after.state.params, theirs.after.state.params) < 1e-11
        assert largest_difference(mine.after.state.precision, theirs.after.state.precision) < 1e-11


def test_7_adf_counts_the_data_once_per_round():
    """What a method without memory must get wrong: after r rounds of one client its precision is prior + r H."""
    clients, sizes = quadratics((7,)), (7,)
    adf, ep = EP(memory="adf", prior=0.3), EP(prior=0.3)
    one, other = adf.init(ORIGIN, 1), ep.init(ORIGIN, 1)
    for number in range(1, 5):
        one = exact_round(adf, one, (0,), clients, sizes)
        other = exact_round(ep, other, (0,), clients, sizes)
        assert torch.allclose(one.precision["w"], 0.3 + number * 7 * clients[0][0], rtol=1e-13)
        assert torch.allclose(other.precision["w"], 0.3 + 7 * clients[0][0], rtol=1e-13)


def test_sep_has_the_posterior_of_equal_clients_as_a_fixed_point():
    """Stochastic EP is exact where all factors are alike, and the prior stays what it is."""
    sizes = (6, 6, 6)
    clients, method = [quadratics(sizes)[0]] * 3, EP(memory="sep", prior=0.4)
    target = exact_posterior(method, clients, sizes)
    state = method.init(ORIGIN, 3)._replace(params={"w": target[0]}, precision={"w": target[1]})
    for _ in range(3):
        state = exact_round(method, state, range(3), clients, sizes)
        assert distance(state, target) < 1e-13


@pytest.mark.parametrize("memory", ["ep", "sep", "adf"])
def test_8_the_order_of_clients_does_not_matter(memory):
    method, clients = EP(memory=memory, prior=0.3), quadratics()
    state = exact_round(method, method.init(ORIGIN, 4), (0, 1, 2), clients)
    one = exact_round(method, state, (0, 1, 3), clients)
    other = exact_round(method, state, (0, 1, 3), clients, reverse=True)
    assert equal_bits(one.params, other.params)
    assert equal_bits(one.precision, other.precision)


@pytest.mark.parametrize("memory", ["ep", "sep", "adf"])
def test_9_traffic_is_two_models_each_way(memory):
    case = ragged()
    for record in case.run(EP(memory=memory), fraction=0.5):
        exact = 2 * 4 * case.task().num_params * len(record.cohort.members)
        assert (record.bytes_down, record.bytes_up) == (exact, exact)


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


def test_a_factor_beyond_the_whole_is_clipped_and_counted():
    method, clients = EP(prior=0.3), quadratics()
    state = exact_round(method, method.init(ORIGIN, 4), range(4), clients)
    assert method.diagnose(state, cohort_of((0, 1)), [], state)["cavity_clips"] == [0.0, 0.0]
    too_much = state.factors[1]._replace(precision={"w": state.precision["w"] + torch.tensor([1.0, -5.0, 0.5])})
    state = state._replace(factors=state.factors.replaced({1: too_much}))
    cohort = cohort_of((0, 1))
    assert method.diagnose(state, cohort, [], state)["cavity_clips"] == [0.0, 2.0]
    pull = method.penalty(method.broadcast(state, cohort).of_member(1))
    assert torch.equal(pull.stiffness["w"][[0, 2]], torch.full((2,), 0.3 / SIZES[1], dtype=torch.float64))
    assert torch.isfinite(pull.centre["w"]).all()


def test_diagnostics():
    case, method = ragged(), EP(prior=0.5)
    first, second = case.run(method, rounds=2)
    numbers = [method.diagnose(r.before.state, r.cohort, r.reports, r.after.state) for r in (first, second)]
    assert numbers[0]["stiffness"] == pytest.approx([0.1 * 0.5 / m for m in (20, 7, 33, 1)])
    before = second.before.state
    expected = [
        0.1 * float((flatten(before.precision) - flatten(before.factors[n].precision)).max()) / len(case.clients[n])
        for n in second.cohort.members
    ]
    assert numbers[1]["stiffness"] == pytest.approx(expected, rel=1e-12)
    assert numbers[1]["prior_stability"] == max(numbers[1]["stiffness"])
    assert numbers[1]["cavity_clips"] == [0.0] * 4
    assert numbers[1]["precision_mean"] == pytest.approx(float(flatten(second.after.state.precision).mean()))


def test_advice_where_a_step_overshoots():
    stiff = {"prior_stability": 3.0}
    assert "--method.prior_step implicit" in EP(prior_step="explicit").advice(stiff)
    for quiet in (EP().advice(stiff), EP(prior_step="explicit", inference="vi").advice(stiff)):
        assert quiet == ""
    assert EP(prior_step="explicit").advice({"prior_stability": 0.3}) == ""


def test_refuses_what_does_not_fit_into_memory(monkeypatch):
    case = ragged()
    needed = 4 * 2 * case.task().num_params * 8  # clients with data, moment and precision, float64
    monkeypatch.setattr(memory, "available", lambda device: needed - 1)
    with pytest.raises(
        UserError, match=r"the factors of 4 clients would take .* of memory, and .* are free; use fewer"
    ):
        case.run(EP())
    case.run(EP(memory="sep"), rounds=1)
    monkeypatch.setattr(memory, "available", lambda device: needed)
    case.run(EP(), rounds=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"damping": 0.0},
        {"damping": 1.5},
        {"prior": -1.0},
        {"temperature": 0.0},
        {"scale": 0.0},
        {"floor": -1.0},
        {"shrinkage": -1.0},
        {"burn_in": -1},
        {"curvature_start": 0.0},
        {"gradient_decay": 1.0},
        {"curvature_decay": 1.5},
    ],
    ids=str,
)
def test_refuses_impossible_settings(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(UserError, match=rf"method\.{name} must .*, got {value}"):
        EP(**wrong)


def test_refuses_what_does_not_go_together():
    case = ragged()
    with pytest.raises(UserError, match=r"burn_in must be less than training.epochs, which is 2, got 2"):
        case.run(EP(inference="samples", burn_in=2))
    with pytest.raises(UserError, match=r"expected training.momentum 0, got 0.9"):
        case.run(EP(inference="vi"), momentum=0.9)
    normed = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()
    with pytest.raises(UserError, match=r"method.inference laplace needs a model whose samples"):
        case._replace(model=normed, clients=[case.clients[0]]).run(EP())
    case._replace(model=normed, clients=[case.clients[0]]).run(EP(inference="identity"), rounds=1)


def test_memory_holds_those_who_were_seen():
    records = ragged().run(EP(), rounds=3, cohort=1)
    seen = set()
    for record in records:
        seen |= set(record.cohort.members)
        assert set(record.after.state.factors.seen) == seen


def test_float32_stays_close_to_float64():
    """Sums are in float64, rounded once: after some rounds float32 is as far off as its own rounding."""
    one = final(ragged(torch.float32).run(EP(), Functional(chunk=1), rounds=4))
    other = final(ragged().run(EP(), rounds=4))
    assert largest_difference({k: v.double() for k, v in one.items()}, other) < 1e-3


def test_settings_from_the_command_line():
    method = configure(
        {"method": "ep", "method.inference": "vi", "method.memory": "sep", "method.damping": "0.1"}
    ).method
    assert method == EP(inference="vi", memory="sep", damping=0.1)
    with pytest.raises(UserError, match="one of ep, sep, adf, got pep"):
        configure({"method": "ep", "method.memory": "pep"})


NAMED = {
    FedEP(): EP(inference="identity"),
    FedSEP(): EP(memory="sep"),
    FedLapCov(): EP(curvature="end"),
    PVI(): EP(inference="vi", temperature=0.1),
    Virtual(): EP(inference="vi", temperature=0.1, prior=1.0),
}


@pytest.mark.parametrize(("named", "made_of"), NAMED.items(), ids=[type(method).__name__ for method in NAMED])
def test_a_named_setting_is_what_it_is_made_of(named, made_of):
    case = ragged().changed(fraction=0.5)
    assert equal_bits(final(case.run(named)), final(case.run(made_of)))


def test_virtual_3_a_client_that_does_not_move_leaves_the_posterior():
    """A1 (3): a report of q_S itself changes nothing, bit for bit."""
    method = Virtual()
    state = ragged().run(method, rounds=1)[0].after.state
    cohort = cohort_of((0, 1), (20, 7, 0, 33, 1))
    after = method.aggregate(state, cohort, [Report(state.params, state.precision)] * 2)
    assert equal_bits(after.params, state.params)
    assert equal_bits(after.precision, state.precision)


def test_virtual_7_without_noise_every_client_trains_as_in_fedavg():
    """A1 (7): standard deviation -> 0, no KL, fixed curvature: IVON is SGD."""
    case = ragged().changed(rounds=1)
    method = Virtual(temperature=1e-16, prior=1e-9, gradient_decay=0.0, curvature_decay=1.0)
    for mine, theirs in zip(case.run(method)[0].clients, case.run(FedAvg())[0].clients, strict=True):
        assert largest_difference(mine.local.params, theirs.local.params) < 1e-6
