import pytest
import torch
from torch.distributions import MultivariateNormal

from fl_lightning.posterior import Gaussian, collapse, product


def gaussians(number=3, size=4, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return [
        Gaussian(
            {"w": torch.randn(size, generator=stream, dtype=torch.float64)},
            {"w": torch.rand(size, generator=stream, dtype=torch.float64) + 0.1},
        )
        for _ in range(number)
    ]


def dense(gaussian):
    return MultivariateNormal(gaussian.mean["w"], precision_matrix=gaussian.precision["w"].diag())


def test_log_density_and_distance():
    (gaussian,) = gaussians(1)
    theta = {"w": torch.linspace(-1, 1, 4, dtype=torch.float64)}
    assert float(gaussian.log_density(theta)) == pytest.approx(float(dense(gaussian).log_prob(theta["w"])))
    offset = theta["w"] - gaussian.mean["w"]
    assert float(gaussian.distance(theta)) == pytest.approx(
        float(0.5 * offset @ gaussian.precision["w"].diag() @ offset)
    )
    assert float(gaussian.distance(gaussian.mean)) == 0


def test_the_product_is_proportional_to_the_weighted_product_of_densities():
    experts, weights = gaussians(), [0.5, 0.3, 0.2]
    result = product(experts, weights)
    differences = []
    for seed in range(5):
        theta = {"w": torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}
        total = sum(w * dense(e).log_prob(theta["w"]) for w, e in zip(weights, experts, strict=True))
        differences.append(float(total - dense(result).log_prob(theta["w"])))
    assert max(differences) - min(differences) < 1e-12  # a constant


def test_damping_enters_both_sides_of_the_product():
    experts, weights = gaussians(), [0.5, 0.3, 0.2]
    by_hand = [Gaussian(e.mean, {"w": e.precision["w"] + 0.7}) for e in experts]
    damped = product(experts, weights, damping=0.7)
    assert torch.allclose(damped.mean["w"], product(by_hand, weights).mean["w"])


def test_identical_experts_are_reproduced():
    (expert,) = gaussians(1)
    result = product([expert] * 3, [0.2, 0.3, 0.5], damping=0.1)
    assert torch.allclose(result.mean["w"], expert.mean["w"], atol=1e-15)


def test_improper_coordinates_take_the_average():
    experts = [Gaussian(g.mean, {"w": g.precision["w"] * torch.tensor([1.0, 0, 1, 0])}) for g in gaussians(2)]
    mean = product(experts, [0.25, 0.75]).mean["w"]
    average = 0.25 * experts[0].mean["w"] + 0.75 * experts[1].mean["w"]
    assert torch.equal(mean[1::2], average[1::2])
    assert bool(mean.isfinite().all())


def test_the_collapse_has_the_moments_of_the_mixture():
    components, weights = gaussians(), [0.5, 0.3, 0.2]
    result = collapse(components, weights)
    mean = sum(w * c.mean["w"] for w, c in zip(weights, components, strict=True))
    covariance = sum(
        w * (c.precision["w"].reciprocal().diag() + torch.outer(c.mean["w"], c.mean["w"]) - torch.outer(mean, mean))
        for w, c in zip(weights, components, strict=True)
    )
    assert torch.allclose(result.mean["w"], mean)
    assert torch.allclose(result.precision["w"].reciprocal(), covariance.diag())


def test_the_collapse_minimises_the_divergence():
    """KL(mixture || q) = -E_mixture[ln q] + const is smallest at the collapse; checked by quadrature in 1-D."""
    components = [
        Gaussian({"w": torch.tensor([m], dtype=torch.float64)}, {"w": torch.tensor([p], dtype=torch.float64)})
        for m, p in ((-1.0, 2.0), (2.0, 0.5))
    ]
    weights = [0.4, 0.6]
    grid = torch.linspace(-15, 15, 20001, dtype=torch.float64)
    mixture = sum(w * torch.exp(dense(c).log_prob(grid[:, None])) for w, c in zip(weights, components, strict=True))

    def cross_entropy(q):
        return float(-(mixture * dense(q).log_prob(grid[:, None])).sum() * (grid[1] - grid[0]))

    best = collapse(components, weights)
    for shift, scale in ((0.1, 1.0), (-0.1, 1.0), (0.0, 1.1), (0.0, 0.9)):
        other = Gaussian({"w": best.mean["w"] + shift}, {"w": best.precision["w"] * scale})
        assert cross_entropy(other) > cross_entropy(best)


def test_float32_in_float32_out():
    single = [Gaussian({"w": g.mean["w"].float()}, {"w": g.precision["w"].float()}) for g in gaussians()]
    for combine in (product, collapse):
        result = combine(single, [0.5, 0.3, 0.2])
        assert result.mean["w"].dtype == result.precision["w"].dtype == torch.float32
