"""Products that go no farther from the average than their experts justify."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from fl_lightning.gaussian.form import Gaussian
from fl_lightning.gaussian.merging import Merging
from fl_lightning.params import Params, flatten, weighted_sum, zip_map

Form = TypeVar("Form", bound=Gaussian)

# Where a damping of zero starts to be doubled, and how often it is: then all that is left is the average.
FIRST_DAMPING = 1e-3
DOUBLINGS = 60


def merged(experts: Sequence[Form], weights: Sequence[float], merging: Merging) -> Form:
    """The server's posterior, with the damping doubled until its mean is within reach of the experts.

    ||mu - mu_A|| <= trust sqrt(sum_n ||mu_n - mu_A||^2), with mu_A their average: what a product could move by if all
    experts differed from the average in directions of their own, and each were believed in its own. A product moves
    farther where the sum of the precisions is small but single ones disagree: in weights that the inputs seen so far
    hardly use, and the next round does.
    """
    form = type(experts[0])
    found = form.merged(experts, weights, merging)
    if merging.trust is None:
        return found
    average = weighted_sum((expert.mean for expert in experts), weights)
    reach = merging.trust * sum(_distance(expert.mean, average) ** 2 for expert in experts) ** 0.5
    for _ in range(DOUBLINGS):
        if not _distance(found.mean, average) > reach:  # also if it is not finite
            break
        slopes = None if merging.slopes is None else 2 * merging.slopes
        merging = replace(merging, damping=2 * merging.damping or FIRST_DAMPING, slopes=slopes)
        found = form.merged(experts, weights, merging)
    return found


def _distance(params: Params, other: Params) -> float:
    return float(flatten(zip_map(lambda a, b: a.double() - b.double(), params, other)).norm())
