"""FedSparse: gates, objective, M-step and traffic against brute force; FedProx where all gates are open."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import grad

from fl_lightning.contrib.fedsparse import FedSparse, Report, SpikeAndSlab, State
from fl_lightning.contrib.hard_concrete import Gated, log_odds_of, probability_open, sampled, split, weight_of
from fl_lightning.errors import UserError
from fl_lightning.method import task_of
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.models.networks.cnn import Cnn
from fl_lightning.models.task import Weights
from fl_lightning.runs.config.run_config import configure
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, network, ragged

GATE, WEIGHT = "gates.0/weight", "inner.0.weight"


def drawn(seed=0, theta=None):
    """Parameters of the gated contract network, a penalty around other ones, and theta."""
    torch.manual_seed(seed)
    shapes = {WEIGHT: (6, 5), "inner.0.bias": (6,), "inner.2.weight": (3, 6), "inner.2.bias": (3,), GATE: (6,)}
    params = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    centre = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items() if name != GATE}
    theta = torch.rand(6, dtype=torch.float64) if theta is None else theta
    return params, SpikeAndSlab(centre, {GATE: theta}, strength=0.7, cost=0.3, samples=20.0, scale=math.sqrt(10))


def objective(v, w, pi, theta, strength, cost, samples):
    """P of one gated layer, unit by unit, as the model has it."""
    total = 0.0
    for j in range(len(pi)):
        distance = sum(float(a - b) ** 2 for a, b in zip(v[j].flatten(), w[j].flatten(), strict=True))
        p, t = float(pi[j]), float(theta[j])
        total += strength / 2 * p * distance + cost * v[j].numel() * p - p * math.log(t) - (1 - p) * math.log(1 - t)
    return total / samples


# --- gates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", [-3.0, 0.0, 2.0])
def test_the_probability_of_an_open_gate(a):
    torch.manual_seed(0)
    z = sampled(torch.full((100_000,), a, dtype=torch.float64))
    pi = float(probability_open(torch.tensor(a, dtype=torch.float64)))
    assert abs(float((z > 0).double().mean()) - pi) < 3 * math.sqrt(pi * (1 - pi) / 100_000)
    assert 0 < float((z == 1).double().mean()) < 1
    assert (z >= 0).all()
    assert (z <= 1).all()


def test_log_odds_invert_the_probability_up_to_the_clamp():
    theta = torch.tensor([0.1, 0.5, 0.95], dtype=torch.float64)
    assert torch.allclose(probability_open(log_odds_of(theta)), theta, atol=1e-14)
    assert log_odds_of(torch.tensor([1e-3, 0.99999])).tolist() == pytest.approx([-math.log(100), math.log(100)])


@pytest.mark.parametrize("images", [False, True], ids=["mlp", "cnn"])
def test_in_evaluation_a_closed_unit_is_one_without_weights(images):
    torch.manual_seed(0)
    plain = Cnn((1, 16, 16), 3) if images else ragged().model
    plain = plain.double()
    network = Gated(deepcopy(plain), log_odds=1.0).eval()
    x = torch.randn(4, *((1, 16, 16) if images else (5,)), dtype=torch.float64)
    weights, gates = split(dict(network.named_parameters()))
    with torch.no_grad():
        for gate in gates.values():
            gate.copy_(torch.where(torch.arange(len(gate)) % 2 == 0, -4.0, 4.0))  # closed, open
        by_hand = deepcopy(plain)
        for gate in gates:
            by_hand.get_parameter(weight_of(gate).removeprefix("inner."))[::2] = 0
        assert torch.equal(network(x), by_hand(x))
        network.train()
        assert not torch.equal(network(x), network(x))
    assert len(gates) == (3 if images else 1)
    assert len(weights) == len(list(plain.parameters()))


def test_a_gate_beyond_the_clamp_still_has_a_slope():
    network = Gated(ragged().model, log_odds=-20.0).train()
    torch.manual_seed(0)
    slopes = []
    for _ in range(200):
        loss = network(torch.ones(2, 5, dtype=torch.float64)).square().sum()
        slopes.append(torch.autograd.grad(loss, network.gates["0/weight"])[0])
    assert torch.stack(slopes).abs().sum(0).gt(0).all()


# --- the objective ----------------------------------------------------------------------------------------------------


def test_the_penalty_is_the_objective():
    params, penalty = drawn()
    pi = probability_open(penalty.scale * params[GATE])
    theta = penalty.theta[GATE]
    expected = objective(params[WEIGHT], penalty.centre[WEIGHT], pi, theta, 0.7, 0.3, 20)
    for name, centre in penalty.centre.items():
        if name != WEIGHT:
            expected += 0.7 / 2 / 20 * float((params[name] - centre).square().sum())
    assert float(penalty.value(params)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_penalty_is_differentiated_exactly(seed):
    params, penalty = drawn(seed)
    assert largest_difference(penalty.grad(params), grad(penalty.value)(params)) < 1e-12


def test_a_gate_closes_exactly_when_keeping_it_costs_more_than_the_prior_favours_it():
    signs = set()
    for seed in range(20):
        params, penalty = drawn(seed)
        slope = penalty.grad(params)[GATE]
        distance = (params[WEIGHT] - penalty.centre[WEIGHT]).square().sum(1)
        theta = penalty.theta[GATE]
        costs = 0.7 / 2 * distance + 0.3 * 5 > torch.log(theta / (1 - theta))
        assert torch.equal(slope > 0, costs)
        signs |= set(costs.tolist())
    assert signs == {True, False}


def test_certain_gates_stay_finite():
    params, penalty = drawn(theta=torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5, 1.0], dtype=torch.float64))
    assert penalty.value(params).isfinite()
    assert all(slope.isfinite().all() for slope in penalty.grad(params).values())


# --- the server -------------------------------------------------------------------------------------------------------


def fake_round(method, gates, weighting="uniform", seed=0):
    """A round whose reports are made by hand: one row of gates for each client."""
    case = ragged(sizes=(20, 7, 33)).changed(weighting=weighting, rounds=1)
    record = case.run(method)[0]
    torch.manual_seed(seed)
    reports = []
    for report, row in zip(record.reports, gates, strict=True):
        weights = {name: torch.randn_like(value) for name, value in report.weights.items()}
        reports.append(Report(weights, {GATE: torch.tensor(row, dtype=torch.float64)}))
    return record, reports, method.aggregate(record.before.state, record.cohort, reports)


GATES = [[1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 1, 0], [1, 0, 1, 0, 0, 1]]


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_m_step_is_stationary(weighting):
    """w_j and theta_j minimise sum_n p_n P_n, up to the clients' numbers of samples, which do not depend on them."""
    record, reports, after = fake_round(FedSparse(), GATES, weighting)
    weights = record.cohort.weights

    def total(w, theta):
        sums = 0.0
        for p, report in zip(weights, reports, strict=True):
            z = report.gates[GATE]
            distance = (report.weights[WEIGHT] - w).square().sum(1)
            sums = sums + p * (z * distance / 2 - torch.xlogy(z, theta) - torch.xlogy(1 - z, 1 - theta)).sum()
        return sums

    w, theta = after.params[WEIGHT], after.theta[GATE]
    slopes = torch.func.grad(total, argnums=(0, 1))(w, theta)
    opened = theta > 0
    inside = opened & (theta < 1)
    assert slopes[0][opened].abs().max() < 1e-12
    assert slopes[1][inside].abs().max() < 1e-12
    expected = sum(p * r.gates[GATE] for p, r in zip(weights, reports, strict=True))
    assert torch.allclose(theta, expected, atol=1e-14)
    for j in range(6):
        owners = [n for n in range(3) if GATES[n][j]]
        if not owners:
            assert torch.equal(w[j], record.before.state.params[WEIGHT][j])  # nobody has it: it stays
            continue
        mean = sum(weights[n] * reports[n].weights[WEIGHT][j] for n in owners) / sum(weights[n] for n in owners)
        assert torch.allclose(w[j], mean, atol=1e-12)
    plain = sum(p * r.weights["inner.2.bias"] for p, r in zip(weights, reports, strict=True))
    assert torch.allclose(after.params["inner.2.bias"], plain, atol=1e-12)


