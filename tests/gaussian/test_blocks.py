"""Gaussians by layers (inputs, kron, flat, blocks) against dense matrices in float64."""

import pytest
import torch
from torch.func import grad

from fl_lightning.gaussian import kronecker_solve
from fl_lightning.gaussian.blocks import Blocks
from fl_lightning.gaussian.damping import Merging
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.full import Full
from fl_lightning.gaussian.improper import Flat
from fl_lightning.gaussian.input_kronecker import Inputs, joined, split
from fl_lightning.gaussian.kronecker import Kron
from fl_lightning.gaussian.product import product
from fl_lightning.params import flatten, unflatten
from fl_lightning.system import trees
from tests.support.cases import largest_difference
from tests.support.gaussian_references import dense, dense_product, kron_matrix

OUTPUTS, INPUTS = 3, 4
WEIGHTS = [0.5, 0.3, 0.2]


def moment(stream, size, rank=None):
    rows = torch.randn(rank or 3 * size, size, generator=stream, dtype=torch.float64)
    return rows.T @ rows / len(rows)


def layer(stream, biased=True, shape=(OUTPUTS, INPUTS)):
    mean = {"w": torch.randn(shape, generator=stream, dtype=torch.float64)}
    return mean | ({"b": torch.randn(shape[0], generator=stream, dtype=torch.float64)} if biased else {})


def of_inputs(seed, biased=True):
    stream = torch.Generator().manual_seed(seed)
    return Inputs(layer(stream, biased), moment(stream, INPUTS + biased))


def of_kron(seed, biased=True, rank=None):
    stream = torch.Generator().manual_seed(seed)
    return Kron(layer(stream, biased), moment(stream, INPUTS + biased, rank), moment(stream, OUTPUTS, rank))


def mixed(seed):
    stream = torch.Generator().manual_seed(seed)
    mean = {
        "b": torch.randn(OUTPUTS, generator=stream, dtype=torch.float64),  # not in the order of the blocks
        "w": torch.randn(OUTPUTS, INPUTS, generator=stream, dtype=torch.float64),
        "scale": torch.randn(3, generator=stream, dtype=torch.float64),
        "v": torch.randn(2, 1, 2, 1, generator=stream, dtype=torch.float64),
        "free": torch.randn(2, generator=stream, dtype=torch.float64),
        "u": torch.randn(2, generator=stream, dtype=torch.float64),
    }

    def own(*names):
        return {name: mean[name] for name in names}

    return Blocks.of(
        mean,
        [
            ("w", Kron(own("w", "b"), moment(stream, INPUTS + 1), moment(stream, OUTPUTS))),
            ("v", Inputs(own("v"), moment(stream, 2))),
            ("u", Full(own("u"), moment(stream, 2))),
            ("other", Diagonal(own("scale"), {"scale": torch.rand(3, generator=stream, dtype=torch.float64)})),
            ("free", Flat(own("free"))),
        ],
    )


FORMS = {
    "inputs": of_inputs,
    "inputs without bias": lambda seed: of_inputs(seed, biased=False),
    "kron": of_kron,
    "kron without bias": lambda seed: of_kron(seed, biased=False),
    "blocks": mixed,
    "flat": lambda seed: Flat(layer(torch.Generator().manual_seed(seed))),
}


@pytest.fixture(autouse=True)
def converged(monkeypatch):
    monkeypatch.setattr(kronecker_solve, "TOLERANCE", 1e-13)


def expected_matrix(gaussian):
    """Each form's precision from its tensors, without its code."""
    biased = len(gaussian.mean) > 1
    eye = torch.eye(len(next(iter(gaussian.mean.values()))), dtype=torch.float64)
    slopes = gaussian.slopes if isinstance(gaussian, Kron) else eye
    return kron_matrix(slopes, gaussian.inputs, biased)


@pytest.mark.parametrize("name", [name for name in FORMS if name not in ("blocks", "flat")])
def test_the_precision_of_a_layer_is_a_kronecker_product(name):
    gaussian = FORMS[name](0)
    assert torch.allclose(dense(gaussian), expected_matrix(gaussian), atol=1e-14)


