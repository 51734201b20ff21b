"""Brute force: plain loops in float64 that share no code with the engines or the methods."""

import torch
from torch import Tensor
from torch.func import functional_call, grad

from fl_lightning import streams
from tests.support.cases import Case


def batches(case: Case, client: int, round: int, epochs: int | None = None) -> list[Tensor]:
    """The batches the plan promises: one keyed permutation per epoch, cut in order."""
    indices = case.clients[client]
    size = case.training.batch_size or len(indices)
    found = []
    for epoch in range(case.training.epochs if epochs is None else epochs):
        stream = streams.generator(case.seed, "batches", round, client, epoch)
        order = indices[torch.randperm(len(indices), generator=stream)]
        found += [order[i : i + size] for i in range(0, len(order), size)]
    return found


def gradient(case: Case, params: dict[str, Tensor], indices: Tensor) -> dict[str, Tensor]:
    """Gradient of the mean cross-entropy of some samples."""
    x, y = case.dataset.train_x[indices], case.dataset.train_y[indices]

    def loss(p):
        return torch.nn.functional.cross_entropy(functional_call(case.model, p, (x,)), y)

    return grad(loss)(params)


def initial(case: Case) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in case.model.named_parameters()}


def weights(case: Case, members: list[int]) -> dict[int, float]:
    total = sum(len(case.clients[n]) for n in members)
    return {n: len(case.clients[n]) / total for n in members}


def members(case: Case) -> list[int]:
    """All clients with data: full participation."""
    return [n for n, indices in enumerate(case.clients) if len(indices)]


def cohorts(records) -> list[dict[int, int]]:
    """Who took part in every round, with how many epochs."""
    return [dict(zip(r.cohort.members, r.cohort.epochs, strict=True)) for r in records]