@pytest.mark.parametrize("theta", [0.6, 0.95])
def test_gates_begin_at_theta_in_the_networks_own_type(theta):
    method = FedSparse(theta=theta)
    parameter = method.network(network()).gates["0/weight"]
    found = probability_open(math.sqrt(method.gate_lr) * parameter.detach())
    assert float((found - theta).abs().max()) < 1e-15


def test_the_servers_gates_follow_theta():
    _, _, after = fake_round(FedSparse(), GATES)
    pi = probability_open(math.sqrt(10) * after.params[GATE])
    # closed gates stop at log-odds of -ln 100, open ones at ln 100
    expected = after.theta[GATE].clamp(float(probability_open(torch.tensor(-math.log(100)))), 0.998)
    assert torch.allclose(pi, expected, atol=1e-5)


def test_one_client_is_taken_as_it_is():
    case = ragged(sizes=(20,))
    for record in case.run(FedSparse(theta=0.6)):
        report, after = record.reports[0], record.after.state
        opened = report.gates[GATE] == 1
        assert torch.equal(after.theta[GATE], report.gates[GATE])
        assert largest_difference({"w": after.params[WEIGHT][opened]}, {"w": report.weights[WEIGHT][opened]}) < 1e-15
        assert 0 < int(opened.sum()) < 6
        assert not report.weights[WEIGHT][~opened].any()