@pytest.mark.parametrize("name", FORMS)
def test_all_operations_are_those_of_the_dense_precision(name):
    gaussian = FORMS[name](0).damped(0.3)
    matrix = dense(gaussian)
    vector = unflatten(torch.linspace(-1, 1, len(matrix), dtype=torch.float64), gaussian.mean)
    flat = flatten(vector)
    assert torch.allclose(matrix, matrix.T, atol=1e-13)
    assert torch.allclose(flatten(gaussian.solve(vector)), torch.linalg.solve(matrix, flat), atol=1e-10)
    assert float(gaussian.log_determinant()) == pytest.approx(float(torch.logdet(matrix)), rel=1e-10)
    assert torch.allclose(flatten(gaussian.diagonal()), matrix.diagonal(), atol=1e-13)
    assert list(gaussian.diagonal()) == list(gaussian.apply(vector)) == list(gaussian.mean)
    assert gaussian.trace() == pytest.approx(float(matrix.trace()), rel=1e-12)
    assert gaussian.largest_eigenvalue() == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-9)
    assert float(gaussian.quadratic(vector)) == pytest.approx(float(flat @ matrix @ flat), rel=1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_the_product_is_that_of_the_dense_precisions(name):
    posteriors = [FORMS[name](seed) for seed in range(3)]
    found = product(posteriors, WEIGHTS, 0.2)
    eye = torch.eye(posteriors[0].size, dtype=torch.float64)
    expected = dense_product([e.mean for e in posteriors], [dense(e) + 0.2 * eye for e in posteriors], WEIGHTS)
    assert torch.allclose(flatten(found.mean), expected, atol=1e-10)
    assert list(found.mean) == list(posteriors[0].mean)


def damped_matrix(posterior, c_inputs, c_gradients):
    a = posterior.inputs + c_inputs * torch.eye(len(posterior.inputs), dtype=torch.float64)
    g = posterior.slopes + c_gradients * torch.eye(OUTPUTS, dtype=torch.float64)
    return kron_matrix(g, a, len(posterior.mean) > 1)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("relative", [True, False])
def test_the_factored_damping_of_kron(relative, biased):
    posteriors = [of_kron(seed, biased) for seed in range(3)]
    a = sum(w * float(e.inputs.trace()) for w, e in zip(WEIGHTS, posteriors, strict=True)) / len(posteriors[0].inputs)
    g = sum(w * float(e.slopes.trace()) for w, e in zip(WEIGHTS, posteriors, strict=True)) / OUTPUTS
    c_inputs, c_gradients = (0.1 * a, 0.7 * g) if relative else (0.1, 0.7)
    found = Kron.merged(posteriors, WEIGHTS, Merging(0.1, relative, gradients=0.7))
    matrices = [damped_matrix(e, c_inputs, c_gradients) for e in posteriors]
    expected = dense_product([e.mean for e in posteriors], matrices, WEIGHTS)
    assert torch.allclose(flatten(found.mean), expected, atol=1e-10)
    assert found.residual < 1e-12
    damped = Kron.damped_posteriors(posteriors, WEIGHTS, Merging(0.1, relative, gradients=0.7))
    for posterior, matrix in zip(damped, matrices, strict=True):
        assert torch.allclose(dense(posterior), matrix, atol=1e-12)


@pytest.mark.parametrize("form", [of_inputs, of_kron])
def test_isotropic_damping_is_relative_to_the_mean_precision(form):
    posteriors = [form(seed) for seed in range(3)]
    matrices = [dense(e) for e in posteriors]
    gamma = 0.3 * sum(w * float(m.diagonal().mean()) for w, m in zip(WEIGHTS, matrices, strict=True))
    eye = torch.eye(posteriors[0].size, dtype=torch.float64)
    found = type(posteriors[0]).merged(posteriors, WEIGHTS, Merging(0.3, gradients=None))
    expected = dense_product([e.mean for e in posteriors], [m + gamma * eye for m in matrices], WEIGHTS)
    assert torch.allclose(flatten(found.mean), expected, atol=1e-10)


@pytest.mark.parametrize("name", FORMS)
def test_identical_experts_are_reproduced(name):
    posterior = FORMS[name](0)
    found = type(posterior).merged([posterior] * 3, WEIGHTS, Merging(0.01))
    assert largest_difference(found.mean, posterior.mean) < 1e-14
    assert torch.allclose(dense(found), dense(posterior), atol=1e-13)


def test_equal_means_are_reproduced_whatever_the_precisions():
    mean = of_kron(0).mean
    posteriors = [of_kron(seed).with_mean(mean) for seed in range(3)]
    assert largest_difference(Kron.merged(posteriors, WEIGHTS, Merging(0.01)).mean, mean) < 1e-14


def test_with_equal_slopes_kron_is_inputs():
    """All G_n alike, damped or not: they cancel; so does G = I without damping."""
    inputs = [of_inputs(seed) for seed in range(3)]
    expected = Inputs.merged(inputs, WEIGHTS, Merging(0.05)).mean
    common = moment(torch.Generator().manual_seed(9), OUTPUTS)
    for slopes, damping in ((common, 1.0), (torch.eye(OUTPUTS, dtype=torch.float64), 0.0)):
        posteriors = [Kron(e.mean, e.inputs, slopes) for e in inputs]
        found = Kron.merged(posteriors, WEIGHTS, Merging(0.05, gradients=damping))
        assert largest_difference(found.mean, expected) < 1e-10


def test_with_equal_inputs_the_factored_solution_is_exact():
    common = moment(torch.Generator().manual_seed(9), INPUTS + 1)
    posteriors = [Kron(e.mean, common, e.slopes) for e in map(of_kron, range(3))]
    one, other = (
        Kron.merged(posteriors, WEIGHTS, Merging(0.05, gradients=0.5, solver=solver)) for solver in ("cg", "factored")
    )
    assert largest_difference(one.mean, other.mean) < 1e-10
    assert other.residual < 1e-12
    different = Kron.merged([of_kron(seed) for seed in range(3)], WEIGHTS, Merging(0.05, solver="factored"))
    assert different.residual > 1e-3
    assert different.iterations == 0


def test_the_factored_solution_is_that_of_fedlpa():
    posteriors = [of_kron(seed) for seed in range(3)]
    found = Kron.merged(posteriors, WEIGHTS, Merging(0.1, False, gradients=0.1, solver="factored"))
    eyes = [torch.eye(n, dtype=torch.float64) for n in (OUTPUTS, INPUTS + 1)]
    g = sum(w * (e.slopes + 0.1 * eyes[0]) for w, e in zip(WEIGHTS, posteriors, strict=True))
    a = sum(w * (e.inputs + 0.1 * eyes[1]) for w, e in zip(WEIGHTS, posteriors, strict=True))
    middle = sum(
        w * (e.slopes + 0.1 * eyes[0]) @ joined(e.mean) @ (e.inputs + 0.1 * eyes[1])
        for w, e in zip(WEIGHTS, posteriors, strict=True)
    )
    expected = torch.linalg.inv(g) @ middle @ torch.linalg.inv(a)
    assert largest_difference(found.mean, split(expected, posteriors[0].mean)) < 1e-10


def test_huge_damping_is_the_average():
    for form, merging in ((of_inputs, Merging(1e12)), (of_kron, Merging(1e12, gradients=1e12))):
        posteriors = [form(seed) for seed in range(3)]
        average = sum(w * flatten(e.mean) for w, e in zip(WEIGHTS, posteriors, strict=True))
        assert torch.allclose(
            flatten(type(posteriors[0]).merged(posteriors, WEIGHTS, merging).mean), average, atol=1e-6
        )


def test_the_scale_of_all_factors_does_not_matter():
    posteriors = [of_kron(seed) for seed in range(3)]
    merging = Merging(0.1, gradients=0.5)
    once = Kron.merged(posteriors, WEIGHTS, merging).mean
    larger = [Kron(e.mean, 1e3 * e.inputs, 1e-4 * e.slopes) for e in posteriors]
    assert largest_difference(Kron.merged(larger, WEIGHTS, merging).mean, once) < 1e-10


def test_without_any_precision_the_average_is_taken():
    posteriors = [of_kron(seed) for seed in range(3)]
    average = sum(w * flatten(e.mean) for w, e in zip(WEIGHTS, posteriors, strict=True))
    for zero in (
        [Kron(e.mean, 0 * e.inputs, 0 * e.slopes) for e in posteriors],
        [Kron(e.mean, e.inputs, 0 * e.slopes) for e in posteriors],
        [Inputs(e.mean, 0 * e.inputs) for e in posteriors],
    ):
        for merging in (Merging(0.0), Merging(0.1)):
            found = type(zero[0]).merged(zero, WEIGHTS, merging)
            assert torch.allclose(flatten(found.mean), average, atol=1e-12)


def test_units_that_are_dead_and_clients_with_few_samples():
    """Singular factors, and rows of zeros: what no client knows is averaged, the rest is solved."""
    posteriors = [of_kron(seed, rank=2) for seed in range(3)]
    for e in posteriors:
        e.inputs[1] = e.inputs[:, 1] = 0
        e.slopes[2] = e.slopes[:, 2] = 0
    found = Kron.merged(posteriors, WEIGHTS, Merging(0.0, gradients=0.0))
    assert bool(flatten(found.mean).isfinite().all())
    average = sum(w * joined(e.mean) for w, e in zip(WEIGHTS, posteriors, strict=True))
    assert torch.allclose(joined(found.mean)[2], average[2], atol=1e-9)
    assert torch.allclose(joined(found.mean)[:, 1], average[:, 1], atol=1e-9)


def sum_of(posteriors):
    return sum(w * torch.kron(e.slopes, e.inputs) for w, e in zip(WEIGHTS, posteriors, strict=True))


def test_the_product_of_mean_factors_keeps_the_trace():
    posteriors = [of_kron(seed) for seed in range(3)]
    kept = Kron.merged(posteriors, WEIGHTS, Merging(0.1))
    whole = sum_of(posteriors)
    assert kept.trace() == pytest.approx(float(whole.trace()), rel=1e-12)
    mean = sum(w * e.inputs for w, e in zip(WEIGHTS, posteriors, strict=True))
    assert torch.allclose(kept.inputs, mean, atol=1e-14)


def test_the_nearest_kronecker_product_is_the_leading_singular_pair():
    posteriors = [of_kron(seed, rank=1) for seed in range(3)]
    whole = sum_of(posteriors)
    o, i = OUTPUTS, INPUTS + 1
    rearranged = whole.view(o, i, o, i).permute(0, 2, 1, 3).reshape(o * o, i * i)
    u, s, v = torch.linalg.svd(rearranged)
    best = torch.kron((s[0] * u[:, 0]).view(o, o), v[0].view(i, i))
    nearest = Kron.summed(posteriors, WEIGHTS, Merging(projection="nearest"))
    factors = Kron.summed(posteriors, WEIGHTS, Merging())
    found = torch.kron(nearest.slopes, nearest.inputs)
    error, least = float((found - whole).norm()), float((best - whole).norm())
    assert error == pytest.approx(least, rel=1e-3)
    assert error <= float((torch.kron(factors.slopes, factors.inputs) - whole).norm())
    assert float(torch.linalg.eigvalsh(found)[0]) > -1e-12


def test_the_nearest_kronecker_product_splits_its_scale_as_the_mean_factors_do():
    """Rounds are averaged factor by factor, so that the split counts; the product alone leaves it open."""
    posteriors = [of_kron(seed, rank=1) for seed in range(3)]
    nearest = Kron.summed(posteriors, WEIGHTS, Merging(projection="nearest"))
    mean = sum(w * float(e.inputs.trace()) for w, e in zip(WEIGHTS, posteriors, strict=True))
    assert float(nearest.inputs.trace()) == pytest.approx(mean, rel=1e-12)
    nothing = [e.with_parts({"inputs": e.inputs, "slopes": 0 * e.slopes}) for e in posteriors]
    assert Kron.summed(nothing, WEIGHTS, Merging(projection="nearest")).trace() == 0


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["blocks"])
def test_the_prior_loss_and_its_gradient(name, exact):
    gaussian, at = FORMS[name](0), FORMS[name](1).mean
    pull = gaussian.prior(exact).prior_loss(0.7)
    matrix = dense(gaussian)
    matrix = matrix if exact else matrix.diagonal().diag()
    like = Full(gaussian.mean, matrix).prior_loss(0.7)
    assert float(pull.value(at)) == pytest.approx(float(like.value(at)), rel=1e-12)
    assert largest_difference(pull.grad(at), grad(pull.value)(at)) < 1e-12
    assert largest_difference(pull.grad(at), like.grad(at)) < 1e-12
    assert list(pull.grad(at)) == list(at)


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_trees_and_are_put_together_again(name):
    gaussian = FORMS[name](0)
    leaves, structure = trees.flatten(gaussian)
    again = trees.unflatten(leaves, trees.structure_from_text(trees.structure_as_text(structure)))
    assert type(again) is type(gaussian)
    assert torch.equal(dense(again), dense(gaussian))
    assert trees.structure(FORMS[name](1)) == structure
    rebuilt = gaussian.with_parts(gaussian.parts())
    assert torch.equal(dense(rebuilt), dense(gaussian))


