"""FedMA: borders between all kinds of layers, degenerate cases, frozen layers, cycles and their traffic."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_lightning.contrib.fedma import FedMa, Report, merged
from fl_lightning.contrib.pfnm import Pfnm
from fl_lightning.contrib.widened_network import in_use, layers_of
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError
from fl_lightning.method import task_of
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models.networks.cnn import Cnn
from fl_lightning.models.networks.mlp import Mlp
from fl_lightning.models.task import Task, Weights
from fl_lightning.runs.config.run_config import configure
from tests.support.cases import ENGINES, equal_bits, largest_difference, ragged

HARDLY_ANY_PRIOR = 1e6


def conv():
    """Two convolutions with pooling and two linear layers on images of 8x8 pixels: all borders, few weights."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 3, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3 * 4, 5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )


def images(model=None, sizes=(20, 20), shape=(1, 8, 8), seed=0):
    """A case with random images."""
    case, stream = ragged(sizes=sizes, seed=seed), torch.Generator().manual_seed(seed)
    old = case.dataset
    train, test = (torch.randn(len(y), *shape, generator=stream).double() for y in (old.train_y, old.test_y))
    torch.manual_seed(seed)
    return case._replace(model=(model or conv()).double(), dataset=Dataset(train, old.train_y, test, old.test_y, 3))


def vectors(hidden=(6, 4), sizes=(20, 20)):
    torch.manual_seed(0)
    return ragged(sizes=sizes)._replace(model=Mlp((5,), 3, hidden=hidden).double())


CASES = {"mlp": vectors, "conv": images, "cnn": lambda: images(Cnn((1, 16, 16), 3), shape=(1, 16, 16))}


def random_network(case, seed):
    torch.manual_seed(seed)
    return {name: 0.3 * torch.randn_like(p) for name, p in Task(deepcopy(case.model)).initial.params.items()}


def permuted(network, seed=0):
    """The same function with the hidden units of each layer in another order, and the orders."""
    layers, result, orders = layers_of(network), dict(network), []
    for place, (weight, bias) in enumerate(layers):
        value = result[weight]
        if place:
            blocks = value.reshape(len(value), len(orders[-1]), -1)
            value = blocks[:, orders[-1]].reshape(value.shape)
        if place < len(layers) - 1:
            order = torch.randperm(len(value), generator=torch.Generator().manual_seed(seed + place))
            value, result[bias] = value[order], result[bias][order]
            orders.append(order)
        result[weight] = value
    return result, orders


def embedded(network, like):
    params = {}
    for name, value in like.items():
        wide = torch.zeros_like(value)
        wide[tuple(slice(size) for size in network[name].shape)] = network[name]
        params[name] = wide
    return params


def cycle(method, case, networks):
    """A whole cycle in which nobody trains: the states after each round, from clients with these networks."""
    record = case.run(method, rounds=1)[0]
    state, cohort, counts = record.before.state, record.cohort, [report.counts for report in record.reports]
    states = []
    for number in range(len(layers_of(state.params)) - 1):
        if number == 0:
            reports = [Report(embedded(n, state.params), c, 0) for n, c in zip(networks, counts, strict=True)]
        else:
            context = method.broadcast(state, cohort._replace(round=number + 1))
            reports = [Report(context.of_member(i).start, c, 0) for i, c in enumerate(counts)]
        state = method.aggregate(state, cohort._replace(round=number + 1), reports)
        states.append(state)
    return states


def outputs(method, case, params):
    return task_of(method, case.task()).logits(Weights(params, {}), case.dataset.test_x)


def plain_outputs(case, network):
    return Task(deepcopy(case.model)).logits(Weights(network, {}), case.dataset.test_x)