def test_a_unit_that_is_not_sent_comes_back_only_if_it_may():
    theta = {GATE: torch.tensor([0.05, 0.9, 0.0, 0.9, 0.9, 0.9], dtype=torch.float64)}
    for revive in (True, False):
        method = FedSparse(revive=revive)
        record, reports, _ = fake_round(method, [[1, 0, 1, 1, 1, 1]] * 3)
        state = State(record.before.state.params, theta)
        after = method.aggregate(state, record.cohort, reports)
        assert after.theta[GATE].tolist() == pytest.approx([1, 0, 1, 1, 1, 1] if revive else [0, 0, 0, 1, 1, 1])
        start = method.broadcast(state, record.cohort).start
        assert not start[WEIGHT][[0, 2]].any()
        assert torch.equal(start[WEIGHT][[1, 3]], state.params[WEIGHT][[1, 3]])


# --- traffic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gates", ["sample", "mean"])
def test_bytes_of_a_mask(gates):
    method = FedSparse(gates=gates)
    record, reports, after = fake_round(method, GATES)
    ungated = 6 + 3 * 6 + 3
    for report, row in zip(reports, GATES, strict=True):
        expected = 4 * (ungated + 5 * sum(row)) + (math.ceil(6 / 8) if gates == "sample" else 4 * 6)
        assert 4 * method.traffic((report, {})) == expected
    context = method.broadcast(after, record.cohort)._replace(own=())
    kept = int((after.theta[GATE] >= 0.1).sum())
    assert kept == 5
    assert method.traffic((context, {})) == ungated + 5 * kept + 6
    numbers = method.diagnose(record.before.state, record.cohort, reports, after)
    assert numbers["density"] == (ungated + 25) / (ungated + 30)
    assert numbers["units_open"] == 5 / 6
    assert numbers["client_density"] == [(ungated + 15) / (ungated + 30)] * 3


