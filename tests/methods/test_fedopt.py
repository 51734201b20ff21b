"""FedOpt against plain loops, numbers worked out by hand, and its degenerate cases; and its presets."""

import math
from functools import cache

import pytest
import torch

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedopt import FedOpt, Report, State
from fl_lightning.methods.presets import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fl_lightning.params import flatten
from fl_lightning.runs.config.run_config import configure
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, ragged

ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=8), "lightning": Lightning()}
OPTIMISERS = ("sgd", "adagrad", "adam", "yogi")
SETTINGS = {
    "full": {},
    "partial": {"fraction": 0.5, "rounds": 5},
    "uniform": {"weighting": "uniform"},
    "stragglers": {"straggler_fraction": 0.5, "epochs": 4},
    "decays": {"weight_decay": 0.01, "lr_decay": 0.5},
}


def run_by_hand(case, cohorts, optimiser, eta, beta1, beta2, tau, start="tau_squared", correct=False):
    """x after every round, weight by weight in plain Python; `cohorts` has the epochs of every member by round."""
    x = references.initial(case)
    shapes = {k: v.shape for k, v in x.items()}
    size = sum(v.numel() for v in x.values())
    m, v = [0.0] * size, [tau * tau if start == "tau_squared" else 0.0] * size
    history = []
    for number, cohort in enumerate(cohorts, start=1):
        lr = case.training.lr * case.training.lr_decay ** (number - 1)
        by_samples = case.federation.weighting == "samples"
        amount = {n: len(case.clients[n]) if by_samples else 1 for n in cohort}
        moved = torch.zeros(size, dtype=torch.float64)
        for n, epochs in cohort.items():
            y = dict(x)
            for batch in references.batches(case, n, number, epochs):
                g = references.gradient(case, y, batch)
                y = {k: y[k] - lr * (g[k] + case.training.weight_decay * y[k]) for k in y}
            moved += amount[n] / sum(amount.values()) * (flatten(y) - flatten(x))
        weights = flatten(x).tolist()
        for i, d in enumerate(moved.tolist()):
            if optimiser == "sgd":
                m[i] = beta1 * m[i] + d
                weights[i] += eta * m[i]
                continue
            m[i] = beta1 * m[i] + (1 - beta1) * d
            if optimiser == "adagrad":
                v[i] += d**2
            elif optimiser == "adam":
                v[i] = beta2 * v[i] + (1 - beta2) * d**2
            elif v[i] > d**2:
                v[i] -= (1 - beta2) * d**2
            elif v[i] < d**2:
                v[i] += (1 - beta2) * d**2
            mean, square = m[i], v[i]
            if correct:
                mean, square = mean / (1 - beta1**number), square / (1 - beta2**number)
            weights[i] += eta * mean / (math.sqrt(square) + tau)
        parts = torch.tensor(weights, dtype=torch.float64).split([s.numel() for s in shapes.values()])
        x = {k: part.view(shape) for (k, shape), part in zip(shapes.items(), parts, strict=True)}
        history.append(x)
    return history


def assert_matches(case, method, records):
    numbers = (method.server_lr, method.server_momentum, method.beta2, method.tau)
    choices = (method.second_moment, method.bias_correction)
    history = run_by_hand(case, references.cohorts(records), method.optimiser, *numbers, *choices)
    for record, x in zip(records, history, strict=True):
        assert largest_difference(record.after.state.params, x) < 1e-12


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_matches_brute_force(optimiser, setting):
    case = ragged().changed(**SETTINGS[setting])
    for momentum in (0.9, 0.0):
        method = FedOpt(optimiser=optimiser, server_lr=0.05, server_momentum=momentum, beta2=0.7, tau=0.02)
        assert_matches(case, method, case.run(method))


