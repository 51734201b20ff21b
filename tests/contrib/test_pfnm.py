"""PFNM: degenerate cases, brute force of the merged network, dead units, and who is refused."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_lightning.contrib.pfnm import Pfnm, Report
from fl_lightning.contrib.widened_network import in_use
from fl_lightning.errors import UserError
from fl_lightning.loop import federate
from fl_lightning.method import task_of
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.models.networks.cnn import Cnn
from fl_lightning.models.networks.mlp import Mlp
from fl_lightning.models.task import Task, Weights
from fl_lightning.runs.config.run_config import configure
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged


def deep(hidden=(6, 4), dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return Mlp((5,), 3, hidden=hidden).to(dtype)


def small(case, dtype=torch.float64):
    return Task(deepcopy(case.model).to(dtype))


def inside(task_small, wide_params, units):
    """A client's own network cut out of the wide one, layer by layer."""
    names = [n for n in task_small.initial.params if n.endswith("weight")]
    params = {}
    for place, name in enumerate(names):
        weight, bias = wide_params[name], wide_params[name.replace("weight", "bias")]
        if place < len(names) - 1:
            weight, bias = weight[units[place]], bias[units[place]]
        if place:
            weight = weight[:, units[place - 1]]
        params[name], params[name.replace("weight", "bias")] = weight, bias
    return {name: params[name] for name in task_small.initial.params}


def embedded(method, case, networks):
    """Reports with these small networks, in the first units of the wide one."""
    record = case.run(method, rounds=1)[0]
    reports = []
    for network, report in zip(networks, record.reports, strict=True):
        params = {}
        for name, value in report.params.items():
            wide = torch.zeros_like(value)
            wide[tuple(slice(size) for size in network[name].shape)] = network[name]
            params[name] = wide
        reports.append(Report(params, report.counts))
    return record, reports


def permuted(network, orders):
    """The same function with its hidden units in another order."""
    names = [n for n in network if n.endswith("weight")]
    result = dict(network)
    for place, name in enumerate(names):
        bias = name.replace("weight", "bias")
        if place < len(names) - 1:
            result[name], result[bias] = result[name][orders[place]], result[bias][orders[place]]
        if place:
            result[name] = result[name][:, orders[place - 1]]
    return result


def random_network(case, seed):
    torch.manual_seed(seed)
    return {name: torch.randn_like(value) for name, value in small(case).initial.params.items()}


MODELS = {"one layer": (6,), "two layers": (6, 4), "three layers": (5, 4, 6)}


@pytest.mark.parametrize("hidden", MODELS.values(), ids=MODELS)
def test_a_permuted_client_is_the_same_client(hidden):
    case = ragged(sizes=(20, 20))._replace(model=deep(hidden))
    method = Pfnm(sigma0=1e6)
    network = random_network(case, 1)
    orders = [torch.randperm(size, generator=torch.Generator().manual_seed(place)) for place, size in enumerate(hidden)]
    record, reports = embedded(method, case, [network, permuted(network, orders)])
    after = method.aggregate(record.before.state, record.cohort, reports)
    assert [len(set(units.tolist())) for units in after.clients[0].units] == list(hidden)
    for one, two, order in zip(after.clients[0].units, after.clients[1].units, orders, strict=True):
        assert torch.equal(one[order], two)
    x = case.dataset.test_x
    task = task_of(method, case.task())
    mine, plain = task.logits(Weights(after.params, {}), x), small(case).logits(Weights(network, {}), x)
    assert torch.allclose(mine, plain, atol=1e-3)
    assert in_use(after.params) == sum(value.numel() for value in network.values())
    mean = {name: (network[name] + permuted(network, orders)[name]) / 2 for name in network}
    assert (small(case).logits(Weights(mean, {}), x) - plain).abs().max() > 0.5  # averaging does not do that


@pytest.mark.parametrize("hidden", MODELS.values(), ids=MODELS)
def test_one_client_is_pulled_to_the_prior_alone(hidden):
    case = ragged(sizes=(20,))._replace(model=deep(hidden))
    method = Pfnm(sigma=0.5, sigma0=2.0)
    network = random_network(case, 1)
    record, reports = embedded(method, case, [network])
    after = method.aggregate(record.before.state, record.cohort, reports)
    q, p0 = 1 / 0.5, 1 / 2.0
    names = [n for n in network if n.endswith("weight")]
    counts = torch.bincount(case.dataset.train_y[case.clients[0]], minlength=3)
    assert (counts > 0).all()  # so that all shares are 1
    expected = {}
    for name, value in network.items():
        mean = 0.1 if name.endswith("bias") else 0.0
        expected[name] = (mean * p0 + q * value) / (p0 + q)
    found = inside(small(case), after.params, after.clients[0].units)
    assert len(names) == len(hidden) + 1
    assert largest_difference(found, expected) < 1e-12


