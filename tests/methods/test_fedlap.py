"""FedLap against plain loops, and against the ridge solution that it promises."""

import pytest
import torch

from fl_lightning.errors import UserError
from fl_lightning.method import Context
from fl_lightning.methods.fedlap import ClientTerms, FedLap
from fl_lightning.params import flatten
from tests.support import references
from tests.support.cases import ENGINES, SITUATIONS, equal_bits, largest_difference, ragged
from tests.support.conjugate import quadratic_clients, run_exactly


def run_by_hand(case, cohorts, delta, rho=None):
    """mu_S and {client: v_n} after every round."""
    mu = references.initial(case)
    first = dict(mu)
    v = {n: {k: torch.zeros_like(p) for k, p in mu.items()} for n in references.members(case)}
    history, training = [], case.training
    for number, cohort in enumerate(cohorts, start=1):
        lr = training.lr * training.lr_decay ** (number - 1)
        models = {}
        for n, epochs in cohort.items():
            y, velocity = dict(mu), {k: torch.zeros_like(p) for k, p in mu.items()}
            for batch in references.batches(case, n, number, epochs):
                slope = references.gradient(case, y, batch)
                for k in y:
                    pull = delta / len(case.clients[n]) * (v[n][k] + (y[k] - mu[k]))
                    velocity[k] = training.momentum * velocity[k] + slope[k] + pull + training.weight_decay * y[k]
                y = {k: y[k] - lr * velocity[k] for k in y}
            models[n] = y
        for n, y in models.items():
            v[n] = {k: v[n][k] + (rho or 1 / len(cohort)) * (y[k] - mu[k]) for k in mu}
        mu = {k: first[k] + sum(v[n][k] for n in v) for k in mu}
        history.append((mu, dict(v)))
    return history


def assert_matches(case, records, delta, rho=None):
    for record, (mu, v) in zip(records, run_by_hand(case, references.cohorts(records), delta, rho), strict=True):
        assert largest_difference(record.after.state.params, mu) < 1e-12
        for n, share in v.items():
            assert largest_difference(record.after.state.clients[n], share) < 1e-12


@pytest.mark.parametrize("setting", SITUATIONS)
@pytest.mark.parametrize("rho", [None, 0.1])
def test_matches_brute_force(rho, setting):
    case = ragged().changed(**SITUATIONS[setting])
    assert_matches(case, case.run(FedLap(strength=2.0, damping=rho)), 2.0, rho)


@pytest.mark.parametrize("engine", ["vmap", "lightning"])
def test_matches_brute_force_on_every_engine(engine):
    case = ragged().changed(fraction=0.75, rounds=4)
    assert_matches(case, case.run(FedLap(), ENGINES[engine]), 1.0)


def ridge(curvatures, minima, sizes, delta, prior):
    """The minimum of sum_n m_n L_n + delta/2 ||theta - x_0||^2."""
    eye = torch.eye(len(prior), dtype=torch.float64)
    total = sum(s * a for s, a in zip(sizes, curvatures, strict=True)) + delta * eye
    right = sum(s * (a @ m) for s, a, m in zip(sizes, curvatures, minima, strict=True)) + delta * prior
    return torch.linalg.solve(total, right)


@pytest.mark.slow
@pytest.mark.parametrize("cohorts", [None, [[0, 1], [2], [0, 2]]], ids=["full", "partial"])
@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "samples"])
def test_reaches_the_ridge_solution(uniform, cohorts):
    curvatures, minima, sizes = *quadratic_clients(), [2, 3, 7]
    for prior in (torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)):
        expected = ridge(curvatures, minima, sizes, 5.0, prior)
        states = run_exactly(FedLap(5.0, 1 / 3), curvatures, minima, 900, sizes, cohorts, uniform, prior)
        assert float((states[-1].params["w"] - expected).abs().max()) < 1e-10


@pytest.mark.slow
def test_at_the_solution_nothing_moves():
    curvatures, minima, sizes = *quadratic_clients(), [2, 3, 7]
    states = run_exactly(FedLap(5.0), curvatures, minima, 800, sizes)
    assert float((states[-1].params["w"] - states[-2].params["w"]).abs().max()) < 1e-13
    for n, (a, m) in enumerate(zip(curvatures, minima, strict=True)):
        share = -sizes[n] / 5.0 * (a @ (states[-1].params["w"] - m))
        assert torch.allclose(states[-1].clients[n]["w"], share, atol=1e-11)


