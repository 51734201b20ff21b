"""FOLA against brute force, and the properties (a) to (k) that its mathematics promises."""

import pytest
import torch
from torch.func import functional_call, grad, jacrev

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola, Report, State
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.methods.fola_extended import State as ExtendedState
from fl_lightning.params import flatten, unflatten
from tests.support import references
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged
from tests.support.variants import in_full

PUBLISHED = FolaExtended(
    detached_prior=True,
    normalisation="sum_epochs",
    round_scaling="code",
    damping=1e-5,
    damping_mode="absolute",
    damping_place="denominator",
)


def per_sample_squares(case, theta, batch):
    total = {name: torch.zeros_like(value) for name, value in theta.items()}
    for i in batch:
        slope = references.gradient(case, theta, i.view(1))
        total = {name: total[name] + slope[name] ** 2 / len(batch) for name in total}
    return total


def brute_force(case, method, rounds=3):
    """The equations of methods/fola.py with plain loops; returns mean and precision after every round."""
    method = in_full(method)
    mu = references.initial(case)
    server = {name: torch.zeros_like(value) for name, value in mu.items()}
    members = references.members(case)
    share = references.weights(case, members)
    lr, epochs = case.training.lr, case.training.epochs
    names = list(mu)
    states = []
    for r in range(1, rounds + 1):
        means, precisions = {}, {}
        code = method.round_scaling == "code" and method.curvature == "online"
        strength = method.strength / r if code else method.strength
        if method.detached_prior:
            strength = 0.0
        size = sum(value.numel() for value in mu.values())
        scale = sum(value.sum() for value in server.values()) / size if method.damping_mode == "relative" else 1.0
        extra = method.damping * scale if method.damping_in_prior and r > 1 else 0.0
        for n in members:
            theta, fisher = dict(mu), {name: torch.zeros_like(value) for name, value in mu.items()}
            for batch in references.batches(case, n, r):
                g = references.gradient(case, theta, batch)
                squares = (
                    per_sample_squares(case, theta, batch)
                    if method.fisher == "per_sample"
                    else {name: g[name] ** 2 for name in names}
                )
                weight = 1.0 if method.normalisation == "sum_steps" else len(batch) / len(case.clients[n])
                fisher = {name: fisher[name] + weight * squares[name] for name in names}
                theta = {
                    name: theta[name] - lr * (g[name] + strength * (server[name] + extra) * (theta[name] - mu[name]))
                    for name in names
                }
            if method.normalisation == "mean":
                fisher = {name: fisher[name] / epochs for name in names}
            if method.curvature == "offline":
                precisions[n] = offline_fisher(case, theta, n, method.fisher)
            elif code:
                precisions[n] = {name: fisher[name] + server[name] for name in names}
            else:
                precisions[n] = {name: fisher[name] / r + (r - 1) / r * server[name] for name in names}
            means[n] = theta
        server = {name: sum(share[n] * precisions[n][name] for n in members) for name in names}
        scale = sum(value.sum() for value in server.values()) / size if method.damping_mode == "relative" else 1.0
        gamma = method.damping * scale
        top = gamma if method.damping_place == "both" else 0.0
        if method.aggregation == "average":
            mu = {name: sum(share[n] * means[n][name] for n in members) for name in names}
        else:
            mu = {
                name: sum(share[n] * (precisions[n][name] + top) * means[n][name] for n in members)
                / (server[name] + gamma)
                for name in names
            }
        states.append((mu, server))
    return states


def offline_fisher(case, theta, n, kind):
    indices = case.clients[n]
    if kind == "per_sample":
        return per_sample_squares(case, theta, indices)
    total = {name: torch.zeros_like(value) for name, value in theta.items()}
    for batch in torch.split(indices, case.training.batch_size):
        slope = references.gradient(case, theta, batch)
        total = {name: total[name] + len(batch) / len(indices) * slope[name] ** 2 for name in total}
    return total


