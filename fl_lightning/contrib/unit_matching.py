"""Which hidden units of several networks are the same one: matching by the Beta-Bernoulli process.

A unit is a vector v. Global unit i has mean A_i / P_i under the prior N(mu_0, sigma_0) per coordinate:

    A_i = mu_0 / sigma_0 + sum q_j v_jl,   P_i = 1 / sigma_0 + sum q_j       over the units (j, l) assigned to i
    Q = sum_i sum_coordinates (A_i^2 / P_i - A_0^2 / P_0) + 2 ln p(assignment)

Client j's units are assigned by the Hungarian algorithm, given those of all others. What is added to Q by

    a match with unit i, which n_i others have, |A_i + q v|^2 / (P_i + q) - |A_i|^2 / P_i + 2 ln(n_i / (J - n_i))
    the k-th new unit                           |A_0 + q v|^2 / (P_0 + q) - |A_0|^2 / P_0 + 2 ln(gamma / J) - 2 ln k

First client by client, then in sweeps: each client in turn is taken out and assigned anew.

Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni: Bayesian Nonparametric Federated Learning of Neural Networks,
ICML 2019.

The factor 2 before both logarithms is the objective's; the published code has 1 before the first and 2 before the
second. Popularities n_i count as at most 10, as they do there.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.params import Params

# The prior's mean of a bias; that of a weight is 0.
BIAS_MEAN = 0.1
# More clients than this make a unit no more attractive.
LARGEST_POPULARITY = 10


class Prior(NamedTuple):
    """The prior of a unit, before any client has shown one.

    Attributes:
        mean: mu_0, one value per coordinate.
        variance: sigma_0.
        gamma: The larger, the more units.
    """

    mean: Tensor
    variance: float
    gamma: float


class Units(NamedTuple):
    """The units of one client.

    Attributes:
        vectors: v, one row per unit.
        precision: q, one value per coordinate.
        fixed: Which global units they are, if that is known: the client is not matched, but others are with it.
    """

    vectors: Tensor
    precision: Tensor
    fixed: Tensor | None = None


class Matching(NamedTuple):
    """Global units, the most popular first.

    Attributes:
        assignments: For each client the global unit of each of its units.
        means: A_i / P_i, one row per global unit.
    """

    assignments: list[Tensor]
    means: Tensor


class Groups(NamedTuple):
    """Global units while clients are matched: A, P and the popularities n."""

    sums: Tensor
    precisions: Tensor
    popularity: Tensor


def match(clients: Sequence[Units], prior: Prior, sweeps: int, stream: torch.Generator) -> Matching:
    """Match the units of all clients.

    Args:
        clients: Their units, in float64.
        prior: The prior of units.
        sweeps: How often every client is assigned anew.
        stream: For the order of the clients in a sweep.
    """
    labels: list[Tensor | None] = [client.fixed for client in clients]
    free = [j for j, client in enumerate(clients) if client.fixed is None]
    for j in sorted(free, key=lambda j: -len(clients[j].vectors)):
        labels[j] = best_labels(clients[j], *_compact(clients, labels, prior), prior, len(clients))
    for _ in range(sweeps if len(clients) > 1 else 0):
        for place in torch.randperm(len(free), generator=stream).tolist():
            j = free[place]
            labels[j] = None
            labels[j] = best_labels(clients[j], *_compact(clients, labels, prior), prior, len(clients))
    found = [label for label in labels if label is not None]
    order = _ranks(found)
    assignments = [order[label] for label in found]
    groups = _groups(clients, assignments, prior, int(order.max()) + 1)
    return Matching(assignments, groups.sums / groups.precisions)


def best_labels(client: Units, groups: Groups, names: Tensor, prior: Prior, number: int) -> Tensor:
    """The assignment of one client's units that adds most to Q: names of global units, new ones after all others."""
    scores = torch.cat([match_scores(client, groups, number), new_scores(client, prior, number)], dim=1)
    _, columns = linear_sum_assignment(scores.numpy(), maximize=True)
    unused = int(names.max()) + 1 if len(names) else 0
    every = torch.cat([names, unused + torch.arange(len(client.vectors))])
    return every[torch.from_numpy(np.asarray(columns))]


