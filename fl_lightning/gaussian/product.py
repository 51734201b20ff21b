"""How Gaussian posteriors over parameters are combined: products, also within a trust region.

Sums run in float64 in the order given; results come back in the type of the inputs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.damping import Merging
from fl_lightning.params import Params, flatten, weighted_sum, zip_map

Form = TypeVar("Form", bound=Gaussian)

# Where a damping of zero starts to be doubled, and how often it is: then all that is left is the average.
FIRST_DAMPING = 1e-3
DOUBLINGS = 60


def product(posteriors: Sequence[Form], weights: Sequence[float], damping: float = 0.0) -> Form:
    """The Gaussian proportional to prod_n q_n^w_n, the paper's aggregation.

    Lambda = sum_n w_n (Lambda_n + damping I) and mu = Lambda^-1 sum_n w_n (Lambda_n + damping I) mu_n. Where no
    posterior has any precision, the product is improper in that direction and mu is the weighted average.

    >>> import torch
    >>> from fl_lightning.gaussian.diagonal import Diagonal
    >>> one = Diagonal({"w": torch.zeros(1)}, {"w": torch.ones(1)})
    >>> two = Diagonal({"w": torch.ones(1)}, {"w": 3 * torch.ones(1)})
    >>> product([one, two], [0.5, 0.5])
    Diagonal(mean={'w': tensor([0.7500])}, precision={'w': tensor([2.])})
    """
    return type(posteriors[0]).product(posteriors, weights, damping)


def merged(posteriors: Sequence[Form], weights: Sequence[float], merging: Merging) -> Form:
    """The server's posterior, with the damping doubled until its mean is within reach of the posteriors.

    ||mu - mu_A|| <= trust sqrt(sum_n ||mu_n - mu_A||^2), with mu_A their average: what a product could move by if all
    posteriors differed from the average in directions of their own, and each had its way in its own. A product moves
    farther where the sum of the precisions is small but single ones disagree: in weights that the inputs seen so far
    hardly use, and the next round does.
    """
    form = type(posteriors[0])
    found = form.merged(posteriors, weights, merging)
    if merging.trust is None:
        return found
    average = weighted_sum((posterior.mean for posterior in posteriors), weights)
    reach = merging.trust * sum(_distance(posterior.mean, average) ** 2 for posterior in posteriors) ** 0.5
    for _ in range(DOUBLINGS):
        if not _distance(found.mean, average) > reach:  # also if it is not finite
            break
        gradients = None if merging.gradients is None else 2 * merging.gradients
        merging = replace(merging, damping=2 * merging.damping or FIRST_DAMPING, gradients=gradients)
        found = form.merged(posteriors, weights, merging)
    return found


def _distance(params: Params, other: Params) -> float:
    return float(flatten(zip_map(lambda a, b: a.double() - b.double(), params, other)).norm())
