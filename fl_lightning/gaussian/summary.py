"""What is logged of the precisions of a round."""

from collections.abc import Sequence

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
    sums = [float(flatten(expert.diagonal()).double().sum()) for expert in experts]
    parts = [weight * part for weight, part in zip(weights, sums, strict=True)]
    total = sum(parts)
    return {
        **{f"precision_{name}": value for name, value in zip(LEVELS, _quantiles(diagonal), strict=True)},
        "precision_mean": float(diagonal.mean()),
        "precision_share": [part / total if total > 0 else 0.0 for part in parts],
    }


def _quantiles(values: Tensor) -> list[float]:
    """Values that are there, not between two: `torch.quantile` takes no more than 16 million."""
    ordered = values.sort().values
    levels = torch.tensor(list(LEVELS.values()), dtype=torch.float64)
    result: list[float] = ordered[(levels * (len(ordered) - 1)).round().long()].tolist()
    return result
