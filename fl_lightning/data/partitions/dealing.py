"""What all partitions are made of: the samples of each class, whole numbers of them, and how many each client holds."""

from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def members(labels: Array) -> list[Array]:
    """The positions of each class that occurs, classes in increasing order.

    >>> [positions.tolist() for positions in members(np.array([5, 2, 5]))]
    [[1], [0, 2]]
    """
    _, sizes = np.unique(labels, return_counts=True)
    return cut(np.argsort(labels, kind="stable"), sizes)


def cut(items: Array, sizes: Array) -> list[Array]:
    """Consecutive pieces of these sizes."""
    ends = [0, *np.cumsum(sizes)[:-1].tolist(), len(items)]
    return [items[start:end] for start, end in pairwise(ends)]


def deal(labels: Array, counts: Array, rng: np.random.Generator) -> list[Array]:
    """Hand out each class at random, `counts[n, k]` samples of the k-th class to client n."""
    clients = np.arange(len(counts))
    piles = [rng.permutation(positions) for positions in members(labels)]
    receivers = np.concatenate([np.repeat(clients, counts[:, k]) for k in range(len(piles))])
    return cut(np.concatenate(piles)[np.argsort(receivers, kind="stable")], counts.sum(axis=1))


def softmax(logarithms: Array) -> Array:
    """Shares from the logarithms of weights, over the last axis."""
    weights = np.exp(logarithms - logarithms.max(axis=-1, keepdims=True))
    shares: Array = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def whole(shares: Array, totals: Array) -> Array:
    """Split each total by the shares of its row into whole numbers, by largest remainders.

    >>> whole(np.array([0.5, 0.3, 0.2]), np.array(4)).tolist()
    [2, 1, 1]
    """
    exact = shares * totals[..., None]
    floors = np.floor(exact).astype(np.int64)
    order = np.argsort(floors - exact, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1, kind="stable")
    wholes: Array = floors + (rank < (totals - floors.sum(axis=-1))[..., None])
    return wholes


def log_dirichlet(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Logarithms, up to a constant per row, of draws from the symmetric Dir(alpha) over the last axis.

    A Dirichlet draw is normalised Gamma(alpha) draws, and Gamma(alpha) = Gamma(alpha + 1) * U^(1/alpha). In logarithms
    this holds for an alpha of any size, where NumPy's own sampler underflows to 0 / 0 for small ones; in the limit
    the draw is one-hot.
    """
    exponential = rng.standard_exponential(shape)
    exponential -= exponential.min(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        # Bounded, so that even the least liked class of a client stays comparable once the others are used up.
        penalty = np.minimum(exponential / alpha, 1e300)
    logarithms: Array = np.log(rng.standard_gamma(alpha + 1.0, shape)) - penalty
    return logarithms


def equal_sizes(total: int, clients: int) -> Array:
    """The same for all; the first few hold one more if the total is not divisible."""
    sizes = np.full(clients, total // clients)
    sizes[: total % clients] += 1
    return sizes


def dirichlet_sizes(total: int, clients: int, alpha: float, rng: np.random.Generator) -> Array:
    """Shares ~ Dir(alpha): quantity skew of NIID-Bench (Li et al. 2022)."""
    return whole(softmax(log_dirichlet(alpha, (clients,), rng)), np.array(total))


def lognormal_sizes(total: int, clients: int, sigma: float, rng: np.random.Generator) -> Array:
    """Shares in proportion to exp(sigma z_n), z_n ~ N(0, 1): quantity skew of FedDyn (Acar et al. 2021)."""
    normal = rng.standard_normal(clients)
    with np.errstate(over="ignore"):
        # Relative to the largest, and bounded, so that a sigma of any size gives shares.
        logarithms = np.maximum(sigma * (normal - normal.max()), -1e300)
    return whole(softmax(logarithms), np.array(total))