@pytest.mark.parametrize("kind", CASES)
def test_a_permuted_client_is_the_same_client(kind):
    case = CASES[kind]()
    method = FedMa(sigma0=HARDLY_ANY_PRIOR, gamma=1.0)
    network = random_network(case, 1)
    other, orders = permuted(network)
    assert torch.allclose(plain_outputs(case, network), plain_outputs(case, other), atol=1e-10)
    states = cycle(method, case, [network, other])
    last = states[-1]
    assert last.layer == 0
    for one, two, order in zip(last.clients[0].units, last.clients[1].units, orders, strict=True):
        assert torch.equal(one[order], two)
    assert torch.allclose(outputs(method, case, last.params), plain_outputs(case, network), atol=1e-3)
    assert in_use(last.params) == sum(value.numel() for value in network.values())
    mean = {name: (network[name] + other[name]) / 2 for name in network}
    gap = (plain_outputs(case, mean) - plain_outputs(case, network)).abs().max()
    assert gap > 0.02  # averaging does not do that
    assert (outputs(method, case, last.params) - plain_outputs(case, network)).abs().max() < gap / 100


@pytest.mark.parametrize("kind", CASES)
def test_a_client_whose_units_all_match_computes_the_same_after_every_layer(kind):
    """After layer l is merged and layer l + 1 got its inputs in another order: every border in turn."""
    case = CASES[kind]()
    method = FedMa(sigma0=HARDLY_ANY_PRIOR, gamma=1.0)
    network = random_network(case, 1)
    networks = [permuted(network)[0], network]
    hidden = len(layers_of(network)) - 1
    for state in cycle(method, case, networks):
        for n in range(2):
            found = outputs(method, case, state.clients[n].params)
            assert torch.allclose(found, plain_outputs(case, networks[n]), atol=1e-3), state.layer
    assert hidden == {"mlp": 2, "conv": 3, "cnn": 3}[kind]


@pytest.mark.parametrize("kind", CASES)
def test_borders_are_exact_where_the_layer_is_the_clients_own(kind):
    """The merged layer holds the client's units among others, in another order: its function stays to rounding."""
    case = CASES[kind]()
    method = FedMa()
    record = case.run(method, rounds=1)[0]
    state = record.before.state
    params = embedded(random_network(case, 3), state.params)
    expected = outputs(method, case, params)
    layers = layers_of(params)
    for number in range(len(layers) - 1):
        row = state.clients.default._replace(params=params, counts=record.reports[0].counts)
        size = len(row.units[number])
        places = torch.randperm(size + 2, generator=torch.Generator().manual_seed(number))[:size]
        own = torch.cat([params[layers[number].weight].flatten(1), params[layers[number].bias][:, None]], dim=1)
        means = torch.randn(size + 2, own.shape[1], generator=torch.Generator().manual_seed(5)).double()
        means[places] = own[:size]
        after = merged(row, number, means, places)
        assert torch.allclose(outputs(method, case, after.params), expected, atol=1e-12)
        assert torch.equal(after.units[number], places)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_the_order_of_a_clients_units_does_not_change_the_merged_function(kind):
    case = CASES[kind]()
    method = FedMa(gamma=1.0)
    networks = [random_network(case, seed) for seed in (1, 2)]
    found = []
    for second in (networks[1], permuted(networks[1])[0]):
        found.append([outputs(method, case, state.params) for state in cycle(method, case, [networks[0], second])][-1])
    assert torch.allclose(*found, atol=1e-9)


@pytest.mark.parametrize("kind", CASES)
def test_one_client_gets_its_network_back_up_to_the_prior(kind):
    case = CASES[kind]()
    case = case._replace(clients=[case.clients[0], case.clients[1][:0]])
    method = FedMa(sigma0=HARDLY_ANY_PRIOR)
    network = random_network(case, 1)
    last = cycle(method, case, [network])[-1]
    assert largest_difference(last.params, embedded(network, last.params)) < 2e-6


