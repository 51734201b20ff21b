"""FedNova against brute force, and what its normalisation must do."""

import pytest
import torch

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fednova import FedNova, Report, State, solver_norm
from fl_lightning.params import average, flatten
from fl_lightning.runs.config.run_config import configure
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, ragged

SETTINGS = {
    "full": {},
    "momentum": {"momentum": 0.9},
    "partial": {"fraction": 0.5, "rounds": 5},
    "uniform": {"weighting": "uniform"},
    "stragglers": {"straggler_fraction": 0.5, "epochs": 4},
    "decay and clipping": {"weight_decay": 0.01, "clip_norm": 0.3, "momentum": 0.5, "lr_decay": 0.5},
    "full batches": {"batch_size": None},
    "schedule": {"schedule": "cosine", "warmup": 1},
}
METHODS = {
    "mean": FedNova(),
    "min": FedNova(tau_eff="min"),
    "number": FedNova(tau_eff=2.5),
    "proximal": FedNova(mu=0.5),
    "overshooting proximal": FedNova(mu=15.0),  # lr * mu > 1
    "server momentum": FedNova(server_momentum=0.9),
}


def impulse_norm(rates, momentum, mu):
    """|a|_1 without any formula: push a solver that stands still by one unit gradient, and see how far it moves."""
    total = 0.0
    for t in range(len(rates)):
        y = velocity = 0.0
        for step, rate in enumerate(rates):
            velocity = momentum * velocity + float(step == t) + mu * y
            y -= rate * velocity
        total += abs(y)
    return total


def run_by_hand(case, method, cohorts):
    """Plain loops: the model after every round. `cohorts` gives the clients of every round with their epochs."""
    training = case.training
    x = references.initial(case)
    u = {k: torch.zeros_like(v) for k, v in x.items()}
    history = []
    for number, cohort in enumerate(cohorts, start=1):
        lr = training.lr * training.lr_decay ** (number - 1)
        size = {n: len(case.clients[n]) if case.federation.weighting == "samples" else 1 for n in cohort}
        p = {n: size[n] / sum(size.values()) for n in cohort}
        direction, norms = {}, {}
        for n, epochs in cohort.items():
            y, velocity = dict(x), {k: torch.zeros_like(v) for k, v in x.items()}
            batches = references.batches(case, n, number, epochs)
            rates = [lr * training.factor(step, len(batches)) for step in range(len(batches))]
            for batch, rate in zip(batches, rates, strict=True):
                g = references.gradient(case, y, batch)
                g = {k: g[k] + method.mu * (y[k] - x[k]) for k in g}
                if training.clip_norm is not None:
                    norm = float(flatten(g).norm())
                    g = {k: v * min(1.0, training.clip_norm / (norm + 1e-6)) for k, v in g.items()}
                for k in y:
                    velocity[k] = training.momentum * velocity[k] + g[k] + training.weight_decay * y[k]
                    y[k] = y[k] - rate * velocity[k]
            norms[n] = impulse_norm(rates, training.momentum, method.mu) / lr
            direction[n] = {k: (x[k] - y[k]) / norms[n] for k in x}
        tau = {"mean": sum(p[n] * norms[n] for n in cohort), "min": min(norms.values())}.get(
            method.tau_eff, method.tau_eff
        )
        step = {k: tau * sum(p[n] * direction[n][k] for n in cohort) for k in x}
        u = {k: method.server_momentum * u[k] + step[k] / lr for k in x}
        x = {k: x[k] - lr * u[k] for k in x}
        history.append(x)
    return history


def diagnose(method, record):
    return method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", METHODS)
def test_matches_brute_force(name, setting):
    case, method = ragged().changed(**SETTINGS[setting]), METHODS[name]
    if method.mu and case.training.momentum:
        case = case.changed(momentum=0.0)
    records = case.run(method)
    for record, x in zip(records, run_by_hand(case, method, references.cohorts(records)), strict=True):
        assert largest_difference(record.after.state.params, x) < 1e-12


@pytest.mark.parametrize("engine", [Functional(chunk=8), Lightning()], ids=["vmap", "lightning"])
@pytest.mark.parametrize("changes", [{"mu": 0.5}, {"mu": 0.0}], ids=["proximal", "momentum"])
def test_matches_brute_force_on_every_engine(changes, engine):
    case, method = ragged().changed(momentum=0.0 if changes["mu"] else 0.9), FedNova(**changes)
    records = case.run(method, engine)
    assert largest_difference(final(records), run_by_hand(case, method, references.cohorts(records))[-1]) < 1e-12


