"""How heterogeneous a partition is, in numbers that can be known before training."""

from typing import NamedTuple

import torch
from torch import Tensor


class Heterogeneity(NamedTuple):
    """Statistics of each client; NaN where a client has no samples.

    Attributes:
        samples: Number of samples, n_n.
        classes: Number of classes with at least one sample.
        entropy: Of the labels, -sum_k p_nk log2 p_nk in bits: 0 for one class, log2 K for K equally frequent ones.
        emd: Distance to the labels of all clients together, sum_k |p_nk - p_k|: 0 for the same mixture of classes,
            towards 2 for classes that no other client has (Zhao et al. 2018, Federated learning with non-IID data, who
            call it earth mover's distance).
    """

    samples: Tensor
    classes: Tensor
    entropy: Tensor
    emd: Tensor


class Summary(NamedTuple):
    """One partition in one row.

    Attributes:
        clients: N.
        empty: Clients without samples.
        smallest: Samples of the smallest client.
        median: Samples of the median client.
        largest: Samples of the largest client.
        classes: Mean number of classes, over the clients that have samples.
        entropy: Mean of the clients' label entropies, weighted by samples, in bits.
        emd: Mean of the clients' distances to the population, weighted by samples.
    """

    clients: int
    empty: int
    smallest: int
    median: float
    largest: int
    classes: float
    entropy: float
    emd: float


def measure(counts: Tensor) -> Heterogeneity:
    """The statistics of each client.

    Args:
        counts: Samples per client (row) and class (column).

    >>> measure(torch.tensor([[2, 2], [4, 0]])).emd
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    samples = counts.sum(1)
    shares = counts / samples[:, None].double()  # 0 / 0 is the NaN of an empty client
    entropy = torch.special.entr(shares).sum(1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
    return Heterogeneity(samples, (counts > 0).sum(1), entropy, label_distance(counts, counts.sum(0)))


def label_distance(counts: Tensor, population: Tensor) -> Tensor:
    """EMD_n = sum_k |p_nk - p_k|, from the numbers of samples of each class; NaN without samples.

    >>> label_distance(torch.tensor([2, 0]), torch.tensor([5, 5]))
    tensor(1., dtype=torch.float64)
    """
    shares, expected = (n / n.sum(-1, keepdim=True).double() for n in (counts, population))
    return (shares - expected).abs().sum(-1)


def summarise(counts: Tensor) -> Summary:
    """The statistics of all clients together."""
    clients = measure(counts)
    has_data = clients.samples > 0
    weights = clients.samples / clients.samples.sum().double()
    return Summary(
        clients=len(counts),
        empty=int((~has_data).sum()),
        smallest=int(clients.samples.min()),
        median=float(clients.samples.double().quantile(0.5)),
        largest=int(clients.samples.max()),
        classes=float(clients.classes[has_data].double().mean()),
        entropy=float((weights * clients.entropy)[has_data].sum()),
        emd=float((weights * clients.emd)[has_data].sum()),
    )
