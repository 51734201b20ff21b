"""Posterior samples from SGD: the mean of the iterates of each epoch after a burn-in is one, as in FedPA.

Their mean and variance are folded up as they come (Welford), so that no sample is kept: three models in float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.method import Step
from fl_lightning.params import Params, zip_map


class EpochSamples(NamedTuple):
    """What is known of the samples so far.

    Attributes:
        total: Sum of the iterates of the present epoch.
        steps: Their number.
        mean: Mean of the samples.
        squares: Sum of their squared distances from it.
        number: How many samples there are.
    """

    total: Params
    steps: Tensor
    mean: Params
    squares: Params
    number: Tensor

    @classmethod
    def none(cls, like: Params) -> "EpochSamples":
        empty = zip_map(lambda value: torch.zeros_like(value, dtype=torch.float64), like)
        zero = next(iter(empty.values())).new_zeros(())
        return cls(empty, zero, empty, empty, zero)

    def seen(self, step: Step, burn_in: int) -> "EpochSamples":
        """After one more step."""
        total = zip_map(lambda t, p: t + p, self.total, step.params)
        steps = self.steps + 1
        number = self.number + 1
        offset = zip_map(lambda t, m: t / steps - m, total, self.mean)
        mean = zip_map(lambda m, o: m + o / number, self.mean, offset)
        squares = zip_map(lambda s, o: s + o.square() * (1 - 1 / number), self.squares, offset)
        ends = torch.as_tensor(step.epoch_ends, device=steps.device)
        counts = ends & torch.as_tensor(step.epoch >= burn_in, device=steps.device)

        def chosen(condition: Tensor, new: Params, old: Params) -> Params:
            return zip_map(lambda a, b: torch.where(condition, a, b), new, old)

        return EpochSamples(
            chosen(ends, zip_map(torch.zeros_like, total), total),
            torch.where(ends, 0.0, steps),
            chosen(counts, mean, self.mean),
            chosen(counts, squares, self.squares),
            torch.where(counts, number, self.number),
        )

    def variance(self) -> Params:
        """The unbiased estimate; zero for fewer than two samples."""
        return zip_map(lambda s: s / (self.number - 1).clamp(min=1), self.squares)
