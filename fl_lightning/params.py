"""Algebra of named parameters.

All sums over clients use one form, one order (increasing client id) and one precision (float64, cast back once).
That is what makes "equals FedAvg bit for bit" a testable statement.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.system import trees

Params = dict[str, Tensor]
Tensors = list[Tensor] | tuple[Tensor, ...]

# Numbers in a block. A call takes a few microseconds, a block several times as long, and four blocks fit into a cache.
BLOCK = 2**16


def zip_map(function: Callable[..., Tensor], first: Params, *others: Params) -> Params:
    """Apply a function name by name.

    >>> zip_map(torch.add, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    return {name: function(value, *(other[name] for other in others)) for name, value in first.items()}


def zeros(params: Params) -> Params:
    return zip_map(torch.zeros_like, params)


def weighted_sum(items: Iterable[Params], weights: Iterable[float]) -> Params:
    """sum_n w_n theta_n in float64, in the order given."""
    total: Params = {}
    for params, weight in zip(items, weights, strict=True):
        for name, value in params.items():
            if name in total:
                total[name].add_(value, alpha=weight)
            else:
                total[name] = value.double().mul(weight)
    return total


def average(start: Params, models: Sequence[Params], weights: Sequence[float], rate: float = 1.0) -> Params:
    """The mean x + rate * sum_n w_n (y_n - x), the one form in which every method averages models.

    The weights sum to 1. A single model at rate 1 is taken as it is, since x + (y - x) would only add rounding.

    >>> average({"w": torch.zeros(1)}, [{"w": torch.ones(1)}, {"w": 3 * torch.ones(1)}], [0.5, 0.5])
    {'w': tensor([2.])}
    """
    if len(models) == 1 and rate == 1.0:
        return dict(models[0])
    move = mean_update(start, models, weights)
    return zip_map(lambda x, m: x.double().add(m, alpha=rate).to(x.dtype), start, move)


def mean_update(start: Params, models: Sequence[Params], weights: Sequence[float]) -> Params:
    """sum_n w_n (y_n - x) in float64: what a server optimiser takes for the direction downhill.

    >>> mean_update({"w": torch.ones(1)}, [{"w": torch.zeros(1)}, {"w": 3 * torch.ones(1)}], [0.5, 0.5])
    {'w': tensor([0.5000], dtype=torch.float64)}
    """
    result = {}
    for name, origin in start.items():
        result[name] = total = torch.zeros_like(origin, dtype=torch.float64)
        base = origin.double()
        for model, weight in zip(models, weights, strict=True):
            total.add_(model[name].double() - base, alpha=weight)
    return result


def cast_like(params: Params, like: Params) -> Params:
    return zip_map(lambda value, target: value.to(target.dtype), params, like)


def flatten(params: Params) -> Tensor:
    """All numbers as one vector, in the order of the names."""
    return torch.cat([value.reshape(-1) for value in params.values()])


def unflatten(vector: Tensor, like: Params) -> Params:
    """The inverse of `flatten`: views into the vector, named and shaped like other parameters."""
    parts = torch.split(vector, [value.numel() for value in like.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}


def blocks(params: Params) -> Iterator[Tensor]:
    """All numbers in order, in parts that fit into a core's cache: several operations on each cost one way to memory.

    They are to be read only.
    """
    for value in params.values():
        yield from torch.split(value.reshape(-1), BLOCK)


# torch has no public name for these three. They take all tensors of a model in one call, which saves a launch of a
# kernel per tensor on a GPU, and the way through Python on a CPU.


def copy_all(targets: list[Tensor], values: Tensors) -> None:
    """T <- v for every tensor."""
    torch._foreach_copy_(targets, values)


def add_all(targets: list[Tensor], values: Tensors, alpha: float = 1.0) -> None:
    """T <- t + alpha v for every tensor."""
    torch._foreach_add_(targets, values, alpha=alpha)


def lerp_all(targets: list[Tensor], ends: Tensors, share: Any) -> None:
    """T <- t + share (end - t) for every tensor; one share for all, or a tensor of shares for each."""
    torch._foreach_lerp_(targets, ends, share)


def count(tree: Any) -> int:
    """How many numbers the tensors of a tree hold; plain Python numbers are not counted."""
    return sum(leaf.numel() for leaf in trees.leaves(tree) if isinstance(leaf, Tensor))


def row(tree: Any, index: int) -> Any:
    """Row `index` of every tensor of a stacked tree, as views."""
    return trees.map_tensors(lambda leaf: leaf[index], tree)


def numbers(tensors: Iterable[Tensor]) -> list[float]:
    """The values of tensors with one number each; the host waits for the device once, however many they are."""
    several = list(tensors)
    return torch.stack(several).tolist() if several else []


def all_finite(params: Params) -> bool:
    # The sum is not finite if any entry is not, and a sum is one cheap pass. It can also overflow without any
    # entry doing so; only then is the slower, exact question asked.
    sums = numbers(v.sum() for v in params.values())
    return all(map(math.isfinite, sums)) or all(bool(v.isfinite().all()) for v in params.values())
