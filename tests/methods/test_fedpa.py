"""FedPA against the dense covariance, and what its degenerate cases must equal."""

from dataclasses import dataclass

import pytest
import torch

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import Diverged, UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedpa import FedPA, PathSums, Report, posterior_delta
from fl_lightning.params import flatten
from tests.support.cases import equal_bits, final, largest_difference, ragged
from tests.support.references import batches, gradient, initial, weights

ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=3), "lightning": Lightning()}


def dense_delta(x, samples, rho):
    """Delta with the covariance matrix written out."""
    number, d = samples.shape
    if number == 1:
        return x - samples[0]
    centred = samples - samples.mean(0)
    covariance = sum(torch.outer(row, row) for row in centred) / (number - 1)
    shrunk = 1 / (1 + (number - 1) * rho)
    matrix = shrunk * torch.eye(d, dtype=x.dtype) + (1 - shrunk) * covariance
    return torch.linalg.solve(matrix, x - samples.mean(0))


def vector(params):
    return torch.cat([p.reshape(-1) for p in params.values()])


def iterates(case, x, client, number, epochs):
    """The client's models after each step, one list per epoch."""
    y, path = dict(x), []
    for batch in batches(case, client, number, epochs):
        slope = gradient(case, y, batch)
        y = {k: y[k] - case.training.lr * slope[k] for k in y}
        path.append(vector(y))
    per_epoch = len(path) // epochs
    return [path[first : first + per_epoch] for first in range(0, len(path), per_epoch)]


def windows(path, burn_in, window, discard):
    """The samples: means of epochs, or of windows of steps with gaps between them."""
    kept = path[burn_in:]
    if window is None:
        return [torch.stack(epoch).mean(0) for epoch in kept]
    steps = [step for epoch in kept for step in epoch]
    found = []
    while len(steps) >= window:
        found.append(torch.stack(steps[:window]).mean(0))
        steps = steps[window + discard :]
    return found


def reference(case, records, method):
    """The global model after every round, as one vector."""
    x = initial(case)
    shapes = {k: v.shape for k, v in x.items()}
    velocity = torch.zeros_like(vector(x))
    history = []
    for record in records:
        p = weights(case, list(record.cohort.members))
        update = torch.zeros_like(velocity)
        for n, epochs in zip(record.cohort.members, record.cohort.epochs, strict=True):
            path = iterates(case, x, n, record.round, epochs)
            samples = windows(path, method.burn_in, method.window, method.discard)
            if record.round < method.start_round or not samples:
                delta = vector(x) - path[-1][-1]
            else:
                delta = dense_delta(vector(x), torch.stack(samples), method.shrinkage)
            update += p[n] * delta
        velocity = method.server_momentum * velocity + update
        flat = vector(x) - method.server_lr * velocity
        pieces = flat.split([s.numel() for s in shapes.values()])
        x = {k: piece.view(shapes[k]) for k, piece in zip(shapes, pieces, strict=True)}
        history.append(flat)
    return history


@pytest.mark.parametrize("rho", [0.0, 1e-3, 0.1, 1.0, 30.0])
@pytest.mark.parametrize(("number", "d"), [(1, 4), (2, 7), (5, 20), (12, 6)])
def test_the_recursion_equals_a_dense_solve(number, d, rho):
    stream = torch.Generator().manual_seed(number)
    x = torch.randn(d, generator=stream, dtype=torch.float64)
    samples = torch.randn(number, d, generator=stream, dtype=torch.float64) + 3
    delta = posterior_delta(x, samples, rho)
    expected = dense_delta(x, samples, rho)
    assert torch.allclose(delta, expected, rtol=1e-8, atol=1e-10)
    # Sigma >= rho_l I: how long the corrected update can get.
    assert delta.norm() <= (1 + (number - 1) * rho) * (x - samples.mean(0)).norm() * (1 + 1e-12)
    if rho == 0:
        assert torch.allclose(delta, x - samples.mean(0), rtol=1e-12, atol=1e-14)
    if number == 1:
        assert torch.equal(delta, x - samples[0])