VARIANTS = [
    Fola(strength=20),
    Fola(strength=20, aggregation="average"),
    Fola(strength=5, curvature="offline"),
    Fola(strength=5, curvature="offline", fisher="per_sample"),
    Fola(strength=2, fisher="per_sample"),
    FolaExtended(strength=20, damping=1e-3, damping_mode="absolute"),
    FolaExtended(strength=20, damping_place="denominator"),
    FolaExtended(strength=20, damping=0.1, damping_in_prior=True),
    FolaExtended(strength=20, normalisation="sum_epochs"),
    FolaExtended(strength=2, normalisation="sum_steps"),
    FolaExtended(strength=20, round_scaling="code"),
    FolaExtended(strength=20, detached_prior=True),
    PUBLISHED,
]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("method", VARIANTS, ids=str)
def test_equals_brute_force(method, engine):
    case = ragged()
    for record, (mean, precision) in zip(case.run(method, engine), brute_force(case, method), strict=True):
        assert largest_difference(record.after.state.params, mean) < 1e-12
        assert largest_difference(record.after.state.posterior.precision, precision) < 1e-12


def test_a_one_client_keeps_its_model():
    case = ragged()
    case = case._replace(clients=[torch.cat(case.clients)])
    for record in case.run(Fola()):
        assert equal_bits(record.after.state.params, record.clients[0].local.params)


def aggregate(method, means, precisions, weights):
    case = ragged()
    cohort = case.run(FedAvg(), rounds=1)[0].cohort._replace(weights=tuple(weights))
    reports = [Report(Diagonal({"w": m}, {"w": p})) for m, p in zip(means, precisions, strict=True)]
    start = {"w": torch.zeros_like(means[0])}
    before = (State if isinstance(method, Fola) else ExtendedState)(Diagonal(start, start))
    return method.aggregate(before, cohort, reports).params["w"]


def random_posteriors(seed=0, clients=4, size=9):
    stream = torch.Generator().manual_seed(seed)
    means = torch.randn(clients, size, generator=stream, dtype=torch.float64)
    precisions = torch.rand(clients, size, generator=stream, dtype=torch.float64)
    weights = torch.rand(clients, generator=stream, dtype=torch.float64)
    return means, precisions, (weights / weights.sum()).tolist()


def test_b_equal_precisions_are_fedavg():
    means, precisions, weights = random_posteriors()
    mixed = aggregate(Fola(), means, precisions[:1].expand(4, -1), weights)
    assert torch.allclose(mixed, torch.tensor(weights, dtype=torch.float64) @ means, atol=1e-14)


@pytest.mark.parametrize("method", [Fola(damping=0.0), Fola(damping=0.3)])
def test_c_the_scale_of_the_precision_does_not_matter(method):
    means, precisions, weights = random_posteriors()
    once = aggregate(method, means, precisions, weights)
    assert torch.allclose(aggregate(method, means, 1e-6 * precisions, weights), once, atol=1e-13)


def test_d_the_server_lies_between_the_clients():
    for seed in range(20):
        means, precisions, weights = random_posteriors(seed)
        server = aggregate(Fola(), means, precisions, weights)
        assert bool(((server >= means.min(0).values - 1e-14) & (server <= means.max(0).values + 1e-14)).all())
    shrunk = aggregate(FolaExtended(damping=0.5, damping_place="denominator"), means.abs() + 1, precisions, weights)
    assert bool((shrunk < means.abs().min(0).values + 1).any())  # the published code's damping leaves the interval


def test_e_huge_absolute_damping_is_fedavg():
    means, precisions, weights = random_posteriors()
    damped = aggregate(FolaExtended(damping=1e12, damping_mode="absolute"), means, precisions, weights)
    assert torch.allclose(damped, torch.tensor(weights, dtype=torch.float64) @ means, atol=1e-6)


def test_without_any_precision_the_average_is_taken():
    means, precisions, weights = random_posteriors()
    precisions[:, 3] = 0
    server = aggregate(Fola(damping=0.0), means, precisions, weights)
    assert server[3] == pytest.approx(float(torch.tensor(weights, dtype=torch.float64) @ means[:, 3]))
    assert bool(server.isfinite().all())


