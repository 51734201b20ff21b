"""The ridge line, and the theorem that every critical point of a mixture lies on it."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fl_lightning.errors import UserError
from fl_lightning.gaussian import ridge
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.full import Full
from fl_lightning.params import flatten


def full(seed, size=3, scale=1.0):
    stream = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size, generator=stream, dtype=torch.float64)
    mean = scale * torch.randn(size, generator=stream, dtype=torch.float64)
    return Full({"theta": mean}, root @ root.T + 0.3 * torch.eye(size, dtype=torch.float64))


def diagonal(seed, size=3):
    stream = torch.Generator().manual_seed(seed)
    mean = torch.randn(size, generator=stream, dtype=torch.float64)
    return Diagonal({"theta": mean}, {"theta": torch.rand(size, generator=stream, dtype=torch.float64) + 0.1})


@pytest.mark.parametrize("make", [full, diagonal])
def test_the_ends_are_the_means(make):
    one, two = make(1), make(2)
    points = [flatten(p) for p in ridge.ridge_line(one, two)]
    assert len(points) == 21
    assert torch.equal(points[0], flatten(two.mean))
    assert torch.equal(points[-1], flatten(one.mean))
    near = [flatten(p) for p in ridge.ridge_line(one, two, [1e-9, 1 - 1e-9])]
    assert torch.allclose(near[0], flatten(two.mean), atol=1e-6)  # and the line comes from there
    assert torch.allclose(near[1], flatten(one.mean), atol=1e-6)


@pytest.mark.parametrize("make", [full, diagonal])
def test_equal_precisions_give_the_straight_line(make):
    one = make(1)
    two = type(one)({"theta": make(2).mean["theta"]}, one.matrix if isinstance(one, Full) else one.precision)
    pairs = zip(ridge.ridge_line(one, two), ridge.straight_line(one.mean, two.mean), strict=True)
    assert all(torch.allclose(flatten(a), flatten(b), atol=1e-13) for a, b in pairs)
    bent = zip(ridge.ridge_line(make(1), make(2)), ridge.straight_line(one.mean, make(2).mean), strict=True)
    assert any((flatten(a) - flatten(b)).abs().max() > 1e-2 for a, b in bent)


def test_the_formula():
    one, two = full(1), full(2)
    pi = 0.3
    left = pi * one.matrix + (1 - pi) * two.matrix
    right = pi * one.matrix @ flatten(one.mean) + (1 - pi) * two.matrix @ flatten(two.mean)
    assert torch.allclose(flatten(ridge.ridge_point([one, two], [pi, 1 - pi])), torch.linalg.solve(left, right))


def test_more_than_two_posteriors():
    posteriors = [full(seed) for seed in range(3)]
    shares = [0.2, 0.5, 0.3]
    left = sum(s * q.matrix for s, q in zip(shares, posteriors, strict=True))
    right = sum(s * q.matrix @ flatten(q.mean) for s, q in zip(shares, posteriors, strict=True))
    assert torch.allclose(flatten(ridge.ridge_point(posteriors, shares)), torch.linalg.solve(left, right))
    corner = ridge.ridge_point(posteriors, [0, 1, 0])
    assert torch.equal(flatten(corner), flatten(posteriors[1].mean))


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_shares_outside_the_unit_interval_are_refused(share):
    with pytest.raises(UserError, match=r"must lie in \[0, 1\] and sum to 1"):
        list(ridge.ridge_line(full(1), full(2), [share]))
    with pytest.raises(UserError, match=r"must lie in \[0, 1\]"):
        list(ridge.straight_line(full(1).mean, full(2).mean, [share]))


def slope(one, two, weight, place):
    """The gradient of the logarithm of the mixture, by autograd."""
    theta = place.clone().requires_grad_()
    parts = [
        torch.log(torch.tensor(w, dtype=torch.float64))
        + torch.distributions.MultivariateNormal(flatten(q.mean), precision_matrix=q.matrix).log_prob(theta)
        for q, w in ((one, weight), (two, 1 - weight))
    ]
    return torch.autograd.grad(torch.logsumexp(torch.stack(parts), 0), theta)[0]


def stationary(one, two, weight, start):
    """A critical point by Newton's method from a start, knowing nothing of ridges; None if it does not converge."""
    place = start
    for _ in range(40):
        g = analytic_gradient(one, two, weight, place)
        if g.norm() < 1e-13:
            break
        jacobian = torch.func.jacrev(lambda p: analytic_gradient(one, two, weight, p))(place)
        step, info = torch.linalg.solve_ex(jacobian, g)
        if int(info) or not bool(step.isfinite().all()):
            return None
        place = place - step / max(1.0, float(step.norm()) / 0.5)  # short steps: it must not leave the region
    return place if slope(one, two, weight, place).norm() < 1e-10 else None


