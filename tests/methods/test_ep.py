"""Expectation propagation: exact on conjugate clients, and what factors, cavities and memories must obey."""

import pytest
import torch

from fl_lightning.methods.ep import EP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.parts.ep_cavity import Report
from fl_lightning.params import flatten
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, ragged
from tests.support.conjugate import ORIGIN, SIZES, cohort_of, distance, exact_posterior, quadratics


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
    total = state.total.changed(state.factors, rows)
    state = state._replace(factors=state.factors.replaced(rows), total=total, precision={"w": 3 * level["w"]})
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


def test_a_factor_beyond_the_whole_is_clipped_and_counted():
    method, clients = EP(prior=0.3), quadratics()
    state = exact_round(method, method.init(ORIGIN, 4), range(4), clients)
    same = [Report(state.params, state.precision)] * 2
    assert method.diagnose(state, cohort_of((0, 1)), same, state)["cavity_clips"] == [0.0, 0.0]
    too_much = state.factors[1]._replace(precision={"w": state.precision["w"] + torch.tensor([1.0, -5.0, 0.5])})
    total = state.total.changed(state.factors, {1: too_much})
    state = state._replace(factors=state.factors.replaced({1: too_much}), total=total)
    cohort = cohort_of((0, 1))
    assert method.diagnose(state, cohort, same, state)["cavity_clips"] == [0.0, 2.0]
    pull = method.penalty(method.broadcast(state, cohort).of_member(1))
    assert torch.equal(pull.stiffness["w"][[0, 2]], torch.full((2,), 0.3 / SIZES[1], dtype=torch.float64))
    assert torch.isfinite(pull.centre["w"]).all()


@pytest.mark.parametrize("memory", ["ep", "sep", "adf"])
def test_a_server_below_the_prior_is_clipped_and_counted(memory):
    method = EP(prior=0.3, memory=memory)
    record = ragged().run(method, rounds=1)[0]
    before, cohort = record.before.state, record.cohort
    for share, clipped in ((0.1, 6.0), (1.0, 0.0)):  # of the prior, which is all there is before the first round
        precision = {k: share * v if k == "0.bias" else v for k, v in before.precision.items()}
        reports = [Report(before.params, precision)] * len(cohort.members)
        after = method.aggregate(before, cohort, reports)
        assert method.diagnose(before, cohort, reports, after)["server_clips"] == clipped
        assert all(torch.equal(value, torch.full_like(value, 0.3)) for value in after.precision.values())


def test_memory_holds_those_who_were_seen():
    records = ragged().run(EP(), rounds=3, cohort=1)
    seen = set()
    for record in records:
        seen |= set(record.cohort.members)
        assert set(record.after.state.factors.seen) == seen
