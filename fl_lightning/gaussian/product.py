"""How Gaussian posteriors over parameters are combined.

Sums run in float64 in the order given; results come back in the type of the inputs.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch

from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.form import Gaussian
from fl_lightning.params import Params, cast_like, weighted_sum, zip_map

Form = TypeVar("Form", bound=Gaussian)


def product(experts: Sequence[Form], weights: Sequence[float], damping: float = 0.0) -> Form:
    """The Gaussian proportional to prod_n q_n^w_n, the paper's aggregation.

    Lambda = sum_n w_n (Lambda_n + damping I) and mu = Lambda^-1 sum_n w_n (Lambda_n + damping I) mu_n. Where no expert
    has any precision, the product is improper in that direction and mu is the weighted average.

    >>> one = Diagonal({"w": torch.zeros(1)}, {"w": torch.ones(1)})
    >>> two = Diagonal({"w": torch.ones(1)}, {"w": 3 * torch.ones(1)})
    >>> product([one, two], [0.5, 0.5])
    Diagonal(mean={'w': tensor([0.7500])}, precision={'w': tensor([2.])})
    """
    return type(experts[0]).product(experts, weights, damping)


def collapse(components: Sequence[Diagonal], weights: Sequence[float]) -> Diagonal:
    """The Gaussian nearest to the mixture sum_n w_n q_n in KL(mixture || Gaussian): it has the mixture's moments.

    mu = sum_n w_n mu_n and Sigma = sum_n w_n (Sigma_n + mu_n mu_n^T - mu mu^T), of which the diagonal is kept.
    The mean is FedAvg's model.
    """
    mean = weighted_sum((component.mean for component in components), weights)

    def second_moment(component: Diagonal) -> Params:
        # The spread of the means is taken about the common mean: mu_n^2 - mu^2 would cancel.
        return zip_map(
            lambda m, a, centre: a.double().reciprocal() + (m.double() - centre).square(),
            component.mean,
            component.precision,
            mean,
        )

    covariance = weighted_sum((second_moment(component) for component in components), weights)
    precision = zip_map(torch.reciprocal, covariance)
    return Diagonal(cast_like(mean, components[0].mean), cast_like(precision, components[0].precision))
