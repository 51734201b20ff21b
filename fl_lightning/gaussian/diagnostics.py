"""What is logged of the precisions of a round."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.damping import Merging
from fl_lightning.params import flatten, numbers

LEVELS = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}


def precisions(
    server: Gaussian, posteriors: Sequence[Gaussian], weights: Sequence[float]
) -> dict[str, float | list[float]]:
    """The spread of the server's precision over its parameters, and each posterior's share of all precision."""
    diagonal = flatten(server.diagonal()).double()
    diagonals = [posterior.diagonal() for posterior in posteriors]
    entries = iter(numbers(v.sum(dtype=torch.float64) for one in diagonals for v in one.values()))
    sums = [sum(islice(entries, len(one))) for one in diagonals]
    parts = [weight * part for weight, part in zip(weights, sums, strict=True)]
    total = sum(parts)
    return {
        **{f"precision_{name}": value for name, value in zip(LEVELS, _quantiles(diagonal), strict=True)},
        "precision_mean": float(diagonal.mean()),
        "precision_share": [part / total if total > 0 else 0.0 for part in parts],
    }


def diagnostics(
    server: Gaussian, posteriors: Sequence[Gaussian], weights: Sequence[float], merging: Merging, averages: bool
) -> dict[str, float | list[float]]:
    """All numbers that FOLA logs of a round's precisions.

    Args:
        server: The global posterior after the round.
        posteriors: Of the clients.
        weights: p_n.
        merging: How they were multiplied.
        averages: Whether the models were averaged instead, so that no weight has shifted.
    """
    form = type(posteriors[0])
    numbers = precisions(server, posteriors, weights) | server.notes()
    shift = form.weight_shift(posteriors, weights, merging)
    if shift is not None:
        numbers["weight_shift"] = 0.0 if averages else shift
    return numbers | (form.alikeness(posteriors) if len(posteriors) > 1 else {})


def _quantiles(values: Tensor) -> list[float]:
    """Values that are there, not between two: `torch.quantile` takes no more than 16 million."""
    places = [round(level * (len(values) - 1)) for level in LEVELS.values()]
    ordered = np.partition(values.cpu().numpy(), places)  # there only: to sort all takes six times as long
    return [float(ordered[place]) for place in places]