@pytest.mark.parametrize("engine", ["vmap", "lightning"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_matches_brute_force_on_every_engine(optimiser, engine):
    case, method = ragged(), FedOpt(optimiser=optimiser, server_lr=0.1, tau=0.01)
    assert_matches(case, method, case.run(method, ENGINES[engine], fraction=0.75))


@pytest.mark.parametrize("optimiser", ["adam", "yogi"])
@pytest.mark.parametrize("second_moment", ["tau_squared", "zero"])
def test_keras_start_and_correction(optimiser, second_moment):
    case = ragged()
    for correct in (True, False):
        method = FedOpt(optimiser, second_moment=second_moment, bias_correction=correct, tau=0.01)
        assert_matches(case, method, case.run(method))


@cache
def some_cohort():
    return ragged().run(FedAvg(), rounds=1)[0].cohort


def step(method, x, updates, weights=None, state=None, number=1):
    """The server's state after one round whose clients moved by these amounts, each a single weight."""
    cohort = some_cohort()
    weights = weights or [1 / len(updates)] * len(updates)
    cohort = cohort._replace(round=number, weights=tuple(weights), members=tuple(range(len(updates))))
    state = state or method.init({"w": torch.tensor([x], dtype=torch.float64)}, 2)
    reports = [Report({"w": state.params["w"] + update}) for update in updates]
    return method.aggregate(state, cohort, reports)


@pytest.mark.parametrize(
    ("method", "m", "v", "x"),
    [
        # Delta = 0.25 * 2 + 0.75 * 4 = 3.5 from x = 1, with beta_1 = 0.5, beta_2 = 0.75, tau = 0.5, eta_s = 0.1.
        (FedOpt("sgd", 0.1, 0.5), -3.5, None, 1 + 0.1 * 3.5),
        (FedOpt("adagrad", 0.1, 0.5, tau=0.5), 1.75, 12.5, 1 + 0.1 * 1.75 / (math.sqrt(12.5) + 0.5)),
        (FedOpt("adam", 0.1, 0.5, 0.75, 0.5), 1.75, 3.25, 1 + 0.1 * 1.75 / (math.sqrt(3.25) + 0.5)),
        (FedOpt("yogi", 0.1, 0.5, 0.75, 0.5), 1.75, 3.3125, 1 + 0.1 * 1.75 / (math.sqrt(3.3125) + 0.5)),
        (FedOpt("adam", 0.1, 0.5, 0.75, 0.5, "zero"), 1.75, 3.0625, 1 + 0.1 * 1.75 / (math.sqrt(3.0625) + 0.5)),
        (FedOpt("adam", 0.1, 0.5, 0.75, 0.5, "zero", True), 1.75, 3.0625, 1 + 0.1 * 3.5 / (math.sqrt(12.25) + 0.5)),
    ],
    ids=["sgd", "adagrad", "adam", "yogi", "from zero", "corrected"],
)
def test_a_round_by_hand(method, m, v, x):
    state = step(method, 1.0, [2.0, 4.0], [0.25, 0.75])
    assert float(state.velocity["w"]) == pytest.approx(m, rel=1e-15)
    assert float(state.params["w"]) == pytest.approx(x, rel=1e-15)
    assert state.squares == {} if v is None else float(state.squares["w"]) == pytest.approx(v, rel=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("engine", ENGINES)
def test_plain_sgd_is_fedavg_bit_for_bit(engine, setting, dtype):
    case, method = ragged(dtype), FedOpt(optimiser="sgd", server_lr=1.0, server_momentum=0.0)
    mine, fedavg = (case.run(m, ENGINES[engine], **SETTINGS[setting]) for m in (method, FedAvg(stragglers="keep")))
    for a, b in zip(mine, fedavg, strict=True):
        assert equal_bits(a.after.state.params, b.after.state.params)


@pytest.mark.parametrize("optimiser", ["adagrad", "adam", "yogi"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_adaptivity_they_are_momentum(optimiser, momentum):
    """Where tau exceeds every update by far, eta_s = tau leaves the step eta_s m / tau = m."""
    case, tau = ragged(), 1e8
    blunt = FedOpt(optimiser, tau, momentum, tau=tau, second_moment="zero")
    plain = FedOpt("sgd", 1 - momentum, momentum)  # its velocity is the sum that m is the mean of
    assert largest_difference(final(case.run(blunt)), final(case.run(plain))) < 1e-6
    if not momentum:
        assert largest_difference(final(case.run(blunt)), final(case.run(FedAvg()))) < 1e-6


def test_yogi_is_adam_where_the_square_is_what_it_was():
    for method in (FedAdam(tau=0.5), FedYogi(tau=0.5)):
        state = step(method, 1.0, [0.5])
        assert float(state.squares["w"]) == 0.25
    adam, yogi = (step(method, 1.0, [0.5]) for method in (FedAdam(tau=0.5), FedYogi(tau=0.5)))
    assert equal_bits(adam.params, yogi.params)


def test_yogi_forgets_slowly():
    """After one large update Adam's mean square falls by a share of itself, Yogi's by one of the small updates."""
    adam, yogi = ((step(m, 0.0, [10.0]), m) for m in (FedAdam(beta2=0.5), FedYogi(beta2=0.5)))
    small = [step(m, 0.0, [0.1], state=state, number=2).squares["w"] for state, m in (adam, yogi)]
    assert float(small[0]) == pytest.approx(25.005, rel=1e-4)
    assert float(small[1]) == pytest.approx(50 - 0.005, rel=1e-4)


@pytest.mark.parametrize("method", [FedOpt(optimiser=o) for o in OPTIMISERS], ids=OPTIMISERS)
def test_without_update_the_server_rests(method):
    state = step(method, 1.0, [2.0, -2.0])
    assert float(state.params["w"]) == 1.0
    assert not state.velocity["w"].any()


@pytest.mark.parametrize("optimiser", ["adagrad", "adam", "yogi"])
def test_mean_squares_are_never_negative(optimiser):
    method = FedOpt(optimiser=optimiser, beta2=0.0, second_moment="zero")
    stream, state = torch.Generator().manual_seed(0), None
    for number in range(1, 200):
        scale = 10 ** float(4 * torch.rand((), generator=stream) - 3)
        state = step(method, 0.0, [scale * float(torch.randn((), generator=stream))], state=state, number=number)
        assert float(state.squares["w"]) >= 0
        assert bool(state.params["w"].isfinite().all())


def test_adam_squares_updates_and_not_their_mean():
    """FedExP's code squares the momentum: after updates of equal size and opposite sign that is nearly nothing."""
    method, state = FedAdam(second_moment="zero"), None
    for number, update in enumerate((1.0, -1.0), start=1):
        state = step(method, 0.0, [update], state=state, number=number)
    assert float(state.squares["w"]) == pytest.approx(1 - 0.99**2, rel=1e-12)


def test_adaptive_steps_do_not_depend_on_the_scale_of_updates():
    """With v from zero, c times larger updates and tau leave the step what it was."""
    for optimiser in ("adagrad", "adam", "yogi"):
        ends = []
        for scale in (1.0, 128.0):
            method = FedOpt(optimiser, tau=1e-3 * scale, second_moment="zero")
            state = step(method, 1.0, [2.0 * scale, 3.0 * scale])
            ends.append(float(step(method, 1.0, [-1.0 * scale, 3.0 * scale], state=state, number=2).params["w"]))
        assert ends[0] == pytest.approx(ends[1], rel=1e-13)


def test_momentum_is_the_one_of_fednova():
    """Equal steps: FedNova's mean is FedAvg's, and both servers add up the same velocity."""
    case = ragged(sizes=(16, 16, 16))
    mine, nova = case.run(FedAvgM(), rounds=4), case.run(FedNova(server_momentum=0.9), rounds=4)
    assert largest_difference(final(mine), final(nova)) < 1e-13


@pytest.mark.parametrize(
    ("named", "made_of"),
    [
        (FedAvgM(), FedOpt("sgd", 1.0)),
        (FedAdagrad(), FedOpt("adagrad", server_momentum=0.0)),
        (FedAdam(), FedOpt("adam")),
        (FedYogi(), FedOpt("yogi")),
    ],
    ids=lambda method: type(method).__name__,
)
def test_named_settings_are_what_they_say(named, made_of):
    case = ragged().changed(fraction=0.5)
    assert equal_bits(final(case.run(named)), final(case.run(made_of)))


def test_traffic_is_one_model_each_way():
    case = ragged()
    for record in case.run(FedAdam(), fraction=0.5):
        assert record.bytes_down == record.bytes_up == 4 * case.task().num_params * len(record.cohort.members)


def test_diagnostics():
    case, method = ragged(), FedAvgM(server_lr=0.7, server_momentum=0.0)
    record = case.run(method, rounds=1)[0]
    numbers = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    start = flatten(record.before.state.params)
    moved = sum(w * (flatten(r.params) - start) for w, r in zip(record.cohort.weights, record.reports, strict=True))
    assert numbers["update_norm"] == pytest.approx(float(moved.norm()), rel=1e-12)
    assert numbers["server_step"] == pytest.approx(0.7, rel=1e-12)
    rest = State(record.before.state.params, {}, {})
    still = [Report(record.before.state.params) for _ in record.reports]
    assert method.diagnose(rest, record.cohort, still, rest) == {"update_norm": 0.0, "server_step": 0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_lr": 0.0}, "server_lr must be finite and > 0"),
        ({"server_lr": float("nan")}, "server_lr must be finite and > 0"),
        ({"server_momentum": 1.0}, r"server_momentum must be in \[0, 1\)"),
        ({"beta2": -0.1}, r"beta2 must be in \[0, 1\)"),
        ({"tau": 0.0}, "tau must be finite and > 0"),
        ({"optimiser": "sgd", "bias_correction": True}, "bias_correction is for --method.optimiser adam or yogi"),
    ],
)
def test_refuses_what_cannot_be(options, message):
    with pytest.raises(UserError, match=message):
        FedOpt(**options)


def test_settings_from_the_command_line():
    assert configure({"method": "fedadam", "method.server_lr": 0.1}).method == FedAdam(server_lr=0.1)
    assert configure({"method": "fedopt", "method.optimiser": "yogi"}).method == FedOpt(optimiser="yogi")
    with pytest.raises(UserError, match=r"method\.optimiser must be adam, got yogi"):
        configure({"method": "fedadam", "method.optimiser": "yogi"})