def analytic_gradient(one, two, weight, place):
    logs = torch.stack([ridge.log_density(one, place), ridge.log_density(two, place)])
    shares = torch.softmax(logs + torch.tensor([weight, 1 - weight], dtype=torch.float64).log(), 0)
    pulls = [q.matrix @ (flatten(q.mean) - place) for q in (one, two)]
    return shares[0] * pulls[0] + shares[1] * pulls[1]


def distance_to_ridge(one, two, place):
    """By brute force over pi_1, refined around the best."""
    low, high = -40.0, 40.0
    best = float("inf")
    for _ in range(12):
        grid = torch.linspace(low, high, 401, dtype=torch.float64)
        distances = (ridge._points(one, two, grid) - place).norm(dim=1)
        index = int(distances.argmin())
        best = float(distances[index])
        low, high = float(grid[max(0, index - 1)]), float(grid[min(400, index + 1)])
    return best


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(1, 3),
    seed=st.integers(0, 10_000),
    scale=st.floats(0.2, 1.5),
    weight=st.floats(0.2, 0.8),
    start=st.floats(0, 1),
)
def test_every_critical_point_lies_on_the_ridge(size, seed, scale, weight, start):
    """The appendix's theorem: points found by Newton's method, from starts off the ridge, all lie on it."""
    one, two = full(seed, size, scale), full(seed + 20_000, size, scale)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    begin = start * flatten(one.mean) + (1 - start) * flatten(two.mean) + 0.3 * noise
    place = stationary(one, two, weight, begin)
    assume(place is not None)
    assert distance_to_ridge(one, two, place) < 1e-6
    known = ridge.critical_points(one, two, weight)
    assert min(np.linalg.norm(point.place - place.numpy()) for point in known) < 1e-6


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(size=st.integers(1, 3), seed=st.integers(0, 10_000), scale=st.floats(0.2, 4.0), weight=st.floats(0.1, 0.9))
def test_critical_points_are_critical_and_start_and_end_with_modes(size, seed, scale, weight):
    one, two = full(seed, size, scale), full(seed + 20_000, size, scale)
    found = ridge.critical_points(one, two, weight)
    for point in found:
        assert slope(one, two, weight, torch.from_numpy(point.place)).norm() < 1e-6
    assert len(found) % 2 == 1
    assert [point.kind == "mode" for point in found] == [i % 2 == 0 for i in range(len(found))]


def test_two_far_modes_have_a_saddle_between_them():
    eye = torch.eye(2, dtype=torch.float64)
    one = Full({"theta": torch.tensor([-3.0, 0.0], dtype=torch.float64)}, eye)
    two = Full({"theta": torch.tensor([3.0, 0.0], dtype=torch.float64)}, eye)
    found = ridge.critical_points(one, two)
    assert [point.kind for point in found] == ["mode", "saddle", "mode"]
    assert np.allclose(found[1].place, 0, atol=1e-12)
    line = [Full({"theta": q.mean["theta"][:1]}, eye[:1, :1]) for q in (one, two)]
    assert [point.kind for point in ridge.critical_points(*line)] == ["mode", "antimode", "mode"]
    with pytest.raises(UserError, match="must lie in"):
        ridge.critical_points(one, two, 1.0)


def test_the_opening_picture_shows_what_it_claims():
    found = ridge.landscape(*ridge.demo_posteriors())
    assert found.mixture.shape == (121, 121)
    assert found.product_density > 2 * found.average_density  # the valley and the ridge
    on_ridge = np.abs(found.ridge - found.product).sum(1).argmin()
    assert np.allclose(found.ridge[on_ridge], found.product, atol=1e-12)
    assert np.allclose(found.line[100], found.average)
    assert np.allclose(found.ridge[[0, -1]], [[1.0, 2.5], [-1.5, 0.0]])
    assert [point.kind for point in found.critical].count("mode") == 2
    cell = (found.x[1] - found.x[0]) * (found.y[1] - found.y[0])
    assert found.mixture.sum() * cell == pytest.approx(1, abs=0.03)
    place = np.unravel_index(found.mixture.argmax(), found.mixture.shape)
    highest = max(found.critical, key=lambda point: point.density)
    assert np.allclose([found.x[place[1]], found.y[place[0]]], highest.place, atol=0.1)
    with pytest.raises(UserError, match="over 2 parameters, got 3"):
        ridge.landscape(full(1), full(2))
