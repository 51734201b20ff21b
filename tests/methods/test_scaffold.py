"""SCAFFOLD against brute force, and the identities its control variates must obey."""

import pytest
import torch
from torch import nn

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.scaffold import Scaffold
from fl_lightning.params import flatten
from fl_lightning.runs.config.run_config import configure
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, ragged

SETTINGS = {
    "full": {},
    "partial": {"fraction": 0.5, "rounds": 6},
    "uniform": {"weighting": "uniform"},
    "partial and uniform": {"fraction": 0.5, "rounds": 6, "weighting": "uniform"},
    "stragglers": {"straggler_fraction": 0.5, "epochs": 4},
    "decays": {"weight_decay": 0.01, "lr_decay": 0.5},
    "full batches": {"batch_size": None},
}


def run_by_hand(case, cohorts, option="II", server_lr=1.0, start=None):
    """Plain loops. Returns x, c and {client: c_n} after every round.

    `cohorts` says for every round which clients take part, with how many epochs.
    """
    eligible = references.members(case)
    by_samples = case.federation.weighting == "samples"
    size = {n: len(case.clients[n]) if by_samples else 1 for n in eligible}
    population = sum(size.values())
    x = references.initial(case)
    c = {k: torch.zeros_like(v) for k, v in x.items()} if start is None else start
    c_of = {n: dict(c) for n in eligible}
    history = []
    for number, cohort in enumerate(cohorts, start=1):
        lr = case.training.lr * case.training.lr_decay ** (number - 1)
        models, news = {}, {}
        for n, epochs in cohort.items():
            y = dict(x)
            batches = references.batches(case, n, number, epochs)
            for batch in batches:
                g = references.gradient(case, y, batch)
                y = {k: y[k] - lr * (g[k] + case.training.weight_decay * y[k] - c_of[n][k] + c[k]) for k in y}
            models[n] = y
            if option == "I":
                news[n] = references.gradient(case, x, case.clients[n])
            else:
                news[n] = {k: c_of[n][k] - c[k] + (x[k] - y[k]) / (len(batches) * lr) for k in x}
        total = sum(size[n] for n in cohort)
        step = {k: sum(size[n] / total * (models[n][k] - x[k]) for n in cohort) for k in x}
        c = {k: c[k] + sum(size[n] / population * (news[n][k] - c_of[n][k]) for n in cohort) for k in c}
        x = {k: x[k] + server_lr * step[k] for k in x}
        c_of = {**c_of, **news}
        history.append((x, c, c_of))
    return history


def assert_matches(case, records, history):
    for record, (x, c, c_of) in zip(records, history, strict=True):
        state = record.after.state
        assert largest_difference(state.params, x) < 1e-12
        assert largest_difference(state.control, c) < 1e-12
        for n, memory in c_of.items():
            assert largest_difference(state.clients[n], memory) < 1e-12


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("option", ["I", "II"])
def test_matches_brute_force(option, setting):
    case = ragged().changed(**SETTINGS[setting])
    for server_lr in (1.0, 0.7):
        records = case.run(Scaffold(option=option, server_lr=server_lr))
        assert_matches(case, records, run_by_hand(case, references.cohorts(records), option, server_lr))


@pytest.mark.parametrize("engine", [Functional(chunk=8), Lightning()], ids=["vmap", "lightning"])
@pytest.mark.parametrize("option", ["I", "II"])
def test_matches_brute_force_on_every_engine(option, engine):
    """The memory's rows reach the right clients also where several train at once."""
    case = ragged().changed(fraction=0.75, rounds=4)
    records = case.run(Scaffold(option=option), engine)
    assert len(records[0].cohort.members) == 3
    assert_matches(case, records, run_by_hand(case, references.cohorts(records), option))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", [Functional(chunk=1), Functional(chunk=8), Lightning()])
