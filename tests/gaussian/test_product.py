import math

import pytest
import torch
from torch.distributions import MultivariateNormal
from torch.func import grad

from fl_lightning.gaussian.base import PriorLoss
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.full import Full, largest_eigenvalue
from fl_lightning.gaussian.product import product
from fl_lightning.params import flatten, unflatten


def gaussians(number=3, size=4, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return [
        Diagonal(
            {"w": torch.randn(size, generator=stream, dtype=torch.float64)},
            {"w": torch.rand(size, generator=stream, dtype=torch.float64) + 0.1},
        )
        for _ in range(number)
    ]


def dense(gaussian):
    return MultivariateNormal(gaussian.mean["w"], precision_matrix=gaussian.precision["w"].diag())


def test_distance():
    (gaussian,) = gaussians(1)
    theta = {"w": torch.linspace(-1, 1, 4, dtype=torch.float64)}
    offset = theta["w"] - gaussian.mean["w"]
    assert float(gaussian.distance(theta)) == pytest.approx(
        float(0.5 * offset @ gaussian.precision["w"].diag() @ offset)
    )
    assert float(gaussian.distance(gaussian.mean)) == 0


def test_the_product_is_proportional_to_the_weighted_product_of_densities():
    posteriors, weights = gaussians(), [0.5, 0.3, 0.2]
    result = product(posteriors, weights)
    differences = []
    for seed in range(5):
        theta = {"w": torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}
        total = sum(w * dense(e).log_prob(theta["w"]) for w, e in zip(weights, posteriors, strict=True))
        differences.append(float(total - dense(result).log_prob(theta["w"])))
    assert max(differences) - min(differences) < 1e-12  # a constant


def test_damping_enters_both_sides_of_the_product():
    posteriors, weights = gaussians(), [0.5, 0.3, 0.2]
    by_hand = [Diagonal(e.mean, {"w": e.precision["w"] + 0.7}) for e in posteriors]
    damped = product(posteriors, weights, damping=0.7)
    assert torch.allclose(damped.mean["w"], product(by_hand, weights).mean["w"])


def test_identical_experts_are_reproduced():
    (posterior,) = gaussians(1)
    result = product([posterior] * 3, [0.2, 0.3, 0.5], damping=0.1)
    assert torch.allclose(result.mean["w"], posterior.mean["w"], atol=1e-15)


def test_improper_coordinates_take_the_average():
    posteriors = [Diagonal(g.mean, {"w": g.precision["w"] * torch.tensor([1.0, 0, 1, 0])}) for g in gaussians(2)]
    mean = product(posteriors, [0.25, 0.75]).mean["w"]
    average = 0.25 * posteriors[0].mean["w"] + 0.75 * posteriors[1].mean["w"]
    assert torch.equal(mean[1::2], average[1::2])
    assert bool(mean.isfinite().all())


def test_float32_in_float32_out():
    single = [Diagonal({"w": g.mean["w"].float()}, {"w": g.precision["w"].float()}) for g in gaussians()]
    result = product(single, [0.5, 0.3, 0.2])
    assert result.mean["w"].dtype == result.precision["w"].dtype == torch.float32


def full_gaussians(number=3, seed=0, rank=5):
    """Full Gaussians over two parameters of 2 x 2 and 1 entries, in float64."""
    stream = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        root = torch.randn(5, rank, generator=stream, dtype=torch.float64)
        mean = {
            "w": torch.randn(2, 2, generator=stream, dtype=torch.float64),
            "b": torch.randn(1, generator=stream, dtype=torch.float64),
        }
        found.append(Full(mean, root @ root.T))
    return found


def as_normal(gaussian):
    matrix = gaussian.matrix + gaussian.damping * torch.eye(5, dtype=torch.float64)
    return MultivariateNormal(flatten(gaussian.mean), precision_matrix=matrix)


def test_a_full_gaussian_is_the_multivariate_normal():
    gaussian = full_gaussians(1)[0].damped(0.3)
    theta = unflatten(torch.linspace(-1, 1, 5, dtype=torch.float64), gaussian.mean)
    expected = as_normal(gaussian)
    below = expected.log_prob(expected.loc) - expected.log_prob(flatten(theta))
    assert float(gaussian.distance(theta)) == pytest.approx(float(below))
    matrix = expected.precision_matrix
    assert torch.allclose(flatten(gaussian.apply(theta)), matrix @ flatten(theta))
    assert torch.allclose(flatten(gaussian.solve(theta)), torch.linalg.solve(matrix, flatten(theta)))
    assert float(gaussian.quadratic(theta)) == pytest.approx(float(flatten(theta) @ matrix @ flatten(theta)))
    offset = flatten(theta) - flatten(gaussian.mean)
    assert float(gaussian.distance(theta)) == pytest.approx(float(0.5 * offset @ matrix @ offset))


def test_the_full_product_is_proportional_to_the_weighted_product_of_densities():
    posteriors, weights = [g.damped(d) for g, d in zip(full_gaussians(), (0.1, 0.2, 0.7), strict=True)], [0.5, 0.3, 0.2]
    result = product(posteriors, weights, damping=0.05)
    damped = [as_normal(posterior.damped(0.05)) for posterior in posteriors]
    differences = []
    for seed in range(5):
        theta = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        total = sum(w * e.log_prob(theta) for w, e in zip(weights, damped, strict=True))
        differences.append(float(total - as_normal(result).log_prob(theta)))
    assert max(differences) - min(differences) < 1e-11
    assert torch.allclose(result.matrix, sum(w * e.matrix for w, e in zip(weights, posteriors, strict=True)))
    assert result.raises == 0


def test_quadratic_clients_with_exact_curvature_give_the_exact_optimum():
    posteriors, weights = full_gaussians(), [0.5, 0.3, 0.2]
    best = product(posteriors, weights).mean
    slope = sum(
        w * e.matrix @ (flatten(best) - flatten(e.mean)) for w, e in zip(weights, posteriors, strict=True)
    )  # of sum_n w_n 1/2 (theta - mu_n)^T Lambda_n (theta - mu_n)
    assert slope.abs().max() < 1e-12


def test_identical_full_experts_are_reproduced_exactly():
    (posterior,) = full_gaussians(1, rank=2)
    result = product([posterior] * 3, [0.25, 0.25, 0.5], damping=1e-6)
    assert torch.equal(flatten(result.mean), flatten(posterior.mean))


def test_directions_without_precision_take_the_average():
    posteriors, weights = full_gaussians(2, rank=2), [0.25, 0.75]
    null = torch.linalg.svd(sum(e.matrix for e in posteriors))[2][4]  # rank 4 of 5
    result = product(posteriors, weights, damping=1e-9)
    average = 0.25 * flatten(posteriors[0].mean) + 0.75 * flatten(posteriors[1].mean)
    assert float(null @ flatten(result.mean)) == pytest.approx(float(null @ average), abs=1e-6)


@pytest.mark.parametrize("damping", [0.0, 1e-30])
def test_a_singular_system_raises_its_damping_and_is_never_nan(damping):
    posteriors = [Full(g.mean, g.matrix - 1e-9 * torch.eye(5, dtype=torch.float64)) for g in full_gaussians(2, rank=2)]
    kept = [posterior.matrix.clone() for posterior in posteriors]
    result = product(posteriors, [0.5, 0.5], damping)
    assert result.raises > 0
    assert 1e-9 < result.damping < 1e-6
    assert bool(flatten(result.mean).isfinite().all())
    assert all(torch.equal(posterior.matrix, was) for posterior, was in zip(posteriors, kept, strict=True))
    nothing = product([Full(g.mean, torch.zeros(5, 5, dtype=torch.float64)) for g in posteriors], [0.25, 0.75], 0.0)
    average = 0.25 * flatten(posteriors[0].mean) + 0.75 * flatten(posteriors[1].mean)
    assert torch.allclose(flatten(nothing.mean), average)


def test_a_matrix_that_is_not_finite_shows():
    broken = [Full(g.mean, g.matrix * float("nan")) for g in full_gaussians(2)]
    assert bool(flatten(product(broken, [0.5, 0.5]).mean).isnan().all())  # the loop then says that training diverged


def test_a_diagonal_in_full_form_gives_the_diagonal_product():
    diagonals, weights = gaussians(), [0.5, 0.3, 0.2]
    full = [Full(g.mean, g.precision["w"].diag()) for g in diagonals]
    assert torch.allclose(product(full, weights, 0.3).mean["w"], product(diagonals, weights, 0.3).mean["w"])
    theta = {"w": torch.linspace(-1, 1, 4, dtype=torch.float64)}
    for one, other in zip(full, diagonals, strict=True):
        assert torch.allclose(one.apply(theta)["w"], other.apply(theta)["w"])
        assert torch.allclose(one.solve(theta)["w"], other.solve(theta)["w"])
        assert torch.allclose(one.damped(2.0).distance(theta), other.damped(2.0).distance(theta))


def test_full_matrices_stay_in_their_type_and_are_read_in_blocks(monkeypatch):
    doubles = full_gaussians()
    single = [Full({k: v.float() for k, v in g.mean.items()}, g.matrix.float()) for g in doubles]
    result = product(single, [0.5, 0.3, 0.2], 1e-3)
    assert result.matrix.dtype == result.mean["w"].dtype == torch.float32
    assert torch.allclose(result.mean["w"].double(), product(doubles, [0.5, 0.3, 0.2], 1e-3).mean["w"], atol=1e-4)
    monkeypatch.setattr("fl_lightning.gaussian.full.ROWS", 2)
    in_blocks = product(single, [0.5, 0.3, 0.2], 1e-3)
    assert torch.allclose(in_blocks.mean["w"], result.mean["w"])


def test_the_largest_eigenvalue():
    (gaussian,) = full_gaussians(1)
    expected = float(torch.linalg.eigvalsh(gaussian.matrix)[-1])
    assert largest_eigenvalue(gaussian.matrix) == pytest.approx(expected, rel=1e-3)
    assert largest_eigenvalue(torch.zeros(3, 3)) == 0


def test_the_largest_eigenvalue_hides_in_no_start():
    """Of two-class softmax regression, whose diagonal is a null vector; of blocks; of many close ones, in float32."""
    inputs = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    two_classes = torch.kron(torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64), inputs.T @ inputs / 200)
    assert float((two_classes @ two_classes.diagonal()).norm()) < 1e-12
    blocks = torch.block_diag(torch.tensor([[2.0]]), torch.ones(3, 3)).double()
    turn = torch.linalg.qr(torch.randn(300, 300, generator=torch.Generator().manual_seed(1)))[0]
    close = turn @ torch.diag(torch.linspace(0.5, 1.0, 300)) @ turn.T
    for matrix, tolerance in ((two_classes, 1e-10), (blocks, 1e-10), (close, 2e-3)):
        expected = float(torch.linalg.eigvalsh(matrix.double())[-1])
        assert largest_eigenvalue(matrix) == pytest.approx(expected, rel=tolerance)
    assert math.isnan(largest_eigenvalue(torch.full((4, 4), torch.nan)))


@pytest.mark.parametrize("strength", [1.0, 3.0])
def test_the_prior_loss_of_any_form(strength):
    for gaussian in (full_gaussians(1)[0].damped(0.2), gaussians(1)[0]):
        penalty = PriorLoss(gaussian, strength)
        theta = {name: value + 0.5 for name, value in gaussian.mean.items()}
        assert float(penalty.value(theta)) == pytest.approx(strength * float(gaussian.distance(theta)))
        expected = grad(penalty.value)(theta)
        for name, slope in penalty.grad(theta).items():
            assert torch.allclose(slope, expected[name])
            assert bool((slope != 0).any())