def test_f_the_precision_is_the_mean_over_rounds():
    case, method = ragged(), Fola(strength=10)
    records = case.run(method)
    fishers = []
    for record in records:
        r = record.round
        recovered = [
            {
                k: r * report.posterior.precision[k] - (r - 1) * record.before.state.posterior.precision[k]
                for k in report.posterior.precision
            }
            for report in record.reports
        ]
        fishers.append(
            {k: sum(w * f[k] for w, f in zip(record.cohort.weights, recovered, strict=True)) for k in recovered[0]}
        )
    unrolled = {k: sum(f[k] for f in fishers) / len(fishers) for k in fishers[0]}
    assert largest_difference(records[-1].after.state.posterior.precision, unrolled) < 1e-14


def test_g_average_without_prior_is_fedavg_to_the_bit():
    case = ragged(dtype=torch.float32)
    off = Fola(aggregation="average", strength=0)
    assert equal_bits(final(case.run(off)), final(case.run(FedAvg())))


@pytest.mark.parametrize("engine", [Functional(chunk=1), Lightning()], ids=["loop", "lightning"])
def test_h_one_local_step_does_not_feel_the_prior(engine):
    case = ragged(dtype=torch.float32)
    weak, strong = (
        final(case.run(Fola(strength=s), engine, epochs=1, batch_size=None, rounds=4)) for s in (0.0, 1000.0)
    )
    assert equal_bits(weak, strong)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_i_the_prior_has_a_gradient(engine):
    """Published code builds the prior loss from detached tensors; then its strength changes nothing."""
    case = ragged()
    free, pulled = final(case.run(Fola(strength=0), engine)), final(case.run(Fola(strength=20), engine))
    assert largest_difference(free, pulled) > 1e-4
    emulated = final(case.run(FolaExtended(strength=20, detached_prior=True), engine))
    assert largest_difference(free, emulated) < 1e-14


def test_the_detached_prior_is_still_reported():
    case = ragged()
    emulated = case.run(FolaExtended(strength=20, detached_prior=True))[-1]
    assert all(result.prior_loss > 0 for result in emulated.clients)


def test_j_paper_and_code_accumulate_the_same_posterior():
    case = ragged()
    paper = case.run(Fola(strength=0, damping=0))
    code = case.run(FolaExtended(strength=0, damping=0, round_scaling="code"))
    for mine, theirs in zip(paper, code, strict=True):
        assert largest_difference(mine.after.state.params, theirs.after.state.params) < 1e-12
        accumulated = {k: mine.round * v for k, v in mine.after.state.posterior.precision.items()}
        assert largest_difference(accumulated, theirs.after.state.posterior.precision) < 1e-14


def test_k_quadratic_clients_are_solved_exactly():
    """Clients with loss 1/2 sum a (theta - c)^2 trained to convergence: the product is the minimiser of the sum."""
    stream = torch.Generator().manual_seed(0)
    curvature = torch.rand(3, 6, generator=stream, dtype=torch.float64) + 0.1
    centre = torch.randn(3, 6, generator=stream, dtype=torch.float64)
    weights = [0.5, 0.3, 0.2]
    share = torch.tensor(weights, dtype=torch.float64)[:, None]
    server = aggregate(Fola(damping=0), centre, curvature, weights)

    def objective(theta):
        return (share * 0.5 * curvature * (theta - centre) ** 2).sum()

    assert grad(objective)(server).abs().max() < 1e-14


def test_offline_fisher_forgets_earlier_rounds():
    case = ragged()
    record = case.run(Fola(curvature="offline", strength=0))[-1]
    for result, report in zip(record.clients, record.reports, strict=True):
        expected = offline_fisher(case, result.local.params, result.local.client, "minibatch")
        assert largest_difference(report.posterior.precision, expected) < 1e-15
    assert record.gradient_evaluations == sum(len(c) for c in case.clients) * 3


