"""FOLA with full and e-full curvature against brute force: autograd Hessians, explicit averages, dense solves."""

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call, jacrev

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.params import flatten, unflatten
from fl_lightning.system import memory
from tests.support import references
from tests.support.cases import ENGINES, Case, equal_bits, final, largest_difference, ragged
from tests.support.variants import in_full


def softmax_case() -> Case:
    case = ragged()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(5, 3).double()
    return case._replace(model=model)


def network_case() -> Case:
    return ragged()


def curvature(case, theta, places):
    """The Hessian (softmax regression) or Gauss-Newton matrix (network) of the mean loss of some samples."""
    x, y = case.dataset.train_x[places], case.dataset.train_y[places]
    flat = flatten(theta)

    def logits(vector, sample):
        return functional_call(case.model, unflatten(vector, theta), (sample[None],))[0]

    if isinstance(case.model, nn.Linear):

        def loss(vector):
            return nn.functional.cross_entropy(functional_call(case.model, unflatten(vector, theta), (x,)), y)

        return hessian(loss, flat)
    total = 0.0
    for sample in x:
        jacobian = jacrev(logits)(flat, sample)
        p = logits(flat, sample).softmax(0)
        total = total + jacobian.T @ (p.diag() - torch.outer(p, p)) @ jacobian
    return (total / len(x)).detach()


def in_form(method, matrix):
    if method.curvature_form == "full":
        return matrix
    values = torch.linalg.eigvalsh(matrix).clamp(min=0)
    if method.eigen_order == "ascending":
        return values.diag()
    ranked = torch.zeros_like(values)
    for value, place in zip(values, matrix.diagonal().argsort(stable=True), strict=True):
        ranked[place] = value
    return ranked.diag()


def brute_force(case, method, rounds=3):
    """Means and precisions (as matrices) after every round, with plain loops over flat vectors."""
    method = in_full(method)
    like = references.initial(case)
    mu = flatten(like)
    server = torch.zeros(len(mu), len(mu), dtype=torch.float64)
    identity = torch.eye(len(mu), dtype=torch.float64)
    members = references.members(case)
    share = references.weights(case, members)
    states = []
    for r in range(1, rounds + 1):
        means, precisions = {}, {}
        code = method.round_scaling == "code" and method.curvature == "online"
        strength = method.strength / r if code else method.strength
        scale = server.diagonal().mean() if method.damping_mode == "relative" else 1.0
        extra = method.damping * scale if method.damping_in_prior and r > 1 else 0.0
        for n in members:
            theta, total = mu.clone(), 0.0
            for batch in references.batches(case, n, r):
                weight = 1.0 if method.normalisation == "sum_steps" else len(batch) / len(case.clients[n])
                if method.curvature == "online":
                    total = total + weight * curvature(case, unflatten(theta, like), batch)
                slope = flatten(references.gradient(case, unflatten(theta, like), batch))
                pull = strength * (server + extra * identity) @ (theta - mu)
                theta = theta - case.training.lr * (slope + pull)
            if method.curvature == "offline":
                precisions[n] = in_form(method, curvature(case, unflatten(theta, like), case.clients[n]))
            else:
                found = in_form(method, total) / (case.training.epochs if method.normalisation == "mean" else 1)
                precisions[n] = found + server if code else found / r + (r - 1) / r * server
            means[n] = theta
        server = sum(share[n] * precisions[n] for n in members)
        scale = server.diagonal().mean() if method.damping_mode == "relative" else 1.0
        gamma = method.damping * scale
        if method.aggregation == "average":
            mu = sum(share[n] * means[n] for n in members)
        else:
            moment = sum(share[n] * (precisions[n] + gamma * identity) @ means[n] for n in members)
            mu = torch.linalg.solve(server + gamma * identity, moment)
        states.append((mu, server))
    return states


