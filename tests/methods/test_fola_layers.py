"""FOLA with precisions by layers against brute force: dense solves, plain SGD, and what products must obey."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fl_lightning.gaussian import kronecker_solve
from fl_lightning.gaussian.blocks import Blocks
from fl_lightning.gaussian.kronecker import Kron
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola_extended import FolaExtended as Fola
from fl_lightning.params import flatten, unflatten
from tests.support import references
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged
from tests.support.gaussian_references import dense, kron_matrix
from tests.support.layer_references import factors_of

FORMS = ["inputs", "kron", "last_layer"]


@pytest.fixture(autouse=True)
def converged(monkeypatch):
    monkeypatch.setattr(kronecker_solve, "TOLERANCE", 1e-13)


def last_hessian(case, theta, places):
    """Of the last layer's weight and bias, others fixed."""
    own = {name: theta[name] for name in ("2.weight", "2.bias")}
    fixed = {name: value for name, value in theta.items() if name not in own}
    x, y = case.dataset.train_x[places], case.dataset.train_y[places]

    def loss(vector):
        return nn.functional.cross_entropy(functional_call(case.model, fixed | unflatten(vector, own), (x,)), y)

    return torch.autograd.functional.hessian(loss, flatten(own))


def brute_force(case, method, rounds=3):
    """Models after every round, with plain loops and dense matrices layer by layer."""
    mu = references.initial(case)
    members = references.members(case)
    share = references.weights(case, members)
    layers = {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias")}
    kind = "empirical" if method.slopes == "empirical" else "exact"
    server = None
    models = []
    for r in range(1, rounds + 1):
        means, found = {}, {}
        pull = 0.0
        if server is not None and method.strength:
            pull = method.strength * server["prior"]
        for n in members:
            theta = dict(mu)
            for batch in references.batches(case, n, r):
                slope = flatten(references.gradient(case, theta, batch))
                offset = flatten(theta) - flatten(mu)
                push = pull @ offset if isinstance(pull, torch.Tensor) else 0.0
                theta = unflatten(flatten(theta) - case.training.lr * (slope + push), mu)
            means[n] = theta
            if method.curvature_form == "last_layer":
                found[n] = {"2": [last_hessian(case, theta, case.clients[n])]}
            else:
                found[n] = factors_of(case, theta, case.clients[n], kind)
            if method.curvature == "online" and r > 1:
                found[n] = {
                    key: [f / r + (r - 1) / r * s for f, s in zip(value, server["factors"][key], strict=True)]
                    for key, value in found[n].items()
                }
        result, factors, blocks = {}, {}, []
        for key, names in layers.items():
            own = [{name: means[n][name] for name in names} for n in members]
            average = sum(share[n] * flatten(m) for n, m in zip(members, own, strict=True))
            size = len(average)
            if method.curvature_form == "last_layer":
                if key == "0":
                    result |= unflatten(average, own[0])
                    blocks.append(torch.zeros(size, size, dtype=torch.float64))
                    continue
                matrices = {n: found[n][key][0] for n in members}
                total = sum(share[n] * matrices[n] for n in members)
                gamma = method.damping * float(total.diagonal().mean())
                used = {n: matrices[n] + gamma * torch.eye(size, dtype=torch.float64) for n in members}
                factors[key] = [total]
                kept = total
            else:
                outputs = len(own[0][names[0]])
                a = sum(share[n] * found[n][key][0] for n in members)
                eye_a, eye_g = (torch.eye(k, dtype=torch.float64) for k in (len(a), outputs))
                c_a = method.damping * float(a.diagonal().mean())
                if method.curvature_form == "inputs":
                    used = {n: kron_matrix(eye_g, found[n][key][0] + c_a * eye_a) for n in members}
                    g = eye_g
                    factors[key] = [a, eye_g]
                    for n in members:
                        found[n][key][1] = eye_g
                else:
                    g = sum(share[n] * found[n][key][1] for n in members)
                    c_g = method.damping_slopes * float(g.diagonal().mean())
                    used = {
                        n: kron_matrix(found[n][key][1] + c_g * eye_g, found[n][key][0] + c_a * eye_a) for n in members
                    }
                    whole = sum(share[n] * found[n][key][0].trace() * found[n][key][1].trace() for n in members)
                    g = g * whole / (g.trace() * a.trace())
                    factors[key] = [a, g]
                kept = kron_matrix(g, a)
            blocks.append(kept)
            total = sum(share[n] * used[n] for n in members)
            moment = sum(share[n] * used[n] @ flatten(m) for n, m in zip(members, own, strict=True))
            result |= unflatten(torch.linalg.solve(total, moment), own[0])
        whole = torch.block_diag(*blocks)
        prior = whole if method.prior == "exact" else whole.diagonal().diag()
        server = {"factors": factors, "prior": prior, "precision": whole}
        mu = {name: result[name] for name in mu}
        models.append((mu, whole))
    return models


VARIANTS = [
    Fola(curvature_form="inputs", strength=0.0),
    Fola(curvature_form="inputs", strength=0.2, curvature="offline"),
    Fola(curvature_form="inputs", strength=0.2, prior="exact", damping=0.1),
    Fola(curvature_form="kron", strength=0.0),
    Fola(curvature_form="kron", strength=2.0, damping=0.1, damping_slopes=0.5),
    Fola(curvature_form="kron", strength=2.0, prior="exact", slopes="empirical"),
    Fola(curvature_form="kron", strength=2.0, curvature="offline"),
    Fola(curvature_form="last_layer", strength=0.0),
    Fola(curvature_form="last_layer", strength=2.0, prior="exact"),
]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("method", VARIANTS, ids=str)
def test_equals_brute_force(method, engine):
    case = ragged()
    for record, (mean, precision) in zip(case.run(method, engine), brute_force(case, method), strict=True):
        assert largest_difference(record.after.state.params, mean) < 1e-9
        assert torch.allclose(dense(record.after.state.posterior), precision, atol=1e-10)


@pytest.mark.parametrize("form", ["inputs", "kron"])
def test_the_factors_are_means_over_rounds(form):
    records = ragged().run(Fola(curvature_form=form, strength=0.0))
    fresh = []
    for record in records:
        r, before = record.round, record.before.state.posterior.parts()
        own = [
            {key: r * value - (r - 1) * before[key] for key, value in report.posterior.parts().items()}
            for report in record.reports
        ]
        fresh.append(
            {
                key: sum(w * one[key] for w, one in zip(record.cohort.weights, own, strict=True))
                for key in before
                if key.endswith("inputs")
            }
        )
    kept = records[-1].after.state.posterior.parts()
    for key in fresh[0]:
        assert torch.allclose(kept[key], sum(one[key] for one in fresh) / len(fresh), atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_average_without_prior_is_fedavg_to_the_bit(form):
    case = ragged(dtype=torch.float32)
    off = Fola(curvature_form=form, aggregation="average", strength=0)
    assert equal_bits(final(case.run(off)), final(case.run(FedAvg())))


@pytest.mark.parametrize("form", FORMS)
def test_one_client_keeps_its_model(form):
    case = ragged()
    case = case._replace(clients=[torch.cat(case.clients)])
    for record in case.run(Fola(curvature_form=form, strength=0.1)):
        assert equal_bits(record.after.state.params, record.clients[0].local.params)


@pytest.mark.parametrize("form", FORMS)
def test_huge_damping_is_fedavg(form):
    case = ragged()
    damped = Fola(curvature_form=form, strength=0, damping=1e12, damping_slopes=1e12 if form == "kron" else 1.0)
    assert largest_difference(final(case.run(damped)), final(case.run(FedAvg()))) < 1e-6


def test_the_diagnosis_of_a_kron_product():
    case, method = ragged(), Fola(curvature_form="kron", strength=2.0)
    record = case.run(method, rounds=2)[-1]
    found = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    blocks = record.after.state.posterior.blocks.values()
    assert found["solver_iterations"] == max(block.iterations for block in blocks) > 0
    assert found["solver_residual"] == max(block.residual for block in blocks) < 1e-12
    matrix = dense(record.after.state.posterior)
    assert found["precision_max"] == pytest.approx(float(matrix.diagonal().max()))
    assert found["prior_stability"] == pytest.approx(0.1 * 2 * float(matrix.diagonal().max()))
    exact = Fola(curvature_form="kron", strength=2.0, prior="exact")
    found = exact.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    assert found["prior_stability"] == pytest.approx(0.1 * 2 * float(torch.linalg.eigvalsh(matrix)[-1]))


@pytest.mark.parametrize("form", FORMS)
def test_the_posteriors_multiply_to_the_server(form):
    case, method = ragged(), Fola(curvature_form=form, strength=0.0)
    record = case.run(method, rounds=1)[0]
    posteriors = method.posteriors(record.cohort, record.reports)
    found = Blocks.product(posteriors, record.cohort.weights)
    assert largest_difference(found.mean, record.after.state.params) < 1e-9


def test_sampled_slopes_are_drawn_anew_for_every_client_and_round():
    case = ragged()
    method = Fola(curvature_form="kron", slopes="sampled", strength=0.0, curvature="offline")
    one, two = case.run(method), case.run(method)
    assert equal_bits(final(one), final(two))
    frozen = case.run(method, lr=0.0)
    first, second = (r.reports[0].posterior.blocks["2.weight"].slopes for r in frozen[:2])
    assert not torch.equal(first, second)


def test_isotropic_damping_is_there_for_comparison():
    case = ragged()
    factored, isotropic = (Fola(curvature_form="kron", strength=0, damping_slopes=c) for c in (1.0, None))
    assert largest_difference(final(case.run(factored)), final(case.run(isotropic))) > 1e-4
    assert isinstance(case.run(isotropic)[-1].after.state.posterior.blocks["0.weight"], Kron)