def test_bytes_of_a_round():
    case = ragged()
    record = case.run(FedSparse(theta=0.5), rounds=1)[0]
    number = case.task().num_params
    assert record.bytes_down == 4 * 4 * (number + 6)
    closed = sum(int((report.gates[GATE] == 0).sum()) for report in record.reports)
    assert closed > 0
    assert record.bytes_up == 4 * (4 * number - 5 * closed) + 4 * 1


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}], ids=["plain", "momentum"])
def test_with_all_gates_open_it_is_fedprox(engine, weighting, settings):
    case = ragged(sizes=(16, 16, 16)).changed(weighting=weighting, **settings)
    mine = case.run(FedSparse(theta=1.0, strength=3.2, cost=0.0), engine)
    for a, b in zip(mine, case.run(FedProx(mu=3.2 / 16)), strict=True):
        params = {name.removeprefix("inner."): v for name, v in split(a.after.state.params)[0].items()}
        assert largest_difference(params, b.after.state.params) < 1e-12
        for c, d in zip(a.clients, b.clients, strict=True):
            assert c.prior_loss == pytest.approx(d.prior_loss, rel=1e-10)


def test_clients_of_other_sizes_are_pulled_by_their_own_share():
    case = ragged(sizes=(20, 0, 7))
    mine = case.run(FedSparse(theta=1.0, strength=2.0, cost=0.0), rounds=1)[0]
    for result in mine.clients:
        n = result.local.client
        expected = case.run(FedProx(mu=2.0 / len(case.clients[n])), rounds=1)[0]
        (theirs,) = (c for c in expected.clients if c.local.client == n)
        params = {name.removeprefix("inner."): v for name, v in split(result.local.params)[0].items()}
        assert largest_difference(params, theirs.local.params) < 1e-12


def test_a_high_cost_closes_units_and_none_keeps_them():
    case = ragged(sizes=(40, 40)).changed(rounds=10, lr=0.2)
    dear, free = (case.run(FedSparse(cost=cost, gates="mean"))[-1] for cost in (20.0, 0.0))
    method = FedSparse()
    density = [method.diagnose(r.before.state, r.cohort, r.reports, r.after.state)["units_open"] for r in (dear, free)]
    assert density[0] < 0.5 < density[1]
    assert dear.bytes_up < free.bytes_up


def test_gates_are_drawn_from_a_stream_of_their_own():
    case = ragged()
    first, again = (case.run(FedSparse(theta=0.5))[-1] for _ in range(2))
    assert equal_bits(first.reports[0].gates, again.reports[0].gates)
    rows = {tuple(report.gates[GATE].tolist()) for report in first.reports}
    assert len(rows) > 1
    assert {v for row in rows for v in row} == {0.0, 1.0}


def test_the_servers_network_is_measured_with_its_gates():
    case = ragged()
    method = FedSparse(theta=0.5)
    params = final(case.run(method))
    task = task_of(method, case.task())
    weights, gates = split(params)
    z = (torch.sigmoid(math.sqrt(10) * gates[GATE]) * 1.2 - 0.1).clamp(0, 1)
    plain = {name.removeprefix("inner."): v for name, v in weights.items()}
    plain["0.weight"] = plain["0.weight"] * z[:, None]
    with task.evaluating():
        mine = task.logits(Weights(params, {}), case.dataset.test_x)
    assert torch.allclose(mine, case.task().logits(Weights(plain, {}), case.dataset.test_x), atol=1e-12)


@pytest.mark.parametrize(
    ("setting", "value"), [("strength", -1.0), ("cost", math.inf), ("theta", 0.0), ("threshold", 1.0), ("gate_lr", 0.0)]
)
def test_refuses_impossible_settings(setting, value):
    with pytest.raises(UserError, match=f"method.{setting} must"):
        FedSparse(**{setting: value})


def test_refuses_a_model_without_hidden_units():
    case = ragged()._replace(model=nn.Linear(5, 3).double())
    with pytest.raises(UserError, match="expected a model with a hidden layer"):
        case.run(FedSparse())


def test_settings_from_the_command_line():
    method = configure({"method": "fedsparse", "method.gates": "mean", "method.revive": "false"}).method
    assert method == replace(FedSparse(), gates="mean", revive=False)