VARIANTS = [
    Fola(curvature_form="full", strength=0.5),
    Fola(curvature_form="full", strength=0.5, curvature="offline"),
    Fola(curvature_form="full", strength=0.5, aggregation="average"),
    FolaExtended(curvature_form="full", strength=0.5, damping=1e-3, damping_mode="absolute", damping_in_prior=True),
    FolaExtended(curvature_form="full", strength=0.1, normalisation="sum_epochs", round_scaling="code"),
    FolaExtended(curvature_form="full", strength=0.1, normalisation="sum_steps"),
    Fola(curvature_form="e_full", strength=0.5),
    Fola(curvature_form="e_full", strength=0.5, curvature="offline", eigen_order="rank_matched"),
    FolaExtended(curvature_form="e_full", strength=0.5, eigen_order="rank_matched", normalisation="sum_epochs"),
]


def as_matrix(method, posterior):
    return posterior.matrix if method.curvature_form == "full" else flatten(posterior.precision).diag()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("method", VARIANTS, ids=str)
def test_softmax_regression_equals_brute_force(method, engine):
    case = softmax_case()
    for record, (mean, precision) in zip(case.run(method, engine), brute_force(case, method), strict=True):
        assert (flatten(record.after.state.params) - mean).abs().max() < 1e-11
        assert (as_matrix(method, record.after.state.posterior) - precision).abs().max() < 1e-12


@pytest.mark.parametrize("method", VARIANTS[:2] + VARIANTS[6:7], ids=str)
def test_networks_have_their_gauss_newton_matrix(method):
    case = network_case()
    for record, (mean, precision) in zip(case.run(method, rounds=2), brute_force(case, method, 2), strict=True):
        assert (flatten(record.after.state.params) - mean).abs().max() < 1e-10
        assert (as_matrix(method, record.after.state.posterior) - precision).abs().max() < 1e-12


@pytest.mark.parametrize("engine", [Functional(chunk=1), Lightning()], ids=["loop", "lightning"])
def test_the_full_prior_has_a_gradient(engine):
    case = softmax_case()
    free, pulled = (final(case.run(Fola(curvature_form="full", strength=s), engine)) for s in (0.0, 0.5))
    assert largest_difference(free, pulled) > 1e-4
    detached = final(case.run(FolaExtended(curvature_form="full", strength=0.5, detached_prior=True), engine))
    assert equal_bits(detached, free)


@pytest.mark.parametrize("form", ["full", "e_full"])
def test_identical_clients_give_an_identical_server(form):
    case = softmax_case()
    places = case.clients[3]
    case = case._replace(clients=[places, places])
    method = Fola(curvature_form=form, strength=0.0)
    record = case.run(method, rounds=1, batch_size=None)[0]  # one batch: both take the same steps
    assert largest_difference(record.clients[0].local.params, record.clients[1].local.params) < 1e-14
    assert largest_difference(record.after.state.params, record.clients[0].local.params) < 1e-14


def test_clients_at_their_optimum_give_nearly_the_global_one():
    """Near the optimum losses are quadratic: the full product beats average and diagonal by far."""
    case = softmax_case()
    case = case._replace(clients=[case.clients[0], case.clients[3]])

    def slope(params):
        places = torch.cat(case.clients)
        return float(flatten(references.gradient(case, params, places)).norm())

    found = {
        name: slope(final(case.run(method, rounds=1, epochs=400, batch_size=None, lr=0.5)))
        for name, method in {
            "average": Fola(aggregation="average", strength=0),
            "diagonal": Fola(fisher="per_sample", curvature="offline", strength=0),
            "full": Fola(curvature_form="full", curvature="offline", strength=0, damping=1e-6),
        }.items()
    }
    assert found["full"] < 0.5 * min(found["average"], found["diagonal"])


def test_a_run_goes_on_from_any_round_to_the_bit():
    case = softmax_case()
    for form in ("full", "e_full"):
        method = Fola(curvature_form=form, strength=0.3)
        records = case.run(method)
        rest = case.go_on(method, resume=records[0].after)
        assert equal_bits(final(rest), final(records))
        assert torch.equal(
            as_matrix(method, rest[-1].after.state.posterior), as_matrix(method, records[-1].after.state.posterior)
        )


