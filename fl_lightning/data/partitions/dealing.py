"""What all partitions are made of: the samples of each class, and whole numbers of them."""

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