SETTINGS = {
    "epochs": (FedPA(shrinkage=0.3), {"epochs": 4}),
    "no burn-in": (FedPA(burn_in=0, shrinkage=2.0), {"epochs": 3}),
    "windows": (FedPA(shrinkage=0.3, window=2), {"epochs": 4}),
    "windows with gaps": (FedPA(shrinkage=0.3, window=3, discard=2), {"epochs": 4}),
    "server": (FedPA(shrinkage=0.3, server_lr=0.5, server_momentum=0.9), {"epochs": 3, "fraction": 0.5}),
    "later start": (FedPA(shrinkage=0.3, start_round=2), {"epochs": 3}),
    "stragglers": (FedPA(burn_in=2, shrinkage=0.3), {"epochs": 4, "straggler_fraction": 1.0}),
    "full batches": (FedPA(shrinkage=0.3), {"epochs": 4, "batch_size": None}),
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_equals_the_dense_formula(setting):
    method, changes = SETTINGS[setting]
    case = ragged()
    engines = ENGINES if setting in ("epochs", "windows with gaps") else ("loop", "vmap")  # Lightning's takes long
    runs = {name: case.run(method, ENGINES[name], **changes) for name in engines}
    if "batch_size" in changes:
        case = case._replace(training=runs["loop"][0].cohort.training)
    history = reference(case, runs["loop"], method)
    for records in runs.values():
        for record, expected in zip(records, history, strict=True):
            assert float((flatten(record.after.state.params) - expected).abs().max()) < 1e-11
    if setting == "stragglers":  # some finished before the first sample, some did not
        epochs = {e for record in runs["loop"] for e in record.cohort.epochs}
        assert min(epochs) <= method.burn_in < max(epochs)


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("loop", {}),
        ("vmap", {}),
        ("lightning", {"fraction": 0.5}),
        ("loop", {"fraction": 0.5, "momentum": 0.9}),
        ("vmap", {"straggler_fraction": 0.5, "epochs": 3}),
    ],
)
def test_before_its_start_it_is_fedavg(engine, settings):
    case = ragged(torch.float32)
    plain = case.run(FedAvg("keep"), ENGINES[engine], rounds=4, **settings)
    never = case.run(FedPA(shrinkage=0.5, start_round=5), ENGINES[engine], rounds=4, **settings)
    later = case.run(FedPA(shrinkage=0.5, start_round=3), ENGINES[engine], rounds=4, **settings)
    assert equal_bits(final(never), final(plain))
    assert equal_bits(later[1].after.state.params, plain[1].after.state.params)
    assert largest_difference(later[2].after.state.params, plain[2].after.state.params) > 1e-4


@pytest.mark.parametrize("rho", [0.0, 1.0])
@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_sample_that_is_the_last_iterate_is_fedavg(dtype, window, rho):
    """With full batches an epoch is one step."""
    case = ragged(dtype)
    changes = {"batch_size": None, "lr": 3.0}  # large steps: x - (x - y) is y only for small ones
    mine = case.run(FedPA(shrinkage=rho, window=window), **changes)
    assert equal_bits(final(mine), final(case.run(FedAvg(), **changes)))
    for result, report in zip(mine[-1].clients, mine[-1].reports, strict=True):
        assert equal_bits(report.params, result.local.params)


def test_one_sample_does_not_depend_on_the_shrinkage_and_is_the_mean_of_an_epoch():
    case = ragged(torch.float32)
    one, other = case.run(FedPA(shrinkage=0.0)), case.run(FedPA(shrinkage=10.0))
    assert equal_bits(final(one), final(other))
    assert largest_difference(final(one), final(case.run(FedAvg()))) > 1e-3  # not FedAvg: many steps in an epoch
    case = ragged()
    record = case.run(FedPA(), rounds=1)[0]
    for n, report in zip(record.cohort.members, record.reports, strict=True):
        path = iterates(case, initial(case), n, 1, 2)
        assert float((flatten(report.params) - torch.stack(path[1]).mean(0)).abs().max()) < 1e-14


def test_shrinkage_matters_with_several_samples():
    case = ragged()
    one, other = (case.run(FedPA(shrinkage=rho), epochs=4) for rho in (0.01, 1.0))
    assert largest_difference(final(one), final(other)) > 1e-3


def test_server_learning_rate_and_momentum():
    case = ragged()
    method = FedPA(server_lr=0.3, server_momentum=0.8)
    velocity = torch.zeros(case.task().num_params, dtype=torch.float64)
    for record in case.run(method, fraction=0.5):
        x = flatten(record.before.state.params)
        terms = zip(record.cohort.weights, record.reports, strict=True)
        velocity = 0.8 * velocity + sum(w * (x - flatten(report.params)) for w, report in terms)
        assert torch.allclose(flatten(record.after.state.params), x - 0.3 * velocity, rtol=1e-12, atol=1e-14)
        assert torch.allclose(flatten(record.after.state.velocity), velocity, rtol=1e-12, atol=1e-14)
    assert case.run(FedPA())[-1].after.state.velocity == {}