def test_states_keep_their_shapes_and_traffic_counts_the_matrix():
    case, method = softmax_case(), Fola(curvature_form="full", strength=0.0)
    fresh = method.init(case.task().initial.params, len(case.clients)).posterior
    assert fresh.matrix.shape == (18, 18)
    assert fresh.matrix.untyped_storage().nbytes() == 8  # nothing is allocated for zeros
    record = case.run(method, rounds=1)[0]
    after = record.after.state.posterior
    assert (after.matrix.shape, type(after.raises)) == ((18, 18), int)
    assert record.bytes_down == record.bytes_up == 4 * 4 * (18 + 18 * 19 // 2)
    assert record.gradient_evaluations == 61 * 3  # two epochs and the pass for the curvature


def test_diagnostics_of_a_full_precision():
    case, method = softmax_case(), Fola(curvature_form="full", strength=0.5)
    record = case.run(method, rounds=2)[-1]
    found = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    matrix = record.after.state.posterior.matrix
    assert found["precision_max"] == pytest.approx(float(matrix.diagonal().max()))
    assert found["prior_stability"] == pytest.approx(0.1 * 0.5 * float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-2)
    assert found["damping_raised"] == 0
    assert sum(found["precision_share"]) == pytest.approx(1)
    vectors = [r.posterior.matrix.reshape(-1) for r in record.reports]
    pairs = [(a, b) for i, a in enumerate(vectors) for b in vectors[i + 1 :]]
    raw = sum(float(a @ b / a.norm() / b.norm()) for a, b in pairs) / len(pairs)
    shifted = [((a - a.min()) / a.max(), (b - b.min()) / b.max()) for a, b in pairs]
    minmax = sum(float(a @ b / a.norm() / b.norm()) for a, b in shifted) / len(pairs)
    assert found["precision_cosine"] == pytest.approx(raw, abs=1e-12)
    assert found["precision_cosine_minmax"] == pytest.approx(minmax, abs=1e-12)


def test_the_posteriors_of_the_clients():
    case = softmax_case()
    for method in (Fola(curvature_form="full", strength=0.0), Fola(strength=0.0)):
        record = case.run(method, rounds=1)[0]
        posteriors = method.posteriors(record.cohort, record.reports)
        found = type(posteriors[0]).product(posteriors, record.cohort.weights)
        assert largest_difference(found.mean, record.after.state.params) < 1e-12


def test_a_damping_that_is_too_small_is_raised_and_told():
    case = softmax_case()
    method = Fola(curvature_form="full", strength=0.0, damping=0.0)  # the matrix is singular by construction
    for record in case.run(method):
        assert bool(flatten(record.after.state.params).isfinite().all())
        found = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
        assert found["damping_raised"] == int(record.after.state.posterior.raises)
    assert any(r.after.state.posterior.raises > 0 for r in case.run(method))


def test_too_large_a_model_is_refused_with_the_memory_it_would_take(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 10_000)
    with pytest.raises(
        UserError, match=r"curvature_form full of 18 parameters for 4 clients, 2.6 kB per matrix, would take"
    ):
        softmax_case().run(Fola(curvature_form="full"))
    monkeypatch.setattr(memory, "available", lambda device: None)  # a system that does not say
    softmax_case().run(Fola(curvature_form="full", strength=0), rounds=1)


def test_too_slow_a_network_is_refused(monkeypatch):
    monkeypatch.setattr("fl_lightning.methods.parts.dense_forms.MOST_WORK", 1e5)
    with pytest.raises(UserError, match=r"takes about \de\+0\d multiplications per client and round"):
        network_case().run(Fola(curvature_form="full"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eigen_order": "rank_matched"}, "is for --method.curvature_form e_full"),
        (
            {"curvature_form": "full", "fisher": "per_sample"},
            "fisher per_sample is for --method.curvature_form diagonal",
        ),
        (
            {"curvature_form": "full", "damping_place": "denominator"},
            "is for --method.curvature_form diagonal or e_full",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        softmax_case().run(FolaExtended(**settings))


def test_the_memory_of_a_machine_is_known():
    free = memory.available(torch.device("cpu"))
    assert free is None or 1e6 < free < 1e15
