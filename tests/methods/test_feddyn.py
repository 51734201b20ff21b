"""FedDyn against plain loops, and against the minimum that it promises, where clients solve their problem exactly."""

import pytest
import torch

from fl_lightning.errors import UserError
from fl_lightning.method import Context
from fl_lightning.methods.feddyn import FedDyn
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.params import flatten
from tests.support import references
from tests.support.cases import ENGINES, SITUATIONS, equal_bits, final, largest_difference, ragged
from tests.support.conjugate import quadratic_clients, run_exactly, solved


def run_by_hand(case, cohorts, alpha):
    """x, h and {client: g_n} after every round, in the paper's own variables g_n and h."""
    eligible = references.members(case)
    by_samples = case.federation.weighting == "samples"
    q = references.weights(case, eligible) if by_samples else {n: 1 / len(eligible) for n in eligible}
    x = references.initial(case)
    h = {k: torch.zeros_like(v) for k, v in x.items()}
    g = {n: dict(h) for n in eligible}
    history, training = [], case.training
    for number, cohort in enumerate(cohorts, start=1):
        lr = training.lr * training.lr_decay ** (number - 1)
        models = {}
        for n, epochs in cohort.items():
            y, velocity = dict(x), {k: torch.zeros_like(v) for k, v in x.items()}
            for batch in references.batches(case, n, number, epochs):
                slope = references.gradient(case, y, batch)
                for k in y:
                    total = slope[k] - g[n][k] + alpha * (y[k] - x[k]) + training.weight_decay * y[k]
                    velocity[k] = training.momentum * velocity[k] + total
                y = {k: y[k] - lr * velocity[k] for k in y}
            models[n] = y
        for n, y in models.items():
            g[n] = {k: g[n][k] - alpha * (y[k] - x[k]) for k in x}
        h = {k: h[k] - alpha * sum(q[n] * (models[n][k] - x[k]) for n in cohort) for k in x}
        mean = {k: sum(q[n] * models[n][k] for n in cohort) / sum(q[n] for n in cohort) for k in x}
        x = {k: mean[k] - h[k] / alpha for k in x}
        history.append((x, h, dict(g), mean))
    return history