def test_symmetric_matrices_are_sent_as_triangles():
    assert of_inputs(0).numbers_sent() == 15 + 15
    assert of_kron(0).numbers_sent() == 15 + 15 + 6
    assert of_kron(0).with_mean({}).numbers_sent() == 15 + 6
    assert mixed(0).numbers_sent() == 15 + 3 + 4 + 2 + 2 + (15 + 6) + 3 + 3 + 3 + 0


def test_the_preconditioner_saves_iterations_and_the_tolerance_is_kept(monkeypatch):
    monkeypatch.setattr(kronecker_solve, "TOLERANCE", 1e-3)
    stream = torch.Generator().manual_seed(0)
    scales = torch.logspace(-3, 3, 12, dtype=torch.float64)
    common = moment(stream, 12) * scales[:, None] * scales
    posteriors = []
    for seed in range(3):
        own = torch.Generator().manual_seed(seed)
        jitter = moment(own, 12) * 0.01 * scales[:, None] * scales
        posteriors.append(Kron(layer(own, biased=False, shape=(6, 12)), common + jitter, moment(own, 6)))
    found = Kron.merged(posteriors, WEIGHTS, Merging(0.0, gradients=0.1))
    assert 0 < found.iterations < 20
    assert found.residual <= 1e-3
    assert found.notes() == {"solver_iterations": found.iterations, "solver_residual": found.residual}
    monkeypatch.setattr(kronecker_solve.KronSum, "_preconditioner", lambda self: lambda residual: residual)
    assert Kron.merged(posteriors, WEIGHTS, Merging(0.0, gradients=0.1)).iterations > 2 * found.iterations


def test_means_that_are_not_finite_stay_so():
    posteriors = [of_kron(seed) for seed in range(2)]
    posteriors[0].mean["w"][0, 0] = float("nan")
    assert not bool(flatten(Kron.merged(posteriors, [0.5, 0.5], Merging(0.1)).mean).isfinite().all())


def test_single_precision_factors_come_back_in_their_type():
    single = [trees.map_tensors(torch.Tensor.float, of_kron(seed)) for seed in range(3)]
    found = Kron.merged(single, WEIGHTS, Merging(0.1))
    assert {v.dtype for v in (*found.mean.values(), found.inputs, found.slopes)} == {torch.float32}
    exact = Kron.merged([of_kron(seed) for seed in range(3)], WEIGHTS, Merging(0.1))
    assert largest_difference(found.mean, {k: v.float() for k, v in exact.mean.items()}) < 1e-4