def test_one_hidden_layer_is_merged_as_pfnm_merges_it():
    """For the same assignment: all units of two permuted, slightly different clients match."""
    case = vectors(hidden=(6,), sizes=(20, 33))
    network = random_network(case, 1)
    network = {name: 10 * value for name, value in network.items()}
    near = {name: value + 0.01 * torch.randn_like(value) for name, value in network.items()}
    networks = [network, permuted(near)[0]]
    mine = cycle(FedMa(sigma0=HARDLY_ANY_PRIOR, gamma=1.0), case, networks)[-1]
    method = Pfnm(sigma0=HARDLY_ANY_PRIOR)
    record = case.run(method, rounds=1)[0]
    reports = [
        report._replace(params=embedded(n, report.params)) for n, report in zip(networks, record.reports, strict=True)
    ]
    theirs = method.aggregate(record.before.state, record.cohort, reports)
    assert all(
        torch.equal(mine.clients[n].units[0], theirs.clients[n].units[0]) and len(mine.clients[n].units[0]) == 6
        for n in range(2)
    )
    assert largest_difference(mine.params, theirs.params) < 1e-4


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=["plain", "momentum"])
def test_layers_below_are_frozen_to_the_bit_and_dead_units_stay_dead(engine, settings):
    case = images(sizes=(20, 7, 33)).changed(rounds=4, **settings)
    method = FedMa(gamma=1.0)
    for record in case.run(method, engine):
        context = method.broadcast(record.before.state, record.cohort)
        layer = record.before.state.layer
        assert layer == (record.round - 1) % 3
        for position, result in enumerate(record.clients):
            start, end = context.of_member(position).start, result.local.params
            for place, names in enumerate(layers_of(start)):
                for name in names:
                    assert torch.equal(start[name], end[name]) == (place < layer)
            assert in_use(start) == in_use(end)
        # What is merged is the same for all clients, and the server's.
        for n in record.after.state.clients.seen:
            for names in layers_of(record.after.state.params)[: record.after.state.layer]:
                mine = {name: record.after.state.clients[n].params[name] for name in names}
                assert largest_difference(mine, {name: record.after.state.params[name] for name in names}) < 1e-15


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_first_round_trains_as_fedavg_does(engine):
    case = images(sizes=(20, 7, 33))
    mine, theirs = case.run(FedMa(), engine, rounds=1)[0], case.run(FedAvg(), rounds=1)[0]
    for a, b in zip(mine.clients, theirs.clients, strict=True):
        assert largest_difference(a.local.params, embedded(b.local.params, a.local.params)) < 1e-12
        assert a.train_loss == pytest.approx(b.train_loss, abs=1e-12)


def test_a_cycles_bytes():
    """Up each layer once, the output with the last one; down each merged layer once, with the client's units."""
    case = vectors(hidden=(6, 4)).changed(rounds=5)
    method = FedMa(gamma=1e-6)  # all units match: nothing grows
    records = case.run(method)
    first, second, out = 6 * 6, 4 * 7, 3 * 5
    up = [first + 3, second + out + 3]
    down = [first + second + out, first + 6, second + out + 4]
    for record in records:
        place = (record.round - 1) % 2
        assert record.bytes_up == 2 * 4 * up[place]
        assert record.bytes_down == 2 * 4 * (down[0] if record.round == 1 else down[1 if place else 2])


def test_who_was_away_is_sent_all_layers_that_were_merged_meanwhile():
    """Half of four clients in a round, three layers in a cycle: counted from who took part, round by round."""
    case = vectors(hidden=(8, 7, 6), sizes=(12, 10, 9, 11)).changed(rounds=10, fraction=0.5)
    records = case.run(FedMa(gamma=1e-6))  # all units match: nothing grows
    layers = [8 * 6, 7 * 9, 6 * 8, 3 * 7]
    last, away = {}, 0
    for record in records:
        expected = 0
        for n in record.cohort.members:
            if n not in last:
                expected += sum(layers)
                continue
            merges = {(r - 1) % 3 for r in range(last[n], record.round)}
            expected += sum(layers[number] + (8, 7, 6)[number] for number in merges) + (2 in merges) * layers[3]
            away = max(away, record.round - last[n])
        assert record.bytes_down == 4 * expected
        last |= dict.fromkeys(record.cohort.members, record.round)
    assert away > 1, "nobody was away"


