"""FedCurv against an explicit sum over the other clients, and what its degenerate cases must equal."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.func import grad

from fl_lightning.data.batches import ClientData
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcurv import FedCurv, OthersPrecisions
from fl_lightning.params import flatten
from tests.support.cases import equal_bits, final, largest_difference, ragged
from tests.support.references import batches, gradient, initial, weights

ENGINES = {"loop": Functional(chunk=1), "lightning": Lightning()}


def reference_fisher(case, params, client, kind):
    """Mean of squared gradients, one sample or one batch of consecutive samples after the other."""
    indices = case.clients[client]
    size = 1 if kind == "per_sample" else case.training.batch_size
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for first in range(0, len(indices), size):
        some = indices[first : first + size]
        for name, g in gradient(case, params, some).items():
            total[name] += g**2 * len(some) / len(indices)
    return total


def reference(case, cohorts, strength, kind="per_sample", memory="last_round"):
    """The global model after every round; every client is pulled to each other client by name."""
    x = initial(case)
    senders = {}  # client -> (model, Fisher)
    history = []
    for number, cohort in enumerate(cohorts, start=1):
        finished = {}
        for n in cohort:
            y = dict(x)
            for batch in batches(case, n, number):
                slope = gradient(case, y, batch)
                for j, (model, fisher) in senders.items():
                    if j != n:
                        slope = {k: slope[k] + 2 * strength * fisher[k] * (y[k] - model[k]) for k in y}
                y = {k: y[k] - case.training.lr * slope[k] for k in y}
            finished[n] = (y, reference_fisher(case, y, n, kind))
        p = weights(case, cohort)
        x = {k: sum(p[n] * finished[n][0][k] for n in cohort) for k in x}
        senders = {**senders, **finished} if memory == "all" else finished
        history.append(x)
    return history


@pytest.mark.parametrize(
    ("fraction", "memory", "rounds"), [(1.0, "last_round", 3), (0.5, "last_round", 5), (0.5, "all", 5)]
)
@pytest.mark.parametrize("kind", ["per_sample", "minibatch"])
def test_equals_the_explicit_sum_over_the_other_clients(kind, fraction, memory, rounds):
    case, strength = ragged(), 0.7
    method = FedCurv(strength=strength, fisher=kind, memory=memory)
    loop = case.run(method, fraction=fraction, rounds=rounds)
    vmap = case.run(method, Functional(chunk=3), fraction=fraction, rounds=rounds)
    history = reference(case, [record.cohort.members for record in loop], strength, kind, memory)
    for mine, batched, expected in zip(loop, vmap, history, strict=True):
        assert largest_difference(mine.after.state.params, expected) < 1e-12
        assert largest_difference(batched.after.state.params, expected) < 1e-12


@pytest.mark.parametrize(
    ("engine", "settings"),
    [("loop", {}), ("loop", {"momentum": 0.9, "weight_decay": 1e-3}), ("lightning", {"fraction": 0.5})],
)
def test_without_strength_it_is_fedavg(engine, settings):
    case = ragged(torch.float32)
    mine = case.run(FedCurv(strength=0.0), ENGINES[engine], **settings)
    assert equal_bits(final(mine), final(case.run(FedAvg(), ENGINES[engine], **settings)))
    last = mine[-1]
    context = FedCurv(0.0).broadcast(last.before.state, last.cohort)
    assert FedCurv(0.0).penalty(context.of_member(0)) is None  # not a penalty of zero, which costs time


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"clip_norm": 0.3}])
@pytest.mark.parametrize("method", [FedCurv(1e4), FedCurv(3.3, "minibatch", "all")])
def test_one_client_is_fedavg_at_any_strength(method, settings, engine):
    """Nobody else is there to pull: the client's own share must vanish exactly, not up to rounding."""
    for sizes in ((30,), (0, 30, 0)):
        case = ragged(torch.float32, sizes=sizes)
        mine = case.run(method, ENGINES[engine], **settings)
        assert equal_bits(final(mine), final(case.run(FedAvg(), ENGINES[engine], **settings)))
        own = mine[-1].after.state.clients[len(sizes) // 2]
        assert any(v.any() for v in own.fisher.values())  # and not for lack of curvature


def test_the_pull_begins_in_round_two_and_is_felt():
    """A penalty made of detached tensors would change nothing."""
    case = ragged(torch.float32)
    mine, plain = case.run(FedCurv(0.5)), case.run(FedAvg())
    assert equal_bits(mine[0].after.state.params, plain[0].after.state.params)
    assert all(result.prior_loss == 0 for result in mine[0].clients)
    assert largest_difference(mine[1].after.state.params, plain[1].after.state.params) > 1e-4
    assert all(result.prior_loss != 0 for result in mine[1].clients)


def test_the_penalty_is_the_sum_of_quadratics_up_to_a_constant():
    case, strength = ragged(), 2.5
    records = case.run(FedCurv(strength))
    last = records[-1]
    context = FedCurv(strength).broadcast(last.before.state, last.cohort)
    for position, n in enumerate(last.cohort.members):
        penalty = FedCurv(strength).penalty(context.of_member(position))
        others = [
            (result.local.params, report.fisher)
            for result, report in zip(records[-2].clients, records[-2].reports, strict=True)
            if result.local.client != n
        ]

        def explicit(y, others=others):
            return strength * sum((f[k] * (y[k] - model[k]) ** 2).sum() for model, f in others for k in y)

        constant = strength * sum((f[k] * model[k] ** 2).sum() for model, f in others for k in f)
        for y in (last.clients[position].local.params, initial(case)):
            assert float(penalty.value(y) + constant - explicit(y)) == pytest.approx(0, abs=1e-12)
            assert largest_difference(penalty.grad(y), grad(explicit)(y)) < 1e-12
            assert float(flatten(penalty.grad(y)).abs().max()) > 1e-3


def test_a_plain_step_on_the_pull_equals_its_gradient():
    stream = torch.Generator().manual_seed(0)
    u, v, p = ({"w": torch.rand(50, generator=stream, dtype=torch.float64)} for _ in range(3))
    stepped = {"w": p["w"].clone()}
    OthersPrecisions(u, v, 3.0).descent(0.1)(stepped)
    assert torch.allclose(stepped["w"], p["w"] - 0.1 * 2 * 3 * (u["w"] * p["w"] - v["w"]), rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("kind", ["per_sample", "minibatch"])
def test_the_fisher_is_over_all_samples(kind):
    """Every sample counts, the first as well as the last: code that overwrites instead of adding sees one batch."""
    case = ragged()
    client = 3
    record = case.run(FedCurv(fisher=kind), rounds=1)[0]
    position = record.cohort.members.index(client)
    local = record.clients[position].local
    u = record.reports[position].fisher
    assert largest_difference(u, reference_fisher(case, local.params, client, kind)) < 1e-14

    for place in (0, 17, -1):
        x = case.dataset.train_x.clone()
        x[case.clients[client][place]] += 1.0
        data = ClientData(client, replace(case.dataset, train_x=x), case.clients[client], torch.float64)
        changed = FedCurv(fisher=kind).report(local._replace(data=data), None)
        assert largest_difference(changed.fisher, u) > 1e-4


def test_the_server_forms_the_moments_and_sums_without_weights():
    case = ragged()
    record = case.run(FedCurv(), rounds=1)[0]
    state = record.after.state
    context = FedCurv().broadcast(state, record.cohort)
    for name in state.params:
        u = {n: r.fisher[name] for n, r in zip(record.cohort.members, record.reports, strict=True)}
        v = {n: r.fisher[name] * r.params[name] for n, r in zip(record.cohort.members, record.reports, strict=True)}
        assert torch.allclose(context.shared.fisher[name], sum(u.values()), rtol=1e-14)
        assert torch.allclose(context.shared.moment[name], sum(v.values()), rtol=1e-14, atol=1e-15)
        for n, value in v.items():
            assert torch.equal(state.clients[n].moment[name], value)
            assert torch.equal(state.clients[n].fisher[name], u[n])


def test_traffic():
    case = ragged()
    size = case.task().num_params
    for record in case.run(FedCurv(), fraction=0.5):
        assert record.bytes_down == 3 * 4 * size * 2
        assert record.bytes_up == 2 * 4 * size * 2
        samples = sum(len(case.clients[n]) for n in record.cohort.members)
        assert record.gradient_evaluations == samples * (case.training.epochs + 1)


@pytest.mark.parametrize("memory", ["last_round", "all"])
def test_memory_with_partial_participation(memory):
    case = ragged()
    records = case.run(FedCurv(memory=memory), fraction=0.5, rounds=6)
    latest = {}
    absent = 0
    for record in records:
        sent = dict(zip(record.cohort.members, (r.fisher for r in record.reports), strict=True))
        latest = {**latest, **sent} if memory == "all" else sent
        for n in range(len(case.clients)):
            absent += n in latest and n not in sent
            for name, value in record.after.state.clients[n].fisher.items():
                assert torch.equal(value, latest[n][name] if n in latest else torch.zeros_like(value))
        assert record.after.state.clients.seen == tuple(sorted(latest))
    assert (absent > 0) == (memory == "all")  # some client sat out a round, and was remembered only if asked for


def test_a_client_that_was_away_does_not_pull_itself():
    """Its row is subtracted exactly when it is part of the sums."""
    case = ragged()
    for memory in ("last_round", "all"):
        method = FedCurv(memory=memory)
        records = case.run(method, fraction=0.5, rounds=6)
        for earlier, record in pairwise(records):
            before = {r.round: r for r in records if r.round < record.round}
            context = method.broadcast(record.before.state, record.cohort)
            for position, n in enumerate(record.cohort.members):
                expected = 0.0
                for j in range(len(case.clients)):
                    rounds = [earlier] if memory == "last_round" else list(before.values())
                    found = [dict(zip(r.cohort.members, r.reports, strict=True)).get(j) for r in rounds]
                    found = [report for report in found if report is not None]
                    if j != n and found:
                        expected = expected + flatten(found[-1].fisher)
                penalty = method.penalty(context.of_member(position))
                assert float((flatten(penalty.fisher) - expected).abs().max()) < 1e-15


def test_prior_stability_is_the_largest_step_on_the_penalty():
    case, strength = ragged(), 1.7
    records = case.run(FedCurv(strength), fraction=0.5)
    for record in records:
        after = record.after.state
        rows = torch.stack([flatten(after.clients[n].fisher) for n in (0, 1, 3, 4)])
        expected = 2 * case.training.lr * strength * float((rows.sum(0) - rows).max())
        numbers = FedCurv(strength).diagnose(record.before.state, record.cohort, record.reports, after)
        assert numbers == {"prior_stability": pytest.approx(expected, rel=1e-12)}
        assert expected > 0


def test_prior_stability_of_a_single_client_is_zero():
    record = ragged(sizes=(0, 30)).run(FedCurv(1e6))[-1]
    numbers = FedCurv(1e6).diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    assert numbers["prior_stability"] == 0


def test_above_two_the_step_on_the_penalty_diverges():
    fisher, moment = {"w": torch.ones(1, dtype=torch.float64)}, {"w": torch.zeros(1, dtype=torch.float64)}
    for stability, grows in ((1.9, False), (2.1, True)):
        params = {"w": torch.ones(1, dtype=torch.float64)}
        descend = OthersPrecisions(fisher, moment, strength=stability / (2 * 0.1)).descent(0.1)
        for _ in range(100):
            descend(params)
        assert (abs(float(params["w"])) > 1) == grows


def test_refusals():
    for strength in (-1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match="strength must be finite and >= 0"):
            FedCurv(strength)
    case = ragged()
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    case = case._replace(model=model, clients=[c for c in case.clients if len(c) > 1], training=case.training)
    with pytest.raises(UserError, match=r"BatchNorm; use --method\.fisher minibatch"):
        case.run(FedCurv())
    assert len(case.run(FedCurv(0.1, fisher="minibatch"), batch_size=None)) == 3
