"""The ridge of a mixture of Gaussian posteriors, on which all its critical points and the product's mode lie.

    theta(pi) = (sum_n pi_n Lambda_n)^-1 sum_n pi_n Lambda_n mu_n          pi_n >= 0, sum_n pi_n = 1

At a critical point of sum_n beta_n q_n the gradient -sum_n beta_n q_n(theta) Lambda_n (theta - mu_n) is zero, so that
theta = theta(pi) with pi_n = beta_n q_n(theta) / sum_k beta_k q_k(theta): the share of each posterior in the density
there. For two posteriors the ridge is a line from mu_2 (pi_1 = 0) to mu_1 (pi_1 = 1), straight if their precisions are
equal. The plain average lies on the straight line and may fall into the valley between the modes.

Ray, Lindsay: The topography of multivariate normal mixtures, Annals of Statistics 2005.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.full import Full
from fl_lightning.gaussian.product import product
from fl_lightning.params import Params, cast_like, flatten, weighted_sum

# Values of pi_1 at which the paper's curves are drawn.
SHARES = tuple(i / 20 for i in range(21))
# Intervals in which a critical point is looked for.
GRID = 4000

Array = NDArray[np.float64]


def ridge_point(posteriors: Sequence[Gaussian], shares: Sequence[float]) -> Params:
    """theta(pi) for any number of posteriors of one form; a single posterior with all of pi gives its own mean."""
    _check_shares(shares)
    counted = [(q, share) for q, share in zip(posteriors, shares, strict=True) if share > 0]
    if len(counted) == 1:
        return dict(counted[0][0].mean)
    return product([q for q, _ in counted], [share for _, share in counted]).mean


def ridge_line(first: Gaussian, second: Gaussian, shares: Sequence[float] = SHARES) -> Iterator[Params]:
    """theta(pi_1) between two posteriors, one model at a time."""
    for share in shares:
        yield ridge_point([first, second], [share, 1 - share])


def straight_line(first: Params, second: Params, shares: Sequence[float] = SHARES) -> Iterator[Params]:
    """The averages pi_1 mu_1 + (1 - pi_1) mu_2, FedAvg's models."""
    for share in shares:
        _check_shares([share, 1 - share])
        yield cast_like(weighted_sum([first, second], [share, 1 - share]), first)


class CriticalPoint(NamedTuple):
    """Where the gradient of a mixture is zero.

    Attributes:
        share: pi_1 of the point.
        place: theta, flat.
        kind: mode, antimode or saddle.
        density: Of the mixture.
    """

    share: float
    place: Array
    kind: str
    density: float


def critical_points(first: Full, second: Full, weight: float = 0.5) -> list[CriticalPoint]:
    """All critical points of the mixture weight q_1 + (1 - weight) q_2, from mu_2 to mu_1; for few dimensions.

    They are the solutions of log(weight q_1 / (1 - weight) q_2)(theta(pi_1)) = logit(pi_1), one equation in one
    unknown: its changes of sign on a grid of logit(pi_1), refined by bisection.
    """
    require(0 < weight < 1, f"the weight of the first posterior must lie in (0, 1), got {weight}")

    def excess(logits: Tensor) -> Tensor:
        points = _points(first, second, logits)
        return log_density(first, points) - log_density(second, points) + offset - logits

    offset = math.log(weight / (1 - weight))
    ends = _points(first, second, torch.tensor([-700.0, 700.0], dtype=torch.float64))
    span = (log_density(first, ends) - log_density(second, ends) + offset).sort().values
    grid = torch.linspace(float(span[0]) - 1, float(span[1]) + 1, GRID + 1, dtype=torch.float64)
    positive = excess(grid) > 0
    changes = torch.nonzero(positive[1:] != positive[:-1]).flatten()
    low, high, left = grid[changes], grid[changes + 1], positive[changes]
    for _ in range(80):
        middle = (low + high) / 2
        same = (excess(middle) > 0) == left
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    found = []
    for share, place in zip(low.sigmoid().tolist(), _points(first, second, low), strict=True):
        density = _mixture(first, second, weight, place[None])[0]
        found.append(CriticalPoint(share, place.numpy(), _kind(first, second, weight, place), float(density)))
    return found


def log_density(gaussian: Full, points: Tensor) -> Tensor:
    """The logarithm of a Gaussian's density at several flat points."""
    offsets = points - flatten(gaussian.mean).double()
    matrix = _precision(gaussian)
    constant = float(torch.linalg.slogdet(matrix)[1]) - points.shape[-1] * math.log(2 * math.pi)
    return 0.5 * constant - 0.5 * torch.einsum("...i,ij,...j->...", offsets, matrix, offsets)