@pytest.mark.parametrize("method", [Scaffold(), Scaffold(option="I"), Scaffold(niid_bench_init=True)])
def test_round_1_is_fedavg_bit_for_bit(method, engine, dtype):
    case = ragged(dtype)
    mine, fedavg = (case.run(m, engine, rounds=1)[0] for m in (method, FedAvg()))
    assert equal_bits(mine.after.state.params, fedavg.after.state.params)
    for a, b in zip(mine.clients, fedavg.clients, strict=True):
        assert equal_bits(a.local.params, b.local.params)
        assert a.prior_loss == 0


def test_round_2_is_not_fedavg():
    """The correction is alive: a slope of detached or forgotten variates would leave FedAvg."""
    case = ragged()
    assert largest_difference(final(case.run(Scaffold(), rounds=2)), final(case.run(FedAvg(), rounds=2))) > 1e-4


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_server_variate_is_the_mean_of_all_clients_variates(dtype, option, fraction, weighting):
    """c = sum_n q_n c_n over the whole population, after every round."""
    case = ragged(dtype)
    eligible = references.members(case)
    share = {n: 1 / len(eligible) for n in eligible}
    if weighting == "samples":
        share = references.weights(case, eligible)
    for record in case.run(Scaffold(option=option), rounds=6, fraction=fraction, weighting=weighting):
        state = record.after.state
        c = flatten(state.control).double()
        mean = sum(share[n] * flatten(state.clients[n]).double() for n in eligible)
        assert (c - mean).norm() <= (1e-6 if dtype == torch.float32 else 1e-14) * c.norm()
        assert c.norm() > 0


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_server_variate_is_the_servers_own_step(dtype, server_lr):
    """Option II, full participation, equal K: c = (x_old - x_new) / (K eta eta_s), which FLamby uses to send less."""
    case = ragged(dtype, sizes=(16, 16, 16))
    num_steps = 2 * case.training.epochs
    for record in case.run(Scaffold(server_lr=server_lr), rounds=4):
        moved = flatten(record.before.state.params).double() - flatten(record.after.state.params).double()
        expected = moved / (num_steps * case.training.lr * server_lr)
        c = flatten(record.after.state.control).double()
        assert (c - expected).norm() <= (1e-5 if dtype == torch.float32 else 1e-13) * c.norm()


def test_a_single_client_does_sgd():
    """With N = 1 both variates are the same bits, and the correction is exactly zero in all rounds."""
    for dtype in (torch.float32, torch.float64):
        case = ragged(dtype, sizes=(0, 20, 0))
        assert equal_bits(final(case.run(Scaffold(), rounds=5)), final(case.run(FedAvg(), rounds=5)))