def assert_matches(case, records, alpha):
    for record, (x, h, g, _) in zip(records, run_by_hand(case, references.cohorts(records), alpha), strict=True):
        state = record.after.state
        assert largest_difference(state.params, x) < 1e-12
        assert torch.allclose(alpha * flatten(state.shift), flatten(h), rtol=0, atol=1e-12)
        for n in g:
            assert torch.allclose(alpha * flatten(state.clients[n]), flatten(g[n]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("setting", SITUATIONS)
@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_matches_brute_force(alpha, setting):
    case = ragged().changed(**SITUATIONS[setting])
    assert_matches(case, case.run(FedDyn(strength=alpha)), alpha)


@pytest.mark.parametrize("engine", ["vmap", "lightning"])
def test_matches_brute_force_on_every_engine(engine):
    case = ragged().changed(fraction=0.75, rounds=4)
    assert_matches(case, case.run(FedDyn(), ENGINES[engine]), 0.1)


@pytest.mark.parametrize(("alpha", "rounds", "error"), [(1.0, 200, 1e-12), (0.3, 400, 1e-8), (10.0, 400, 1e-8)])
def test_reaches_the_minimum_of_all_where_fedprox_does_not(alpha, rounds, error):
    curvatures, minima = quadratic_clients()
    best = torch.linalg.solve(sum(curvatures), sum(a @ m for a, m in zip(curvatures, minima, strict=True)))
    end = run_exactly(FedDyn(strength=alpha), curvatures, minima, rounds)[-1].params["w"]
    assert float((end - best).abs().max()) < error


def test_fedprox_ends_elsewhere():
    """Its fixed point: the mean of argmin L_n + mu/2 ||theta - x||^2 is x."""
    (a, b), (m, n) = [torch.diag(torch.tensor([1.0, 3.0])).double(), torch.eye(2).double()], [[3.0, 1.0], [-1.0, 2.0]]
    minima = [torch.tensor(m, dtype=torch.float64), torch.tensor(n, dtype=torch.float64)]
    best = torch.linalg.solve(a + b, a @ minima[0] + b @ minima[1])
    x = torch.zeros(2, dtype=torch.float64)
    for _ in range(400):
        penalty = FedProx(mu=1.0).penalty(Context({"w": x}))
        x = sum(solved(c, minimum, penalty) for c, minimum in zip((a, b), minima, strict=True)) / 2
    assert float((x - best).abs().max()) > 0.1
    end = run_exactly(FedDyn(strength=1.0), [a, b], minima, 200)[-1].params["w"]
    assert float((end - best).abs().max()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("cohorts", [None, [[0, 1], [1, 2], [0, 2]]], ids=["full", "partial"])
def test_weighting_by_samples_reaches_the_weighted_minimum(cohorts):
    curvatures, minima, sizes = *quadratic_clients(), [5, 10, 45]
    best = torch.linalg.solve(
        sum(s * a for s, a in zip(sizes, curvatures, strict=True)),
        sum(s * (a @ m) for s, a, m in zip(sizes, curvatures, minima, strict=True)),
    )
    states = run_exactly(FedDyn(strength=0.5), curvatures, minima, 900, sizes, cohorts, uniform=False)
    assert float((states[-1].params["w"] - best).abs().max()) < 1e-6


@pytest.mark.parametrize("cohorts", [None, [[0, 1], [2], [0, 2]]], ids=["full", "partial"])
def test_the_servers_shift_is_the_mean_of_all_clients(cohorts):
    """h = sum over all clients of q_n g_n, after every round; with uniform weights their mean."""
    sizes = [5, 10, 45]
    for uniform in (True, False):
        states = run_exactly(FedDyn(strength=0.5), *quadratic_clients(), 12, sizes, cohorts, uniform)
        share = [1 / 3] * 3 if uniform else [size / 60 for size in sizes]
        for state in states:
            mean = sum(q * state.clients[n]["w"] for n, q in enumerate(share))
            assert float((state.shift["w"] - mean).abs().max()) < 1e-14


def test_at_the_fixed_point_shifts_are_the_clients_gradients():
    curvatures, minima = quadratic_clients()
    state = run_exactly(FedDyn(strength=0.5), curvatures, minima, 300)[-1]
    for n, (a, m) in enumerate(zip(curvatures, minima, strict=True)):
        assert torch.allclose(0.5 * state.clients[n]["w"], a @ (state.params["w"] - m), atol=1e-10)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_round_1_is_fedprox_before_the_last_step(weighting, engine):
    """All clients train as FedProx's with mu = alpha; the mean is then overstepped by its own length."""
    case = ragged().changed(weighting=weighting, rounds=1)
    mine, prox = (case.run(m, ENGINES[engine])[0] for m in (FedDyn(strength=0.3), FedProx(mu=0.3)))
    for a, b in zip(mine.clients, prox.clients, strict=True):
        assert largest_difference(a.local.params, b.local.params) < 1e-15
    start, mean = flatten(mine.before.state.params), flatten(prox.after.state.params)
    assert torch.allclose(flatten(mine.after.state.params), 2 * mean - start, rtol=0, atol=1e-14)
    measured = case.run(FedDyn(strength=0.3, measured="mean"), ENGINES[engine])[0].after.state
    assert largest_difference(measured.params, prox.after.state.params) < 1e-15


def test_measuring_the_mean_trains_alike():
    case = ragged().changed(fraction=0.5, rounds=5)
    plain, mean = case.run(FedDyn()), case.run(FedDyn(measured="mean"))
    history = run_by_hand(case, references.cohorts(plain), 0.1)
    for a, b, (*_, expected) in zip(plain, mean, history, strict=True):
        assert equal_bits(a.after.state.params, b.after.state.start)
        assert largest_difference(b.after.state.params, expected) < 1e-12


def test_identical_clients_overstep_once():
    """x_new = 2 y - x in round 1: h / alpha is minus the step."""
    curvatures, minima = quadratic_clients(number=1)
    start = torch.ones(4, dtype=torch.float64)
    state = run_exactly(FedDyn(strength=0.5), curvatures * 3, minima * 3, 1, start=start)[0]
    target = torch.linalg.solve(
        curvatures[0] + 0.5 * torch.eye(4, dtype=torch.float64), curvatures[0] @ minima[0] + 0.5 * start
    )
    assert torch.allclose(state.params["w"], 2 * target - start, rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", ENGINES)
def test_one_local_step_of_round_1_does_not_feel_alpha(engine, dtype):
    case = ragged(dtype).changed(epochs=1, batch_size=None, rounds=1)
    weak, strong = (case.run(FedDyn(strength=a), ENGINES[engine])[0] for a in (0.001, 5.0))
    for a, b in zip(weak.clients, strong.clients, strict=True):
        assert equal_bits(a.local.params, b.local.params)


def test_twice_the_distance_is_twice_the_pull():
    """A norm without its square, as in bayes-admm, would pull with constant force."""
    start, zero = {"w": torch.zeros(3, dtype=torch.float64)}, torch.zeros(3, dtype=torch.float64)
    penalty = FedDyn(strength=0.3).penalty(Context(start, own={"w": zero}))
    offset = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    near, far = (penalty.grad({"w": scale * offset})["w"] for scale in (1, 2))
    assert torch.allclose(far, 2 * near, rtol=1e-15)
    assert torch.allclose(near, 0.3 * offset, rtol=1e-15)


def test_memory_is_kept_only_for_clients_that_were_seen():
    case = ragged()
    records = case.run(FedDyn(), cohort=1, rounds=6)
    seen = set()
    for record in records:
        seen |= set(record.cohort.members)
        assert record.after.state.clients.seen == tuple(sorted(seen))
        for n in set(record.before.state.clients.seen) - set(record.cohort.members):
            assert equal_bits(record.before.state.clients[n], record.after.state.clients[n])


def test_traffic_is_one_model_each_way():
    case = ragged()
    for record in case.run(FedDyn(), fraction=0.5):
        assert record.bytes_down == record.bytes_up == 4 * case.task().num_params * len(record.cohort.members)


def test_diagnostics():
    case, method = ragged(), FedDyn(strength=0.2)
    record = case.run(method, rounds=1)[0]
    told = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    assert told["prior_stability"] == pytest.approx(0.1 * 0.2, rel=1e-12)
    assert told["shift_norm"] == pytest.approx(float(flatten(record.after.state.shift).norm()), rel=1e-12)
    start = flatten(record.before.state.params)
    steps = [float((flatten(report.params) - start).norm()) for report in record.reports]
    assert told["client_shift_norm"] == pytest.approx(steps, rel=1e-12)
    assert "method.strength" in method.traits.overshoot_advice


def test_a_single_client_reaches_its_minimum():
    curvatures, minima = quadratic_clients(number=1)
    assert torch.allclose(
        run_exactly(FedDyn(strength=1.0), curvatures, minima, 80)[-1].params["w"], minima[0], atol=1e-12
    )


@pytest.mark.parametrize("strength", [0.0, -0.1, float("inf"), float("nan")])
def test_refuses_an_impossible_strength(strength):
    with pytest.raises(UserError, match=r"method\.strength must be finite and > 0"):
        FedDyn(strength=strength)


def test_the_model_stays_finite_over_many_rounds():
    assert all(bool(v.isfinite().all()) for v in final(ragged().run(FedDyn(), rounds=30)).values())