class Landscape(NamedTuple):
    """Two posteriors in the plane and what follows from them, as arrays for a picture.

    Attributes:
        x: Grid of the first coordinate.
        y: Grid of the second one.
        first: Density of the first posterior, by (y, x).
        second: Density of the second posterior.
        mixture: Density of their mixture.
        shares: pi_1 along the lines below.
        ridge: Points theta(pi_1), one row each.
        line: Points of the straight line between the means.
        critical: The mixture's critical points.
        average: FedAvg's model, the weighted mean.
        average_density: The mixture there.
        product: The mode of the product, the paper's model.
        product_density: The mixture there.
    """

    x: Array
    y: Array
    first: Array
    second: Array
    mixture: Array
    shares: Array
    ridge: Array
    line: Array
    critical: list[CriticalPoint]
    average: Array
    average_density: float
    product: Array
    product_density: float


def landscape(first: Full, second: Full, weight: float = 0.5, resolution: int = 121, points: int = 201) -> Landscape:
    """The paper's opening picture for two posteriors over two parameters."""
    means = torch.stack([flatten(first.mean), flatten(second.mean)]).double()
    require(means.shape[1] == 2, f"a landscape needs posteriors over 2 parameters, got {means.shape[1]}")
    spreads = torch.stack([torch.linalg.inv(_precision(q)).diagonal().sqrt() for q in (first, second)])
    low, high = (means - 2.5 * spreads).amin(0), (means + 2.5 * spreads).amax(0)
    x, y = (torch.linspace(float(low[i]), float(high[i]), resolution, dtype=torch.float64) for i in range(2))
    places = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
    shares = torch.linspace(0, 1, points, dtype=torch.float64)
    ridge = _points(first, second, torch.logit(shares).clamp(-700, 700))
    line = shares[:, None] * means[0] + (1 - shares)[:, None] * means[1]
    average = weight * means[0] + (1 - weight) * means[1]
    mode = flatten(ridge_point([first, second], [weight, 1 - weight])).double()

    def height(places: Tensor) -> Array:
        return _mixture(first, second, weight, places).numpy()

    return Landscape(
        x=x.numpy(),
        y=y.numpy(),
        first=log_density(first, places).exp().numpy(),
        second=log_density(second, places).exp().numpy(),
        mixture=height(places),
        shares=shares.numpy(),
        ridge=ridge.numpy(),
        line=line.numpy(),
        critical=critical_points(first, second, weight),
        average=average.numpy(),
        average_density=float(height(average[None])[0]),
        product=mode.numpy(),
        product_density=float(height(mode[None])[0]),
    )


def demo_posteriors() -> tuple[Full, Full]:
    """Two posteriors that agree on a corner: the average of their means misses it, their product finds it."""

    def posterior(mean: tuple[float, float], covariance: tuple[tuple[float, float], tuple[float, float]]) -> Full:
        matrix = torch.linalg.inv(torch.tensor(covariance, dtype=torch.float64))
        return Full({"theta": torch.tensor(mean, dtype=torch.float64)}, matrix)

    return (
        posterior((-1.5, 0.0), ((1.2, 0.25), (0.25, 0.2))),
        posterior((1.0, 2.5), ((0.2, 0.25), (0.25, 1.2))),
    )


def _check_shares(shares: Sequence[float]) -> None:
    require(
        all(0 <= share <= 1 for share in shares) and abs(sum(shares) - 1) < 1e-9,
        f"shares pi must lie in [0, 1] and sum to 1, got {', '.join(f'{share:g}' for share in shares)}",
    )


def _precision(gaussian: Full) -> Tensor:
    matrix = gaussian.matrix.double()
    return matrix + gaussian.damping * torch.eye(len(matrix), dtype=torch.float64)


def _points(first: Full, second: Full, logits: Tensor) -> Tensor:
    """The ridge at several logit(pi_1): in logits, a pi_1 near 1 keeps its digits."""
    one, two = _precision(first), _precision(second)
    mean_one, mean_two = flatten(first.mean).double(), flatten(second.mean).double()
    a, b = logits.sigmoid()[:, None, None], (-logits).sigmoid()[:, None, None]
    moment = a[..., 0] * (one @ mean_one) + b[..., 0] * (two @ mean_two)
    solution: Tensor = torch.linalg.solve(a * one + b * two, moment)
    return solution


def _mixture(first: Full, second: Full, weight: float, points: Tensor) -> Tensor:
    return weight * log_density(first, points).exp() + (1 - weight) * log_density(second, points).exp()


def _kind(first: Full, second: Full, weight: float, place: Tensor) -> str:
    """By the signs of the curvature of the density."""
    hessian = torch.zeros(len(place), len(place), dtype=torch.float64)
    for gaussian, share in ((first, weight), (second, 1 - weight)):
        matrix = _precision(gaussian)
        gradient = matrix @ (place - flatten(gaussian.mean).double())
        height = share * log_density(gaussian, place[None])[0].exp()
        hessian += height * (torch.outer(gradient, gradient) - matrix)
    values = torch.linalg.eigvalsh(hessian)
    if bool((values < 0).all()):
        return "mode"
    return "antimode" if bool((values > 0).all()) else "saddle"