def test_products_are_taken_in_double_precision():
    """Samples of float32 models differ by little; only the finished correction is rounded."""
    case = ragged(torch.float32)
    method = FedPA(burn_in=0, shrinkage=1.0)
    record = case.run(method, rounds=1, epochs=5, lr=1e-4)[0]
    context = method.broadcast(record.before.state, record.cohort)
    statistics = method.path_statistics(context)
    assert all(value.dtype == torch.float64 for total in statistics.sums for value in total.values())
    stream = torch.Generator().manual_seed(0)
    x = context.start
    noise = [{k: 1e-3 * torch.randn(v.shape, generator=stream) for k, v in x.items()} for _ in range(5)]
    sums = tuple({k: 3 * (x[k].double() + n[k]) for k in x} for n in noise)
    local = record.clients[0].local._replace(
        path_statistics=PathSums(sums, statistics.seen), num_steps=15, num_epochs=5
    )
    samples = torch.stack([flatten(s) / 3 for s in sums])
    expected = flatten(x).double() - dense_delta(flatten(x).double(), samples, 1.0)
    assert torch.equal(flatten(method.report(local, context).params), expected.float())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_client_whose_correction_is_not_finite_has_no_weight(momentum):
    case = ragged()
    method = FedPA(server_momentum=momentum, server_lr=0.5)
    record = case.run(method, rounds=1)[0]
    local, context = record.clients[1].local, method.broadcast(record.before.state, record.cohort)
    overflow = {k: torch.full_like(v, torch.inf) for k, v in local.params.items()}
    broken = method.report(local._replace(path_statistics=PathSums((overflow,), torch.tensor(0))), context)
    assert isinstance(broken, Report)
    assert not flatten(broken.params).isfinite().any()
    reports = [record.reports[0], broken, *record.reports[2:]]
    after = method.aggregate(record.before.state, record.cohort, reports)
    kept = [
        (w, flatten(r.params)) for i, (w, r) in enumerate(zip(record.cohort.weights, reports, strict=True)) if i != 1
    ]
    x = flatten(record.before.state.params)
    expected = x + 0.5 * sum(w * (y - x) for w, y in kept) / sum(w for w, _ in kept)
    assert torch.allclose(flatten(after.params), expected, rtol=1e-13, atol=1e-14)
    assert method.diagnose(record.before.state, record.cohort, reports, after)["clients_ignored"] == 1


def test_if_no_correction_is_finite_the_run_has_diverged():
    @dataclass(frozen=True)
    class Broken(FedPA):
        def report(self, local, context):
            return Report({k: v / 0 for k, v in local.params.items()})

    with pytest.raises(Diverged, match="server's aggregate is not finite in round 1"):
        ragged().run(Broken())


def test_diagnostics():
    case = ragged()
    method = FedPA(shrinkage=0.2, window=2, discard=1, start_round=2)
    first, second, _ = case.run(method, epochs=3)
    numbers = method.diagnose(first.before.state, first.cohort, first.reports, first.after.state)
    assert numbers["posterior_samples"] == [0, 0, 0, 0]
    numbers = method.diagnose(second.before.state, second.cohort, second.reports, second.after.state)
    assert numbers["posterior_samples"] == [2, 1, 3, 1]  # 6, 2, 10 and 2 steps after the burn-in
    assert numbers["clients_ignored"] == 0
    x = flatten(second.before.state.params)
    assert numbers["update_norm"] == pytest.approx([float((x - flatten(r.params)).norm()) for r in second.reports])


def test_traffic_and_no_memory_before_the_start():
    case, method = ragged(), FedPA(start_round=2, server_momentum=0.5)
    size = case.task().num_params
    for record in case.run(method, epochs=4, fraction=0.5):
        assert record.bytes_down == record.bytes_up == 4 * size * 2
        assert record.gradient_evaluations == 4 * sum(len(case.clients[n]) for n in record.cohort.members)
        statistics = method.path_statistics(method.broadcast(record.before.state, record.cohort))
        assert len(statistics.sums) == (0 if record.round == 1 else 3)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"burn_in": -1}, "burn_in must be at least 0, got -1"),
        ({"shrinkage": -0.1}, "shrinkage must be finite and >= 0, got -0.1"),
        ({"shrinkage": float("nan")}, "shrinkage must be finite"),
        ({"window": 0}, "window must be at least 1, or null"),
        ({"window": 3, "discard": -1}, "discard must be at least 0"),
        ({"discard": 2}, "set method.window"),
        ({"start_round": 0}, "start_round must be at least 1"),
        ({"server_lr": 0.0}, "server_lr must be finite and > 0"),
        ({"server_momentum": 1.0}, r"server_momentum must be in \[0, 1\)"),
    ],
)
def test_impossible_settings_are_refused(settings, complaint):
    with pytest.raises(UserError, match=complaint):
        FedPA(**settings)


def test_too_little_training_is_refused_before_it_starts():
    case = ragged()
    with pytest.raises(
        UserError, match=r"less than training\.epochs, which is 1, got 1.*set --training\.epochs higher"
    ):
        case.run(FedPA(), epochs=1)
    with pytest.raises(UserError, match=r"got 4, but client 4 takes only 3; lower method\.window"):
        case.run(FedPA(window=4), epochs=4)
    assert len(case.run(FedPA(window=3), epochs=4)) == 3
    assert len(case.run(FedPA(burn_in=0), epochs=1)) == 3
