"""Federated rounds in plain torch, without any framework: the least that the work can cost.

Tensors in memory, batches by index, one backward pass per step, SGD in place, float32 sums at the server. Batches and
cohorts are drawn by the platform's keys, so that both end at the same numbers. What the platform does beyond that is
its overhead: models of all clients are kept, checked for NaN, and averaged in float64; losses are recorded.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.works import Work
from fl_lightning import streams


class Prior(NamedTuple):
    """What pulls FOLA's clients in a round: `stiffness / 2 * (theta - centre)^2`, and `shares`, lr times stiffness."""

    centre: list[Tensor]
    stiffness: list[Tensor]
    shares: list[Tensor]


# Samples, labels, and which part of a client's samples they are.
Batches = Iterator[tuple[Tensor, Tensor, float]]
# Train the leaves of a model in place, with a learning rate; the second gives the client's Fisher.
Train = Callable[[nn.Module, list[Tensor], Batches, float], None]
TrainWithPrior = Callable[[nn.Module, list[Tensor], Batches, float, Prior | None], list[Tensor]]


def by_hand(model: nn.Module, leaves: list[Tensor], batches: Batches, lr: float) -> None:
    """Plain SGD."""
    for x, y, _ in batches:
        loss = cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            torch._foreach_add_(leaves, grads, alpha=-lr)
        del loss, grads  # the next step then finds the same memory, still in the cache


def by_hand_with_prior(
    model: nn.Module, leaves: list[Tensor], batches: Batches, lr: float, prior: Prior | None
) -> list[Tensor]:
    """SGD, prior and Fisher in place."""
    fisher = [torch.zeros_like(leaf) for leaf in leaves]
    for x, y, share in batches:
        loss = cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            if prior is not None:  # theta - lr stiffness (theta - centre), in one pass
                torch._foreach_lerp_(leaves, prior.centre, prior.shares)
            torch._foreach_add_(leaves, grads, alpha=-lr)
            torch._foreach_addcmul_(fisher, grads, grads, value=share)
        del loss, grads
    return fisher


def fedavg(work: Work, train: Train = by_hand) -> Iterator[list[Tensor]]:
    """theta_S <- sum_n p_n theta_n; yields theta_S after every round."""
    model = deepcopy(work.model).train()
    leaves = list(model.parameters())
    server = copies(leaves)
    for round in count(1):
        total = [torch.zeros_like(value) for value in server]
        for n, weight in weights(work, round):
            load(leaves, server)
            train(model, leaves, batches(work, round, n), work.training.lr)
            with torch.no_grad():
                torch._foreach_add_(total, leaves, alpha=weight)
        server = total
        yield server


def fola(
    work: Work, strength: float, damping: float, train: TrainWithPrior = by_hand_with_prior
) -> Iterator[list[Tensor]]:
    """The platform's default FOLA: sums of the product as clients come in."""
    lr = work.training.lr
    model = deepcopy(work.model).train()
    leaves = list(model.parameters())
    server = copies(leaves)
    precision = [torch.zeros_like(value) for value in server]
    for round in count(1):
        product, prior = Product(server), None
        if round > 1:
            stiffness = [strength * value for value in precision]
            prior = Prior(server, stiffness, [lr * value for value in stiffness])
        for n, weight in weights(work, round):
            load(leaves, server)
            fisher = train(model, leaves, batches(work, round, n), lr, prior)
            product.add(weight, leaves, fisher, precision, round)
        server, precision = product.posterior(damping)
        yield server


class Product:
    """The sums of FOLA's server, to which clients are added as they come in."""

    def __init__(self, like: list[Tensor]) -> None:
        self.mean, self.moment, self.total = ([torch.zeros_like(value) for value in like] for _ in range(3))

    @torch.no_grad()
    def add(
        self, weight: float, leaves: list[Tensor], fisher: list[Tensor], precision: list[Tensor], round: int
    ) -> None:
        """A client's model and Fisher, which becomes its posterior precision."""
        torch._foreach_mul_(fisher, 1 / round)
        torch._foreach_add_(fisher, precision, alpha=(round - 1) / round)
        torch._foreach_add_(self.total, fisher, alpha=weight)
        torch._foreach_add_(self.mean, leaves, alpha=weight)
        torch._foreach_addcmul_(self.moment, fisher, leaves, value=weight)

    def posterior(self, damping: float) -> tuple[list[Tensor], list[Tensor]]:
        """The server's model and precision."""
        size = sum(value.numel() for value in self.total)
        gamma = damping * sum(float(value.sum()) for value in self.total) / size
        sums = zip(self.moment, self.mean, self.total, strict=True)
        return [(s + gamma * m) / (a + gamma) for s, m, a in sums], self.total


def weights(work: Work, round: int) -> list[tuple[int, float]]:
    """The members of a round, and the part of its samples that each of them has."""
    members = work.members(round)
    samples = sum(len(work.clients[n]) for n in members)
    return [(n, len(work.clients[n]) / samples) for n in members]


def batches(work: Work, round: int, client: int) -> Batches:
    """A keyed permutation of the client's samples, cut into batches (E = 1)."""
    indices = work.clients[client]
    stream = streams.generator(work.seed, "batches", round, client, 0)
    order = indices[torch.randperm(len(indices), generator=stream)]
    for batch in order.split(work.training.batch_size or len(indices)):
        x, y = (values.index_select(0, batch) for values in (work.dataset.train_x, work.dataset.train_y))
        yield x, y, len(batch) / len(indices)


def copies(values: list[Tensor]) -> list[Tensor]:
    return [value.detach().clone() for value in values]


def load(leaves: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(leaves, values)