def match_scores(client: Units, groups: Groups, number: int) -> Tensor:
    """What is added to Q if unit l is unit i, (l, i)."""
    known = groups.popularity
    assert bool((known < number).all()), "a client that is matched must not be counted among the others"
    popular = known.clamp(max=min(LARGEST_POPULARITY, number - 1)).double()
    weighted, after = client.vectors * client.precision, groups.precisions + client.precision
    before = (groups.sums.square() / groups.precisions).sum(1)
    fit = weighted.square() @ (1 / after).T + 2 * weighted @ (groups.sums / after).T
    fit = fit + (groups.sums.square() / after).sum(1) - before
    return fit + 2 * torch.log(popular / (number - popular))


def new_scores(client: Units, prior: Prior, number: int) -> Tensor:
    """What is added to Q if unit l is the k-th new one, (l, k)."""
    sums, precision = prior.mean / prior.variance, 1 / prior.variance
    weighted = client.vectors * client.precision
    fit = ((sums + weighted).square() / (precision + client.precision)).sum(1) - (sums.square() / precision).sum()
    ranks = torch.arange(1, len(client.vectors) + 1, dtype=torch.float64)
    return fit[:, None] + 2 * math.log(prior.gamma / number) - 2 * torch.log(ranks)


def _compact(clients: Sequence[Units], labels: Sequence[Tensor | None], prior: Prior) -> tuple[Groups, Tensor]:
    """The global units that any client has, and their names."""
    present = [(client, label) for client, label in zip(clients, labels, strict=True) if label is not None]
    if not present:
        empty = prior.mean.new_zeros(0, len(prior.mean))
        return Groups(empty, empty, torch.zeros(0, dtype=torch.long)), torch.zeros(0, dtype=torch.long)
    names, places = torch.unique(torch.cat([label for _, label in present]), return_inverse=True)
    own = torch.split(places, [len(label) for _, label in present])
    return _groups([client for client, _ in present], own, prior, len(names)), names


def _groups(clients: Sequence[Units], assignments: Sequence[Tensor], prior: Prior, number: int) -> Groups:
    sums = (prior.mean / prior.variance).expand(number, -1).clone()
    precisions = torch.full_like(sums, 1 / prior.variance)
    popularity = torch.zeros(number, dtype=torch.long)
    for client, assigned in zip(clients, assignments, strict=True):
        sums[assigned] += client.vectors * client.precision
        precisions[assigned] += client.precision
        popularity[assigned] += 1
    return Groups(sums, precisions, popularity)


def _ranks(labels: Sequence[Tensor]) -> Tensor:
    """The final number of each name: the most popular first, then in the order in which clients have them."""
    names, places = torch.unique(torch.cat(list(labels)), return_inverse=True)
    popularity = torch.bincount(places)
    first = torch.full((len(names),), len(places)).scatter_reduce(0, places, torch.arange(len(places)), "amin")
    order = sorted(range(len(names)), key=lambda i: (-int(popularity[i]), int(first[i])))
    ranks = torch.zeros(int(names.max()) + 1, dtype=torch.long)
    ranks[names[torch.tensor(order)]] = torch.arange(len(names))
    return ranks


def class_shares(counts: Sequence[Tensor]) -> Tensor:
    """Each client's share of the samples of each class, (client, class); equal shares of a class that no client has."""
    stacked = torch.stack(list(counts)).double()
    total = stacked.sum(0)
    return torch.where(total > 0, stacked / total.clamp(min=1), 1 / len(stacked))


def by_class(shares: Tensor, values: Sequence[Tensor]) -> Tensor:
    """The mean of the clients' output layers, the row of each class weighted by the shares of it."""
    total = torch.zeros_like(values[0], dtype=torch.float64)
    for share, value in zip(shares, values, strict=True):
        total += share.view(-1, *[1] * (value.dim() - 1)) * value.double()
    return total


def counted(labels: Tensor, num_classes: int, like: Params) -> Tensor:
    """How many samples of each class a client has, as numbers that can be sent with a model."""
    reference = next(iter(like.values()))
    return torch.bincount(labels, minlength=num_classes).to(reference.dtype).to(reference.device)


def require_settings(sigma: float, sigma0: float, gamma: float, sweeps: int) -> None:
    """Refuse values with which nothing can be matched; a method's fields have these names."""
    for name, value in (("sigma", sigma), ("sigma0", sigma0), ("gamma", gamma)):
        require(0 < value < float("inf"), f"method.{name} must be finite and > 0, got {value}")
    require(sweeps >= 0, f"method.sweeps must be at least 0, got {sweeps}")