@pytest.mark.parametrize("num_steps", [1, 2, 3, 17])
@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.0), (0.0, 0.3), (0.0, 10.0), (0.0, 15.0)])
def test_normaliser_is_the_l1_norm_of_the_solvers_weights(momentum, mu, num_steps):
    """Also where lr * mu > 1 and the weights alternate in sign; and the closed forms of the docstring."""
    lr = 0.1
    norm = solver_norm([1.0] * num_steps, momentum, lr * mu)
    assert norm == pytest.approx(impulse_norm([lr] * num_steps, momentum, mu) / lr, rel=1e-12)
    if lr * mu <= 1:
        closed = num_steps if not mu else (1 - (1 - lr * mu) ** num_steps) / (lr * mu)
        if momentum:
            closed = (num_steps - momentum * (1 - momentum**num_steps) / (1 - momentum)) / (1 - momentum)
        assert norm == pytest.approx(closed, rel=1e-12)


def test_clients_report_what_their_solver_did():
    case = ragged()
    steps = {n: 2 * -(-len(case.clients[n]) // 8) for n in references.members(case)}
    plain, momentum = (case.run(FedNova(), rounds=1, momentum=m)[0] for m in (0.0, 0.9))
    proximal = case.run(FedNova(mu=0.5), lr_decay=0.5, rounds=2)[1]  # the lr of the round: 0.1 * 0.5
    assert [float(r.norm) for r in plain.reports] == list(steps.values())
    for n, a, b in zip(steps, momentum.reports, proximal.reports, strict=True):
        assert float(a.norm) == pytest.approx(impulse_norm([0.1] * steps[n], 0.9, 0.0) / 0.1, rel=1e-12)
        assert float(b.norm) == pytest.approx(impulse_norm([0.05] * steps[n], 0.0, 0.5) / 0.05, rel=1e-12)


def test_two_clients_by_hand():
    """T = (1, 3), p = (1/4, 3/4): tau_eff = 10/4, both effective weights are 5/8."""
    cohort = ragged(sizes=(1, 3)).run(FedAvg(), rounds=1)[0].cohort
    assert cohort.weights == (0.25, 0.75)

    def aggregate(method):
        def report(y, norm):
            return Report({"w": torch.tensor([y])}, torch.tensor(norm, dtype=torch.float64))

        state = State({"w": torch.tensor([1.0])}, {})
        reports = [report(3.0, 1.0), report(5.0, 3.0)]
        after = method.aggregate(state, cohort, reports)
        return float(after.params["w"]), method.diagnose(state, cohort, reports, after)

    moved, numbers = aggregate(FedNova())
    assert moved == 1 + 5 / 8 * 2 + 5 / 8 * 4
    assert numbers == {"tau_eff": 2.5, "effective_weight_sum": 1.25, "effective_weight": [0.625, 0.625]}
    moved, numbers = aggregate(FedNova(tau_eff="min"))  # weights 1/4 and 1/4
    assert moved == 1 + 2 / 4 + 4 / 4
    assert numbers == {"tau_eff": 1.0, "effective_weight_sum": 0.5, "effective_weight": [0.25, 0.25]}
    assert aggregate(FedNova(tau_eff=4.0))[0] == 1 + 2 + 4  # weights 1 and 1


@pytest.mark.parametrize("tau_eff", ["mean", "min"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_steps_are_fedavg(dtype, momentum, tau_eff):
    case, rounds = ragged(dtype, sizes=(16, 13, 10)), 3  # two batches of at most 8 each, unequal weights
    mine, fedavg = (case.run(m, momentum=momentum, rounds=rounds) for m in (FedNova(tau_eff=tau_eff), FedAvg()))
    for a, b in zip(mine, fedavg, strict=True):
        torch.testing.assert_close(a.after.state.params, b.after.state.params, rtol=1e-6, atol=1e-7)
        assert diagnose(FedNova(tau_eff=tau_eff), a)["effective_weight_sum"] == pytest.approx(1, abs=1e-12)


def test_equal_proximal_steps_are_plainly_averaged():
    """The published code would take a longer step here, sum_n p_n T_n / |a|_1 > 1."""
    record = ragged(sizes=(16, 13, 10)).run(FedNova(mu=0.5), rounds=1)[0]
    models = [result.local.params for result in record.clients]
    mean = average(record.before.state.params, models, record.cohort.weights)
    assert largest_difference(record.after.state.params, mean) < 1e-14


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9}, {"fraction": 0.5}, {"weighting": "uniform"}])
def test_effective_weights_sum_to_more_than_one_for_unequal_clients(changes):
    method, sums = FedNova(), []
    for record in ragged().run(method, **changes, rounds=4):
        numbers = diagnose(method, record)
        sums.append(numbers["effective_weight_sum"])
        assert sum(numbers["effective_weight"]) == pytest.approx(sums[-1], abs=1e-12)
        norms = [float(report.norm) for report in record.reports]
        assert (sums[-1] > 1 + 1e-3) == (max(norms) > min(norms))
        assert sums[-1] > 1 - 1e-12
        assert min(norms) <= numbers["tau_eff"] <= max(norms)
        assert diagnose(FedNova(tau_eff="min"), record)["effective_weight_sum"] < 1 + 1e-12
    assert max(sums) > 1.01


@pytest.mark.parametrize("solver", ["plain", "momentum", "proximal"])
def test_small_steps_follow_the_gradient_of_all(solver):
    """What the method is for: with unequal steps, FedAvg descends another objective than sum_n p_n L_n."""
    case = ragged(sizes=(40, 8, 16))  # whole batches of 8
    training = {"lr": 1e-7, "momentum": 0.9 if solver == "momentum" else 0.0, "rounds": 1}
    start = references.initial(case)
    share = references.weights(case, references.members(case))
    gradients = {n: flatten(references.gradient(case, start, case.clients[n])) for n in share}
    downhill = -sum(share[n] * gradients[n] for n in share)

    def cosine(method):
        step = flatten(final(case.run(method, **training))) - flatten(start)
        return float(torch.nn.functional.cosine_similarity(step, downhill, dim=0))

    assert cosine(FedAvg()) < 0.99
    # Momentum weighs the gradients of the batches of an epoch unequally, so it meets the mean only nearly.
    assert cosine(FedNova(mu=0.5 if solver == "proximal" else 0.0)) > (0.99 if solver == "momentum" else 1 - 1e-9)


@pytest.mark.parametrize("tau_eff", ["mean", "min"])
def test_a_single_client_is_taken_as_it_is(tau_eff):
    case = ragged(torch.float32, sizes=(0, 20, 0))
    assert equal_bits(final(case.run(FedNova(tau_eff=tau_eff))), final(case.run(FedAvg())))


def test_a_number_for_tau_eff_also_scales_a_single_client():
    case = ragged(sizes=(0, 20, 0))  # 6 steps
    record = case.run(FedNova(tau_eff=3.0), rounds=1)[0]
    halfway = average(record.before.state.params, [record.clients[0].local.params], [1.0], rate=0.5)
    assert largest_difference(record.after.state.params, halfway) < 1e-15


def test_proximal_term_acts_after_the_first_step_only():
    case = ragged(sizes=(8, 5, 3))
    plain, strong = (final(case.run(FedNova(mu=mu), batch_size=None, epochs=1)) for mu in (0.0, 1.0))
    assert equal_bits(plain, strong)
    first, second = (case.run(FedNova(mu=mu), rounds=1)[0].clients[0].local.params for mu in (0.0, 1.0))
    assert largest_difference(first, second) > 1e-4


def test_whole_numbers_are_numbers():
    case = ragged()
    assert equal_bits(final(case.run(FedNova(tau_eff=2, mu=1))), final(case.run(FedNova(tau_eff=2.0, mu=1.0))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_server_momentum_starts_in_round_2(dtype):
    case = ragged(dtype)
    plain, heavy = (case.run(FedNova(server_momentum=g), rounds=2) for g in (0.0, 0.9))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    assert largest_difference(plain[0].after.state.params, heavy[0].after.state.params) < tolerance
    assert largest_difference(plain[1].after.state.params, heavy[1].after.state.params) > 1e-3
    assert plain[1].after.state.velocity == {}


def test_learning_rate_zero_leaves_the_model():
    for method in METHODS.values():
        records = ragged().run(method, lr=0.0)
        assert equal_bits(final(records), records[0].before.state.params)


@pytest.mark.parametrize("name", METHODS)
def test_traffic_is_one_model_each_way_and_one_number(name):
    case = ragged()
    size = case.task().num_params
    for record in case.run(METHODS[name], fraction=0.5):
        number = len(record.cohort.members)
        assert (record.bytes_down, record.bytes_up) == (4 * size * number, 4 * (size + 1) * number)


def test_refuses_the_proximal_term_with_momentum():
    with pytest.raises(UserError, match=r"method\.mu 0\.1 and training\.momentum 0\.9; set --method\.mu 0 or"):
        ragged().run(FedNova(mu=0.1), momentum=0.9)


@pytest.mark.parametrize(
    "fields",
    [
        {"tau_eff": "max"},
        {"tau_eff": 0.0},
        {"tau_eff": float("inf")},
        {"tau_eff": float("nan")},
        {"mu": -1.0},
        {"mu": float("inf")},
        {"server_momentum": 1.0},
        {"server_momentum": -0.1},
    ],
)
def test_refuses_impossible_settings(fields):
    with pytest.raises(UserError, match=rf"method\.{next(iter(fields))} must .*, got"):
        FedNova(**fields)


@pytest.mark.parametrize("value", ["mean", "min", 2.5, 3])
def test_tau_eff_from_the_command_line(value):
    config = configure({"method": "fednova", "method.tau_eff": value})
    assert config.method == FedNova(tau_eff=value)
    assert configure(config.flat()) == config


def test_a_wrong_tau_eff_is_explained():
    with pytest.raises(UserError, match=r"method\.tau_eff must be one of mean, min or a number, got max"):
        configure({"method": "fednova", "method.tau_eff": "max"})
