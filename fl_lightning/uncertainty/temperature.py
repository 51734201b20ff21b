"""Temperature scaling: the one number by which a trained network's logits are divided (Guo et al. 2017)."""

import math

import torch
from torch import Tensor

# ln T is looked for between these ends, to this length.
LOWEST, HIGHEST, LENGTH = math.log(1e-2), math.log(1e2), 1e-8
GOLDEN = (math.sqrt(5) - 1) / 2


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """T that minimises the mean NLL of softmax(f / T): golden section in ln T.

    The NLL is convex in 1/T, hence has one valley in ln T. Where every sample is right, or none better than chance, the
    best T lies at 0 or infinity, and the end of the range is taken.

    Args:
        logits: Samples x classes, of held-out data.
        labels: Their classes.
    """
    doubles = logits.double()

    def nll(place: float) -> float:
        return float(torch.nn.functional.cross_entropy(doubles / math.exp(place), labels))

    low, high = LOWEST, HIGHEST
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = nll(left), nll(right)
    while high - low > LENGTH:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = nll(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = nll(right)
    return math.exp((low + high) / 2)