def test_the_online_fisher_sees_the_likelihood_alone():
    """Neither prior nor clipping changes the gradient that the Fisher is made of."""
    case = ragged()
    tight = case.run(Fola(strength=0), rounds=1, clip_norm=1e-9)[0]  # the model stays where it is
    for report, result in zip(tight.reports, tight.clients, strict=True):
        total = 0.0
        for batch in references.batches(case, result.local.client, 1):
            slope = references.gradient(case, references.initial(case), batch)
            total = total + len(batch) / len(result.local.data) * flatten(slope) ** 2
        assert torch.allclose(flatten(report.posterior.precision), total / 2, rtol=1e-6)


def test_traffic_is_model_and_precision_each_way():
    case = ragged()
    record = case.run(Fola(), rounds=1)[0]
    assert record.bytes_down == record.bytes_up == 2 * 4 * case.task().num_params * 4


@pytest.mark.parametrize("form", ["diagonal", "full"])
@pytest.mark.parametrize(("mode", "scaling"), [("relative", "paper"), ("absolute", "paper"), ("relative", "code")])
def test_prior_stability_counts_the_damping_of_the_prior(mode, scaling, form):
    """It is the learning rate times the largest eigenvalue of the Hessian of the penalty of the round to come."""
    prior = {"strength": 0.5, "damping": 0.3, "damping_mode": mode, "damping_in_prior": True}
    method = FolaExtended(**prior, round_scaling=scaling, curvature_form=form)
    model = torch.nn.Linear(5, 3).double()
    before, last = ragged()._replace(model=model).run(method, rounds=2)
    penalty = method.penalty(method.broadcast(last.before.state, last.cohort))
    flat = flatten(last.before.state.params)
    curvature = jacrev(jacrev(lambda v: penalty.value(unflatten(v, last.before.state.params))))(flat)
    found = method.diagnose(before.before.state, before.cohort, before.reports, before.after.state)
    assert found["prior_stability"] == pytest.approx(0.1 * float(torch.linalg.eigvalsh(curvature)[-1]), rel=1e-8)


def test_diagnostics():
    case, method = ragged(), Fola(strength=10)
    shifts = []
    for record in case.run(method, rounds=4):
        found = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
        precision = flatten(record.after.state.posterior.precision)
        assert found["precision_max"] == pytest.approx(float(precision.max()))
        assert found["precision_median"] == pytest.approx(float(precision.median()), rel=0.2)
        parts = [
            w * float(flatten(r.posterior.precision).sum())
            for w, r in zip(record.cohort.weights, record.reports, strict=True)
        ]
        assert found["precision_share"] == pytest.approx([part / sum(parts) for part in parts])
        assert found["prior_stability"] == pytest.approx(0.1 * 10 * float(precision.max()))
        gamma = 0.01 * float(precision.mean())
        effective = torch.stack([flatten(r.posterior.precision) + gamma for r in record.reports])
        share = torch.tensor(record.cohort.weights, dtype=torch.float64)[:, None]
        effective = share * effective / (share * effective).sum(0)
        shifts.append(found["weight_shift"])
        assert found["weight_shift"] == pytest.approx(float((effective - share).abs().sum(0).mean()), rel=1e-9)
        averaged = Fola(aggregation="average").diagnose(None, record.cohort, record.reports, record.after.state)
        assert averaged["weight_shift"] == 0
    assert shifts[-1] < shifts[0]  # the product rule fades into the average


@pytest.mark.parametrize(
    ("field", "value"), [("strength", -1.0), ("damping", float("nan")), ("strength", float("inf"))]
)
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(UserError, match=f"method.{field} must be"):
        Fola(**{field: value})


def test_the_reference_gradient_is_the_model_s():
    """The brute force would be worthless if it took the gradient of something else."""
    case = ragged()
    theta = references.initial(case)
    x, y = case.dataset.train_x[:4], case.dataset.train_y[:4]
    shifted = {name: value + 1e-6 for name, value in theta.items()}

    def loss(p):
        return float(torch.nn.functional.cross_entropy(functional_call(case.model, p, (x,)), y))

    slope = references.gradient(case, theta, torch.arange(4))
    assert (loss(shifted) - loss(theta)) / 1e-6 == pytest.approx(float(flatten(slope).sum()), rel=1e-4)
