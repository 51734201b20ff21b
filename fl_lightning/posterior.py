"""Gaussians over named parameters, N(mean, Lambda^-1) with diagonal precision Lambda, and how to combine them.

Sums run in float64 in the order given; results come back in the type of the inputs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.params import Params, cast_like, flatten, weighted_sum, zip_map


class Gaussian(NamedTuple):
    """A diagonal Gaussian: mean mu and precision Lambda = Sigma^-1, one number each per parameter."""

    mean: Params
    precision: Params

    def distance(self, params: Params) -> Tensor:
        """D(theta) = 1/2 (theta - mu)^T Lambda (theta - mu): the negative log-density without its constant."""
        terms = zip_map(lambda p, m, a: a.double() * (p.double() - m.double()).square(), params, *self)
        return 0.5 * flatten(terms).sum()

    def log_density(self, params: Params) -> Tensor:
        """The logarithm of N(theta | mu, Lambda^-1)."""
        log_precision = flatten(self.precision).double().log()
        return 0.5 * (log_precision.sum() - len(log_precision) * math.log(2 * math.pi)) - self.distance(params)


def product(experts: Sequence[Gaussian], weights: Sequence[float], damping: float = 0.0) -> Gaussian:
    """The Gaussian proportional to prod_n q_n^w_n, the paper's aggregation.

    Lambda = sum_n w_n (Lambda_n + damping) and mu = Lambda^-1 sum_n w_n (Lambda_n + damping) mu_n. Where no expert has
    any precision, the product is improper in that coordinate and mu is the weighted average.

    >>> one = Gaussian({"w": torch.zeros(1)}, {"w": torch.ones(1)})
    >>> two = Gaussian({"w": torch.ones(1)}, {"w": 3 * torch.ones(1)})
    >>> product([one, two], [0.5, 0.5])
    Gaussian(mean={'w': tensor([0.7500])}, precision={'w': tensor([2.])})
    """
    like = experts[0]
    mean, precision = {}, {}
    for name in like.mean:
        total = torch.zeros_like(like.mean[name], dtype=torch.float64)
        moment = torch.zeros_like(total)
        for expert, weight in zip(experts, weights, strict=True):  # one at a time: no stack of float64 copies
            share = expert.precision[name].double().add(damping).mul_(weight)
            total += share
            moment += share.mul_(expert.mean[name])
        improper = total == 0
        if bool(improper.any()):
            moment = torch.where(improper, weighted_sum((e.mean for e in experts), weights)[name], moment)
            mean[name] = moment / torch.where(improper, 1.0, total)
        else:
            mean[name] = moment.div_(total)
        precision[name] = total
    return Gaussian(cast_like(mean, like.mean), cast_like(precision, like.precision))


def collapse(components: Sequence[Gaussian], weights: Sequence[float]) -> Gaussian:
    """The Gaussian nearest to the mixture sum_n w_n q_n in KL(mixture || Gaussian): it has the mixture's moments.

    mu = sum_n w_n mu_n and Sigma = sum_n w_n (Sigma_n + mu_n mu_n^T - mu mu^T), of which the diagonal is kept.
    The mean is FedAvg's model.
    """
    mean = weighted_sum((component.mean for component in components), weights)

    def second_moment(component: Gaussian) -> Params:
        # The spread of the means is taken about the common mean: mu_n^2 - mu^2 would cancel.
        return zip_map(lambda m, a, centre: a.double().reciprocal() + (m.double() - centre).square(), *component, mean)

    covariance = weighted_sum((second_moment(component) for component in components), weights)
    precision = zip_map(torch.reciprocal, covariance)
    return Gaussian(cast_like(mean, components[0].mean), cast_like(precision, components[0].precision))