def test_a_single_client_has_the_ridge_solution_from_round_1_on():
    curvatures, minima = quadratic_clients(number=1)
    prior = torch.ones(4, dtype=torch.float64)
    expected = ridge(curvatures, minima, [7], 3.0, prior)
    for state in run_exactly(FedLap(3.0, 1.0), curvatures, minima, 5, [7], start=prior):
        assert float((state.params["w"] - expected).abs().max()) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_server_is_the_sum_of_the_shares(dtype):
    case = ragged(dtype)
    for record in case.run(FedLap(), fraction=0.5, rounds=6):
        state = record.after.state
        total = flatten(state.prior).double() + sum(flatten(state.clients[n]).double() for n in state.clients.seen)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        assert torch.allclose(flatten(state.params).double(), total, rtol=0, atol=tolerance)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_round_is_the_plain_mean_of_proximal_steps(engine):
    """With rho = 1/|S| and no shares yet, the server takes the uniform mean of the clients' models."""
    case = ragged().changed(rounds=1)
    record = case.run(FedLap(), ENGINES[engine])[0]
    models = torch.stack([flatten(result.local.params) for result in record.clients])
    assert torch.allclose(flatten(record.after.state.params), models.mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", ENGINES)
def test_one_local_step_of_round_1_does_not_feel_delta(engine, dtype):
    case = ragged(dtype).changed(epochs=1, batch_size=None, rounds=1)
    weak, strong = (case.run(FedLap(strength=d), ENGINES[engine])[0] for d in (0.01, 20.0))
    for a, b in zip(weak.clients, strong.clients, strict=True):
        assert equal_bits(a.local.params, b.local.params)


def test_twice_the_distance_is_twice_the_pull():
    start, zero = {"w": torch.zeros(3, dtype=torch.float64)}, torch.zeros(3, dtype=torch.float64)
    penalty = FedLap().penalty(Context(start, own=ClientTerms({"w": zero}, torch.tensor(0.3, dtype=torch.float64))))
    offset = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    near, far = (penalty.grad({"w": scale * offset})["w"] for scale in (1, 2))
    assert torch.allclose(far, 2 * near, rtol=1e-15)
    assert torch.allclose(near, 0.3 * offset, rtol=1e-15)


def test_a_strong_prior_holds_the_model():
    case = ragged()
    # lr * delta / m_n must stay below 2 for the smallest client, so strength and learning rate change together.
    records = case.run(FedLap(strength=1e4), lr=1e-5, rounds=5)
    assert largest_difference(records[-1].after.state.params, records[0].before.state.params) < 1e-3


def test_memory_is_kept_only_for_clients_that_were_seen():
    records = ragged().run(FedLap(), cohort=1, rounds=6)
    seen = set()
    for record in records:
        seen |= set(record.cohort.members)
        assert record.after.state.clients.seen == tuple(sorted(seen))


def test_traffic_is_one_model_each_way():
    case = ragged()
    for record in case.run(FedLap(), fraction=0.5):
        assert record.bytes_down == record.bytes_up == 4 * case.task().num_params * len(record.cohort.members)


def test_diagnostics():
    case, method = ragged(), FedLap(strength=2.0)
    record = case.run(method, rounds=1)[0]
    told = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    assert told["prior_stability"] == pytest.approx(0.1 * 2.0, rel=1e-12)  # of the client with one sample
    moved = flatten(record.after.state.params) - flatten(record.before.state.params)
    assert told["prior_distance"] == pytest.approx(float(moved.norm()), rel=1e-12)
    shares = [float(flatten(record.after.state.clients[n]).norm()) for n in record.cohort.members]
    assert told["client_share_norm"] == pytest.approx(shares, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": 0.0}, r"method\.strength must be finite and > 0"),
        ({"strength": float("nan")}, r"method\.strength must be finite and > 0"),
        ({"damping": 0.0}, r"method\.damping must be in \(0, 1\], or null"),
        ({"damping": 1.5}, r"method\.damping must be in \(0, 1\], or null"),
    ],
)
def test_refuses_what_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        FedLap(**options)
