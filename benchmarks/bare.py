"""Federated rounds in plain torch, without any framework: the least that the work can cost.

Tensors in memory, batches by index, one backward pass per step, SGD in place, float32 sums at the server. Batches and
cohorts are drawn by the platform's keys, so that both end at the same numbers. What the platform does beyond that is
its overhead: models of all clients are kept, checked for NaN, and averaged in float64; losses are recorded.
"""

from collections.abc import Iterator
from copy import deepcopy
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.works import Work
from fl_lightning import streams


def fedavg(work: Work) -> Iterator[list[Tensor]]:
    """theta_S <- sum_n p_n theta_n; yields theta_S after every round."""
    x, y, lr = work.dataset.train_x, work.dataset.train_y, work.training.lr
    model = deepcopy(work.model).train()
    leaves = list(model.parameters())
    server = copies(leaves)
    for round in count(1):
        members = work.members(round)
        samples = sum(len(work.clients[n]) for n in members)
        total = [torch.zeros_like(value) for value in server]
        for n in members:
            load(leaves, server)
            for batch in batches(work, round, n):
                loss = cross_entropy(model(x.index_select(0, batch)), y.index_select(0, batch))
                grads = torch.autograd.grad(loss, leaves)
                with torch.no_grad():
                    torch._foreach_add_(leaves, grads, alpha=-lr)
                del loss, grads  # the next step then finds the same memory, still in the cache
            with torch.no_grad():
                torch._foreach_add_(total, leaves, alpha=len(work.clients[n]) / samples)
        server = total
        yield server


def fola(work: Work, strength: float, damping: float) -> Iterator[list[Tensor]]:
    """The platform's default FOLA by hand: Fisher and prior in place, sums of the product as clients come in."""
    x, y, lr = work.dataset.train_x, work.dataset.train_y, work.training.lr
    model = deepcopy(work.model).train()
    leaves = list(model.parameters())
    server = copies(leaves)
    precision = [torch.zeros_like(value) for value in server]
    for round in count(1):
        members = work.members(round)
        samples = sum(len(work.clients[n]) for n in members)
        product = Product(server)
        pulls = [lr * strength * value for value in precision]
        for n in members:
            load(leaves, server)
            fisher = [torch.zeros_like(value) for value in server]
            for batch in batches(work, round, n):
                loss = cross_entropy(model(x.index_select(0, batch)), y.index_select(0, batch))
                grads = torch.autograd.grad(loss, leaves)
                with torch.no_grad():
                    if round > 1:  # theta - lr strength Lambda (theta - centre), in one pass
                        torch._foreach_lerp_(leaves, server, pulls)
                    torch._foreach_add_(leaves, grads, alpha=-lr)
                    torch._foreach_addcmul_(fisher, grads, grads, value=len(batch) / len(work.clients[n]))
                del loss, grads
            product.add(len(work.clients[n]) / samples, leaves, fisher, precision, round)
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


def batches(work: Work, round: int, client: int) -> tuple[Tensor, ...]:
    """A keyed permutation of the client's samples, cut into batches (E = 1)."""
    indices = work.clients[client]
    stream = streams.generator(work.seed, "batches", round, client, 0)
    return indices[torch.randperm(len(indices), generator=stream)].split(work.training.batch_size or len(indices))


def copies(values: list[Tensor]) -> list[Tensor]:
    return [value.detach().clone() for value in values]


def load(leaves: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(leaves, values)
