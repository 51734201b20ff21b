"""Clients whose losses are quadratic: their minima and posteriors are known in closed form."""

from typing import NamedTuple

import torch

from fl_lightning.method import Cohort, Server
from fl_lightning.training import Training

SIZES = (5, 40, 12, 3)
ORIGIN = {"w": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)}


def cohort_of(members, sizes=SIZES, number=1, uniform=False):
    """A round of clients whose losses are known in closed form: no task, no data."""
    amounts = [1 if uniform else sizes[n] for n in members]
    population = len(sizes) if uniform else sum(sizes)
    return Cohort(
        round=number,
        members=tuple(members),
        weights=tuple(amount / sum(amounts) for amount in amounts),
        shares=tuple(amount / population for amount in amounts),
        epochs=(1,) * len(amounts),
        num_clients=len(sizes),
        training=Training(),
        server=Server(task=None, sizes=tuple(sizes), holdout=None, seed=0),
    )


def quadratics(sizes=SIZES):
    """Curvature A_n and minimum b_n of every client's mean loss 1/2 (theta - b_n)^T A_n (theta - b_n)."""
    stream = torch.Generator().manual_seed(1)
    draw = [torch.rand(2, 3, generator=stream, dtype=torch.float64) for _ in sizes]
    return [(0.1 + 2 * a, 4 * b - 2) for a, b in draw]


def exact_posterior(method, clients, sizes=SIZES):
    precision = method.prior + sum(m * a for m, (a, _) in zip(sizes, clients, strict=True)) / method.temperature
    moment = sum(m * a * (b - ORIGIN["w"]) for m, (a, b) in zip(sizes, clients, strict=True)) / method.temperature
    return ORIGIN["w"] + moment / precision, precision


def distance(state, target):
    mean, precision = target
    return max(float((state.params["w"] - mean).abs().max()), float((state.precision["w"] / precision - 1).abs().max()))


def quadratic_clients(number=3, size=4, seed=0):
    """Curvatures near 1 and minima of some clients, in float64."""
    stream = torch.Generator().manual_seed(seed)
    curvatures, minima = [], []
    for _ in range(number):
        root = torch.randn(size, size, generator=stream, dtype=torch.float64) * 0.2
        curvatures.append(torch.eye(size, dtype=torch.float64) + root @ root.T)
        minima.append(torch.randn(size, generator=stream, dtype=torch.float64) * 2)
    return curvatures, minima


def solved(curvature, minimum, penalty):
    """The minimum of 1/2 (theta - a)^T A (theta - a) + P(theta); P is a quadratic that is only evaluated."""
    size = len(minimum)
    slope = penalty.grad({"w": torch.zeros(size, dtype=torch.float64)})["w"]
    pull = torch.stack([penalty.grad({"w": unit})["w"] - slope for unit in torch.eye(size, dtype=torch.float64)])
    return torch.linalg.solve(curvature + pull, curvature @ minimum - slope)


class Model(NamedTuple):
    """What a client reports that has nothing to say but its model."""

    params: dict[str, torch.Tensor]


def run_exactly(method, curvatures, minima, rounds, sizes=None, cohorts=None, uniform=True, start=None):
    """States of rounds in which every client finds the minimum of its objective."""
    sizes = sizes or [10] * len(minima)
    begin = torch.zeros_like(minima[0]) if start is None else start
    state, states = method.init({"w": begin}, len(minima)), []
    for number in range(1, rounds + 1):
        members = cohorts[(number - 1) % len(cohorts)] if cohorts else range(len(minima))
        cohort = cohort_of(tuple(members), sizes, number, uniform)
        context = method.broadcast(state, cohort)
        reports = [
            Model({"w": solved(curvatures[n], minima[n], method.penalty(context.of_member(place)))})
            for place, n in enumerate(cohort.members)
        ]
        state = method.aggregate(state, cohort, reports)
        states.append(state)
    return states