@pytest.mark.parametrize("absent", ["zero", "missing"])
@pytest.mark.parametrize("hidden", MODELS.values(), ids=MODELS)
def test_the_merged_network_is_the_posterior_mean_of_its_assignment(hidden, absent):
    """Every number of the server's network by hand, from the clients' own units."""
    case = ragged(sizes=(20, 7, 33))._replace(model=deep(hidden))
    method = Pfnm(absent=absent, sigma=0.7, sigma0=3.0, gamma=5.0, growth=10)
    networks = [random_network(case, seed) for seed in range(3)]
    record, reports = embedded(method, case, networks)
    after = method.aggregate(record.before.state, record.cohort, reports)
    counts = torch.stack([report.counts for report in reports])
    shares = counts / counts.sum(0)
    names = [n for n in networks[0] if n.endswith("weight")]
    units = [after.clients[n].units for n in range(3)]
    for place, name in enumerate(names):
        is_last = place == len(names) - 1
        wide, bias = after.params[name], after.params[name.replace("weight", "bias")]
        for i in range(len(bias)):
            owners = [n for n in range(3) if is_last or i in units[n][place].tolist()]
            if not owners:
                assert bias[i] == 0
                assert not wide[i].any()
                continue
            rows = {n: i if is_last else units[n][place].tolist().index(i) for n in owners}
            q = {n: (float(shares[n, i]) if is_last else 1.0) / 0.7 for n in owners}
            top = 0.1 / 3 + sum(q[n] * float(networks[n][name.replace("weight", "bias")][rows[n]]) for n in owners)
            assert float(bias[i]) == pytest.approx(top / (1 / 3 + sum(q.values())), abs=1e-12)
            for k in range(wide.shape[1]):
                if place == 0:
                    seen = {n: (1 / 0.7, float(networks[n][name][rows[n], k])) for n in owners}
                else:
                    seen = {}
                    for n in range(3):  # an edge is described by the unit below it
                        if k not in units[n][place - 1].tolist():
                            continue
                        column = units[n][place - 1].tolist().index(k)
                        if n in owners:
                            seen[n] = (q[n], float(networks[n][name][rows[n], column]))
                        elif absent == "zero":
                            seen[n] = (1 / 0.7, 0.0)
                    if not any(k in units[n][place - 1].tolist() for n in range(3)):
                        assert wide[i, k] == 0
                        continue
                expected = sum(p * v for p, v in seen.values()) / (1 / 3 + sum(p for p, _ in seen.values()))
                assert float(wide[i, k]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("hidden", MODELS.values(), ids=MODELS)
def test_the_order_of_a_clients_units_does_not_change_the_merged_function(hidden):
    case = ragged(sizes=(20, 7, 33))._replace(model=deep(hidden))
    method = Pfnm(growth=10)
    networks = [random_network(case, seed) for seed in range(3)]
    orders = [torch.randperm(size, generator=torch.Generator().manual_seed(place)) for place, size in enumerate(hidden)]
    outputs = []
    for second in (networks[1], permuted(networks[1], orders)):
        record, reports = embedded(method, case, [networks[0], second, networks[2]])
        after = method.aggregate(record.before.state, record.cohort, reports)
        outputs.append(task_of(method, case.task()).logits(Weights(after.params, {}), case.dataset.test_x))
    assert torch.allclose(*outputs, atol=1e-10)


def test_without_a_hidden_layer_classes_are_averaged_by_their_frequency():
    case = ragged(sizes=(20, 7, 33))._replace(model=nn.Linear(5, 3).double())
    record = case.run(Pfnm(), rounds=1)[0]
    counts = torch.stack([torch.bincount(case.dataset.train_y[i], minlength=3) for i in case.clients]).double()
    shares = counts / counts.sum(0)
    for name in ("weight", "bias"):
        values = torch.stack([result.local.params[name] for result in record.clients])
        weights = shares[:, :, None] if name == "weight" else shares
        assert torch.allclose(record.after.state.params[name], (weights * values).sum(0), atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("model", ["tanh", "relu"])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=["plain", "momentum"])
def test_a_small_network_inside_a_wide_one_trains_and_scores_like_the_small_one(engine, model, settings):
    """Round 1 from common weights is FedAvg's round 1 for every client, and dead units stay zero to the bit."""
    case = ragged().changed(rounds=1, **settings)
    if model == "relu":
        case = case._replace(model=deep((6, 4)))
    mine, theirs = case.run(Pfnm(), engine)[0], case.run(FedAvg())[0]
    plain = small(case)
    units = mine.before.state.clients.default.units
    for a, b in zip(mine.clients, theirs.clients, strict=True):
        assert largest_difference(inside(plain, a.local.params, units), b.local.params) < 1e-12
        live = sum(int((value != 0).sum()) for value in a.local.params.values())
        assert live <= plain.num_params
    scores = [measure(m, case.task(), case.dataset, r) for m, r in ((Pfnm(), mine), (FedAvg(), theirs))]
    assert scores[0].clients["accuracy"] == scores[1].clients["accuracy"]
    assert scores[0].metrics["LA"] == scores[1].metrics["LA"]


def test_a_client_starts_from_the_units_that_its_own_were_matched_to():
    case = ragged()._replace(model=deep((6, 4)))
    method = Pfnm(own_init=True, gamma=50.0, growth=10)
    first, second = case.run(method, rounds=2)
    context = method.broadcast(first.after.state, second.cohort)
    widths = method.diagnose(first.before.state, first.cohort, first.reports, first.after.state)
    assert widths["units_1"] > 6  # the server's network has grown
    for position, n in enumerate(second.cohort.members):
        units = first.after.state.clients[n].units
        start = context.of_member(position).start
        assert equal_bits(inside(small(case), start, units), inside(small(case), first.after.state.params, units))
        assert in_use(start) == small(case).num_params
        assert sum(int((v != 0).sum()) for v in start.values()) <= small(case).num_params


def test_clients_begin_with_common_weights_or_with_their_own():
    case = ragged()
    for own_init in (False, True):
        method = Pfnm(own_init=own_init)
        record = case.run(method, rounds=1)[0]
        start = method.broadcast(record.before.state, record.cohort).start["0.weight"]
        assert torch.equal(start[0], start[1]) != own_init
        assert torch.equal(start[0].flatten().sort().values, start[1].flatten().sort().values)
        assert not start[:, 6:].any()


def test_absent_clients_count_as_if_they_had_sent_back_what_they_have():
    """At learning rate 0 it does not matter who takes part, once everybody has."""
    case = ragged(sizes=(20, 7, 33))
    method = Pfnm(own_init=True, gamma=3.0, growth=10)
    start = case.run(method, rounds=1)[0]
    still = case.changed(lr=0.0, rounds=2, seed=0)
    everybody = still.go_on(method, resume=start.after)[-1].after.state
    few = still.changed(cohort=2).go_on(method, resume=start.after)[-1]
    assert len(few.cohort.members) == 2
    assert set(few.after.state.clients.seen) == {0, 1, 2}
    for n in range(3):
        assert all(len(set(u.tolist())) == 6 for u in few.after.state.clients[n].units)
    x, task = case.dataset.test_x, task_of(method, case.task())
    outputs = [task.logits(Weights(state.params, {}), x) for state in (everybody, few.after.state)]
    assert torch.allclose(*outputs, atol=1e-8)


def test_traffic_is_a_network_of_the_clients_width_each_way():
    case = ragged()
    record = case.run(Pfnm(), rounds=1)[0]
    number = case.task().num_params
    assert (record.bytes_down, record.bytes_up) == (4 * 4 * number, 4 * 4 * (number + 3))


def test_more_units_than_room_are_refused_with_the_number():
    case = ragged(sizes=(20, 20, 20))
    with pytest.raises(UserError, match=r"pfnm needs 18 units in hidden layer 1, more than the 12 there is room for"):
        case.run(Pfnm(gamma=1e100, growth=2.0))
    assert Pfnm(growth=4.0).network(Mlp((5,), 3, hidden=(500, 20))).layers[1].out_features == 700


class Residual(nn.Module):
    """A network whose hidden units cannot change places: the second layer adds to the first."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = torch.relu(self.one(x))
        h = h + torch.roll(torch.relu(self.two(h)), 1, dims=1)
        return self.out(h)


class Hidden(nn.Module):
    """An activation that no module shows."""

    def __init__(self):
        super().__init__()
        self.one, self.out = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.sigmoid(self.one(x)))


REFUSED = {
    "batch norm": (nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), "got BatchNorm1d 1"),
    "sigmoid": (nn.Sequential(nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 3)), r"f\(0\) = 0, got Sigmoid"),
    "hidden sigmoid": (Hidden(), "unused units are trained"),
    "residual": (Residual(), "the order of hidden units matters"),
    "no bias": (nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 3)), "needs layers with biases"),
}


@pytest.mark.parametrize(("model", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_models_whose_units_cannot_be_matched(model, message):
    case = ragged(sizes=(20, 7))._replace(model=model.double())
    with pytest.raises(UserError, match=message) as refusal:
        case.run(Pfnm())
    assert "\n" not in str(refusal.value)


def test_refuses_convolutions():
    with pytest.raises(UserError, match=r"got Conv2d layers.0.0; use --model mlp, or --method fedma"):
        Pfnm().network(Cnn((1, 16, 16), 3))


@pytest.mark.parametrize(
    ("setting", "value"), [("sigma", 0.0), ("sigma0", float("inf")), ("gamma", -1.0), ("sweeps", -1), ("growth", 0.5)]
)
def test_refuses_impossible_settings(setting, value):
    with pytest.raises(UserError, match=f"method.{setting} must"):
        Pfnm(**{setting: value})


def test_it_learns():
    case = ragged(sizes=(40, 40, 40)).changed(rounds=6, lr=0.3, epochs=5)
    method, task = Pfnm(own_init=True, growth=10), case.task()
    records = list(federate(method, case.problem()._replace(task=task), case.training, case.federation))
    losses = [measure(method, task, case.dataset, record).metrics["train_loss"] for record in records]
    assert losses[-1] < losses[0] - 0.01
    assert final(records)["0.weight"].shape == (60, 5)


def test_settings_from_the_command_line():
    method = configure({"method": "pfnm", "method.absent": "missing", "method.gamma": 7}).method
    assert method == replace(Pfnm(), absent="missing", gamma=7.0)
