"""FedExP against a plain loop, and the steps that its formula promises."""

import pytest
import torch

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedexp import FedExP, Report
from fl_lightning.params import flatten
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, ragged

ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=8), "lightning": Lightning()}
SETTINGS = {
    "full": {},
    "partial": {"fraction": 0.5, "rounds": 5},
    "uniform": {"weighting": "uniform"},
    "stragglers": {"straggler_fraction": 0.5, "epochs": 4},
    "decays": {"weight_decay": 0.01, "lr_decay": 0.5},
}


def unlike():
    """Clients of different classes: they pull apart, and the step is long."""
    case = ragged()
    order = case.dataset.train_y.argsort(stable=True)
    return case._replace(clients=list(order[: sum(map(len, case.clients))].split([len(c) for c in case.clients])))


def run_by_hand(case, cohorts, epsilon):
    """The server's models and its step sizes, round by round."""
    x, models, steps = references.initial(case), [], []
    for number, cohort in enumerate(cohorts, start=1):
        decay = case.training.lr_decay ** (number - 1)
        moves = {}
        for n, epochs in cohort.items():
            y = dict(x)
            for batch in references.batches(case, n, number, epochs):
                g = references.gradient(case, y, batch)
                y = {k: y[k] - case.training.lr * decay * (g[k] + case.training.weight_decay * y[k]) for k in y}
            moves[n] = {k: y[k] - x[k] for k in x}
        amount = {n: len(case.clients[n]) if case.federation.weighting == "samples" else 1 for n in cohort}
        share = {n: amount[n] / sum(amount.values()) for n in cohort}
        mean = {k: sum(share[n] * moves[n][k] for n in cohort) for k in x}
        apart = sum(share[n] * sum(float((v**2).sum()) for v in moves[n].values()) for n in cohort)
        together = sum(float((v**2).sum()) for v in mean.values())
        eta = max(1.0, 0.5 * apart / (together + len(cohort) * epsilon * decay**2))
        x = {k: x[k] + eta * mean[k] for k in x}
        models.append(x)
        steps.append(eta)
    return models, steps


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("engine", ENGINES)
def test_matches_brute_force(engine, setting):
    case = unlike().changed(**SETTINGS[setting])
    for epsilon in (1e-5, 1e-3):
        method = FedExP(epsilon=epsilon)
        records = case.run(method, ENGINES[engine])
        models, steps = run_by_hand(case, references.cohorts(records), epsilon)
        for record, x, eta in zip(records, models, steps, strict=True):
            assert largest_difference(record.after.state.params, x) < 1e-12
            told = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
            assert told["server_step"] == pytest.approx(eta, rel=1e-10)
    assert max(run_by_hand(case, references.cohorts(records), 1e-5)[1]) > 1  # the rule was at work


@pytest.mark.parametrize("engine", ENGINES)
def test_the_mean_of_the_last_two_is_measured_and_not_sent(engine):
    case = ragged().changed(rounds=5, fraction=0.5)
    plain = case.run(FedExP(epsilon=1e-5), ENGINES[engine])
    averaged = case.run(FedExP(epsilon=1e-5, average_last=True), ENGINES[engine])
    assert equal_bits(averaged[0].after.state.params, plain[0].after.state.params)
    for before, now, mine in zip(plain, plain[1:], averaged[1:], strict=False):
        assert equal_bits(mine.after.state.newest, now.after.state.params)
        mean = (flatten(before.after.state.params) + flatten(now.after.state.params)) / 2
        assert torch.allclose(flatten(mine.after.state.params), mean, rtol=1e-14)


def rate(moves, weights=None, epsilon=0.0):
    """The step size for clients that moved by these vectors."""
    cohort = ragged().run(FedAvg(), rounds=1)[0].cohort
    weights = weights or [1 / len(moves)] * len(moves)
    cohort = cohort._replace(weights=tuple(weights), members=tuple(range(len(moves))))
    method = FedExP(epsilon=epsilon)
    state = method.init({"w": torch.zeros(len(moves[0]), dtype=torch.float64)}, len(moves))
    reports = [Report({"w": torch.tensor(move, dtype=torch.float64)}) for move in moves]
    after = method.aggregate(state, cohort, reports)
    told = method.diagnose(state, cohort, reports, after)["server_step"]
    mean = sum(w * torch.tensor(move, dtype=torch.float64) for w, move in zip(weights, moves, strict=True))
    assert torch.allclose(after.params["w"], told * mean, rtol=1e-13)
    return told