@pytest.mark.parametrize("option", ["I", "II"])
def test_converges_to_the_optimum_of_all_where_fedavg_does_not(option):
    """What the method is for: several local steps on unlike clients, and yet the right stationary point."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        linear = nn.Linear(5, 3).double()
    case = ragged(sizes=(20, 7, 33))._replace(model=linear)
    case = case.changed(lr=0.4, epochs=5, batch_size=None, weight_decay=0.4, rounds=40)

    def slope(method):
        x = final(case.run(method))
        share = references.weights(case, references.members(case))
        gradients = {n: references.gradient(case, x, case.clients[n]) for n in share}
        return max(float((sum(share[n] * gradients[n][k] for n in share) + 0.4 * x[k]).abs().max()) for k in x)

    assert slope(Scaffold(option=option)) < 1e-10
    assert slope(FedAvg()) > 1e-4


def test_memory_survives_rounds_without_participation():
    case = ragged()
    records = case.run(Scaffold(), rounds=8, cohort=1)
    absences = 0
    for record in records:
        before, after = record.before.state.clients, record.after.state.clients
        for n in range(len(case.clients)):
            same = equal_bits(before[n], after[n])
            assert same == (n not in record.cohort.members)
            absences += same and float(flatten(before[n]).abs().sum()) > 0
    assert absences > 0  # some client was remembered through a round in which it did not take part
    assert not flatten(records[-1].after.state.clients[2]).any()  # the empty client


def test_option_1_is_the_gradient_at_the_servers_model():
    case = ragged()
    for record in case.run(Scaffold(option="I")):
        for n in record.cohort.members:
            expected = references.gradient(case, record.before.state.params, case.clients[n])
            assert largest_difference(record.after.state.clients[n], expected) < 1e-12


def test_option_1_costs_one_pass_more():
    case = ragged()
    cost = {option: case.run(Scaffold(option=option), rounds=1)[0].gradient_evaluations for option in ("I", "II")}
    samples = sum(len(indices) for indices in case.clients)
    assert cost == {"I": (2 + 1) * samples, "II": 2 * samples}


@pytest.mark.parametrize("option", ["I", "II"])
def test_traffic_is_two_models_each_way(option):
    case = ragged()
    for record in case.run(Scaffold(option=option), fraction=0.5):
        exact = 2 * 4 * case.task().num_params * len(record.cohort.members)
        assert (record.bytes_down, record.bytes_up) == (exact, exact)


def test_learning_rate_zero_leaves_everything():
    case = ragged()
    records = case.run(Scaffold(), lr=0.0)
    assert equal_bits(final(records), records[0].before.state.params)
    assert not flatten(records[-1].after.state.control).any()


def test_niid_bench_starts_all_variates_at_one_random_network():
    case = ragged()
    state = case.run(Scaffold(niid_bench_init=True), rounds=1)[0].before.state
    for name, weights in state.params.items():
        assert torch.equal(state.control[name].flatten().sort().values, weights.flatten().sort().values)
    assert largest_difference(state.control, state.params) > 0.1
    for n in range(len(case.clients)):
        assert equal_bits(state.clients[n], state.control)
    again, other = (case.run(Scaffold(niid_bench_init=True), rounds=1, seed=s)[0].before.state for s in (0, 1))
    assert equal_bits(again.control, state.control)
    assert largest_difference(other.control, state.control) > 0.1


def test_niid_bench_init_acts_only_on_partial_participation():
    """All variates start equal, and the first report of a client replaces its own."""
    case, emulation = ragged(), Scaffold(niid_bench_init=True)
    assert largest_difference(final(case.run(emulation, rounds=4)), final(case.run(Scaffold(), rounds=4))) < 1e-12
    records = case.run(emulation, fraction=0.5, rounds=4)
    assert largest_difference(final(records), final(case.run(Scaffold(), fraction=0.5, rounds=4))) > 1e-3
    start = records[0].before.state.control
    assert_matches(case, records, run_by_hand(case, references.cohorts(records), start=start))


def test_diagnostics():
    case, method = ragged(), Scaffold()
    first, second = case.run(method, rounds=2)
    numbers = [method.diagnose(r.before.state, r.cohort, r.reports, r.after.state) for r in (first, second)]
    assert numbers[0]["correction_norm"] == [0.0] * 4
    state = second.before.state
    expected = [float((flatten(state.control) - flatten(state.clients[n])).norm()) for n in second.cohort.members]
    assert numbers[1]["correction_norm"] == pytest.approx(expected, rel=1e-12)
    assert numbers[0]["control_norm"] == pytest.approx(float(flatten(state.control).norm()), rel=1e-12)


@pytest.mark.parametrize(("setting", "value"), [("momentum", 0.9), ("clip_norm", 1.0)])
def test_refuses_what_spoils_the_variates(setting, value):
    with pytest.raises(UserError, match=rf"expected training\.{setting} .*, got {value}; set --training\.{setting} "):
        ragged().run(Scaffold(), **{setting: value})


@pytest.mark.parametrize("server_lr", [0.0, -1.0, float("inf"), float("nan")])
def test_refuses_an_impossible_step(server_lr):
    with pytest.raises(UserError, match="server_lr must be finite and > 0"):
        Scaffold(server_lr=server_lr)


def test_settings_from_the_command_line():
    method = configure({"method": "scaffold", "method.option": "I", "method.niid_bench_init": "true"}).method
    assert method == Scaffold(option="I", niid_bench_init=True)
    with pytest.raises(UserError, match="one of I, II, got III"):
        configure({"method": "scaffold", "method.option": "III"})
