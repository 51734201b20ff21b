"""Federated rounds as one writes them in PyTorch: `torch.optim.SGD`, `backward`, the prior loss as a sum that autograd
differentiates. What `bare` computes by hand in as few passes as there can be, without its tricks.
"""

from collections.abc import Iterator
from copy import deepcopy
from itertools import count

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.bare import Product, batches, copies, load
from benchmarks.works import Work


def fedavg(work: Work) -> Iterator[list[Tensor]]:
    """The models of all clients, averaged at the end of a round."""
    x, y = work.dataset.train_x, work.dataset.train_y
    model = deepcopy(work.model).train()
    leaves = list(model.parameters())
    server = copies(leaves)
    for round in count(1):
        members = work.members(round)
        samples = sum(len(work.clients[n]) for n in members)
        total = [torch.zeros_like(value) for value in server]
        for n in members:
            load(leaves, server)
            optimiser = torch.optim.SGD(leaves, lr=work.training.lr)
            for batch in batches(work, round, n):
                optimiser.zero_grad()
                cross_entropy(model(x[batch]), y[batch]).backward()
                optimiser.step()
            for part, leaf in zip(total, leaves, strict=True):
                part += leaf.detach() * (len(work.clients[n]) / samples)
        server = total
        yield server


def fola(work: Work, strength: float, damping: float) -> Iterator[list[Tensor]]:
    """The squares of the likelihood's gradient are summed before the prior's is added to it."""
    x, y = work.dataset.train_x, work.dataset.train_y
    model = deepcopy(work.model).train()
    leaves = list(model.parameters())
    server = copies(leaves)
    precision = [torch.zeros_like(value) for value in server]
    for round in count(1):
        members = work.members(round)
        samples = sum(len(work.clients[n]) for n in members)
        product = Product(server)
        for n in members:
            load(leaves, server)
            optimiser = torch.optim.SGD(leaves, lr=work.training.lr)
            fisher = [torch.zeros_like(value) for value in server]
            for batch in batches(work, round, n):
                optimiser.zero_grad()
                cross_entropy(model(x[batch]), y[batch]).backward()
                for part, leaf in zip(fisher, leaves, strict=True):
                    assert leaf.grad is not None
                    part += len(batch) / len(work.clients[n]) * leaf.grad**2
                if round > 1:
                    terms = zip(precision, leaves, server, strict=True)
                    pulls = [(weight * (leaf - centre) ** 2).sum() for weight, leaf, centre in terms]
                    (strength / 2 * torch.stack(pulls).sum()).backward()
                optimiser.step()
            product.add(len(work.clients[n]) / samples, leaves, fisher, precision, round)
        server, precision = product.posterior(damping)
        yield server