def test_bytes_grow_with_the_servers_layer():
    case = vectors(hidden=(6, 4)).changed(rounds=3)
    records = case.run(FedMa(gamma=1e6))
    assert records[0].after.state.clients[1].units[0].tolist() == list(range(6, 12))
    assert records[1].bytes_down == 2 * 4 * (12 * 6 + 6)
    assert records[1].bytes_up == 2 * 4 * (4 * 13 + 3 * 5 + 3)


def test_without_a_hidden_layer_classes_are_averaged_by_their_frequency():
    case = ragged(sizes=(20, 7, 33))._replace(model=nn.Linear(5, 3).double())
    record = case.run(FedMa(), rounds=1)[0]
    counts = torch.stack([torch.bincount(case.dataset.train_y[i], minlength=3) for i in case.clients]).double()
    values = torch.stack([result.local.params["weight"] for result in record.clients])
    expected = ((counts / counts.sum(0))[:, :, None] * values).sum(0)
    assert torch.allclose(record.after.state.params["weight"], expected, atol=1e-12)


def test_absent_clients_are_matched_with_what_they_had_and_newcomers_start_from_the_server():
    case = vectors(sizes=(20, 7, 33, 12)).changed(rounds=8, cohort=2)
    method = FedMa(gamma=1.0)
    records = case.run(method)
    seen = set()
    for record in records:
        fresh = [n for n in record.cohort.members if n not in seen]
        context = method.broadcast(record.before.state, record.cohort)
        for n in fresh:
            start = context.of_member(record.cohort.members.index(n)).start
            layer = record.before.state.layer
            for names in layers_of(start)[:layer]:
                assert all(torch.equal(start[name], record.before.state.params[name]) for name in names)
        seen |= set(record.cohort.members)
        state = record.after.state
        assert set(state.clients.seen) == seen
        for n in seen:
            assert [len(set(u.tolist())) for u in state.clients[n].units] == [6, 4]
        if state.layer:  # in the middle of a cycle, all have the same merged layer
            weights = [state.clients[n].params["layers.1.weight"] for n in seen]
            assert all(torch.equal(weights[0], w) for w in weights)
    assert len(seen) == 4


def test_own_weights_differ_and_common_ones_do_not():
    case = images()
    for own_init in (False, True):
        method = FedMa(own_init=own_init)
        record = case.run(method, rounds=1)[0]
        start = method.broadcast(record.before.state, record.cohort).start["0.weight"]
        assert torch.equal(start[0], start[1]) != own_init


def test_resuming_in_the_middle_of_a_cycle():
    case = images(sizes=(20, 7, 33)).changed(rounds=5, fraction=0.67)
    records = case.run(FedMa(gamma=1.0))
    for done in records[:-1]:
        rest = case.go_on(FedMa(gamma=1.0), resume=done.after)
        assert equal_bits(rest[-1].after.state.params, records[-1].after.state.params)


REFUSED = {
    "batch norm": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
        "got BatchNorm2d 1",
    ),
    "groups": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3)),
        "got Conv2d 2",
    ),
    "softplus": (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Softplus(), nn.Flatten(), nn.Linear(144, 3)),
        r"f\(0\) = 0, got Softplus",
    ),
}


@pytest.mark.parametrize(("model", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_models_whose_units_cannot_be_matched(model, message):
    with pytest.raises(UserError, match=message) as refusal:
        images(model).run(FedMa())
    assert "\n" not in str(refusal.value)


def test_more_units_than_room_are_refused_with_the_number():
    with pytest.raises(UserError, match=r"fedma needs 12 units in hidden layer 1, more than the 9 there is room for"):
        vectors().run(FedMa(gamma=1e100, growth=1.5))


@pytest.mark.parametrize(
    ("setting", "value"), [("sigma", 0.0), ("sigma0", float("inf")), ("gamma", -1.0), ("sweeps", -1), ("growth", 0.5)]
)
def test_refuses_impossible_settings(setting, value):
    with pytest.raises(UserError, match=f"method.{setting} must"):
        FedMa(**{setting: value})


def test_settings_from_the_command_line():
    method = configure({"method": "fedma", "method.gamma": 1, "method.own_init": "true"}).method
    assert method == replace(FedMa(), gamma=1.0, own_init=True)
