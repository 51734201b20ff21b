"""Clients whose losses are quadratic: their posterior is known in closed form."""

import torch

from fl_lightning.method import Cohort, Server
from fl_lightning.training import Training

SIZES = (5, 40, 12, 3)
ORIGIN = {"w": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)}


def cohort_of(members, sizes=SIZES, number=1):
    """A cohort of clients whose losses are known in closed form: no task, no data."""
    total = sum(sizes)
    shares = tuple(sizes[n] / total for n in members)
    weights = tuple(share / sum(shares) for share in shares)
    server = Server(task=None, sizes=tuple(sizes), holdout=None, seed=0)
    return Cohort(number, tuple(members), weights, shares, (1,) * len(members), len(sizes), Training(), server)


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