@pytest.mark.parametrize("number", [2, 3, 8])
def test_orthogonal_updates_step_half_their_number(number):
    assert rate((3 * torch.eye(number)).tolist()) == pytest.approx(number / 2, rel=1e-13)


def test_numbers_by_hand():
    # Delta = (1, 0); ||Delta||^2 = 1; mean of the squares 0.5 * 10 + 0.5 * 10 = 10.
    assert rate([[1.0, 3.0], [1.0, -3.0]]) == pytest.approx(5.0, rel=1e-15)
    assert rate([[1.0, 3.0], [1.0, -3.0]], epsilon=0.25) == pytest.approx(10 / 3, rel=1e-15)
    # Weighted 3 : 1, Delta = (2, 4) and every square is 68.
    assert rate([[2.0, 8.0], [2.0, -8.0]], [0.75, 0.25]) == pytest.approx(68 / (2 * 20), rel=1e-15)


def test_the_step_is_never_shorter_than_fedavgs():
    assert rate([[2.0, 0.1], [2.0, -0.1]]) == 1.0
    assert rate([[1.0, -1.0], [-1.0, 1.0]], epsilon=1e3) == 1.0


@pytest.mark.parametrize("factor", [1e-3, 7.0, 1e4])
def test_the_step_does_not_depend_on_the_scale_of_updates(factor):
    moves = torch.tensor([[1.0, 3.0], [1.5, -3.0], [0.2, -2.0]])
    assert rate((factor * moves).tolist()) == pytest.approx(rate(moves.tolist()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clients_that_agree_are_fedavg_bit_for_bit(dtype):
    """Three clients with the same samples, each in one batch, move alike."""
    case = ragged(dtype, sizes=(12, 12, 12)).changed(batch_size=None, epochs=3)
    case = case._replace(clients=[case.clients[0]] * 3)
    mine, fedavg = (case.run(method) for method in (FedExP(epsilon=0.0), FedAvg()))
    assert equal_bits(final(mine), final(fedavg))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_single_client_is_fedavg_bit_for_bit(engine):
    case = ragged(sizes=(0, 20, 0))
    assert equal_bits(final(case.run(FedExP(), ENGINES[engine])), final(case.run(FedAvg(), ENGINES[engine])))


def test_updates_that_cancel_without_epsilon_stay_finite():
    assert rate([[0.0, 0.0], [0.0, 0.0]]) == 1.0
    assert ragged().run(FedExP(epsilon=0.0), lr=0.0)[-1].after.state.params is not None


def test_an_update_that_cancels_leaves_the_model():
    method = FedExP()
    state = method.init({"w": torch.ones(1, dtype=torch.float64)}, 2)
    cohort = ragged().run(FedAvg(), rounds=1)[0].cohort._replace(weights=(0.5, 0.5), members=(0, 1))
    reports = [Report({"w": torch.tensor([value], dtype=torch.float64)}) for value in (3.0, -1.0)]
    assert float(method.aggregate(state, cohort, reports).params["w"]) == 1.0


def test_traffic_is_one_model_each_way():
    case = ragged()
    for method in (FedExP(), FedExP(average_last=True)):
        for record in case.run(method, fraction=0.5):
            assert record.bytes_down == record.bytes_up == 4 * case.task().num_params * len(record.cohort.members)


@pytest.mark.parametrize("epsilon", [-1e-3, float("inf"), float("nan")])
def test_refuses_an_impossible_epsilon(epsilon):
    with pytest.raises(UserError, match="epsilon must be finite and >= 0"):
        FedExP(epsilon=epsilon)
