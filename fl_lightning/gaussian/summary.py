"""What is logged of the precisions of a round."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fl_lightning.gaussian.form import Gaussian
from fl_lightning.params import flatten

LEVELS = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}


def precisions(
    server: Gaussian, experts: Sequence[Gaussian], weights: Sequence[float]
) -> dict[str, float | list[float]]:
    """The spread of the server's precision over its parameters, and each expert's share of all precision."""
    diagonal = flatten(server.diagonal()).double()
    sums = [sum(float(v.sum(dtype=torch.float64)) for v in expert.diagonal().values()) for expert in experts]
    parts = [weight * part for weight, part in zip(weights, sums, strict=True)]
    total = sum(parts)
    return {
        **{f"precision_{name}": value for name, value in zip(LEVELS, _quantiles(diagonal), strict=True)},
        "precision_mean": float(diagonal.mean()),
        "precision_share": [part / total if total > 0 else 0.0 for part in parts],
    }


def _quantiles(values: Tensor) -> list[float]:
    """Values that are there, not between two: `torch.quantile` takes no more than 16 million."""
    places = [round(level * (len(values) - 1)) for level in LEVELS.values()]
    ordered = np.partition(values.cpu().numpy(), places)  # there only: to sort all takes six times as long
    return [float(ordered[place]) for place in places]
