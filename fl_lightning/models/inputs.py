"""What a model is shown: one tensor, or several for models with several inputs.

A tuple is given to the model as positional arguments, a dict as named ones. The first dimension of each is the samples.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fl_lightning.errors import require

# A tensor, a tuple of tensors, or a dict of them.
Inputs: TypeAlias = Any


def each(function: Callable[..., Any], x: Inputs, *others: Inputs) -> Inputs:
    """What a function makes of each input, in the same structure.

    >>> each(len, (torch.zeros(3), torch.zeros(4, 2)))
    (3, 4)
    """
    if isinstance(x, dict):
        return {name: function(value, *(other[name] for other in others)) for name, value in x.items()}
    if isinstance(x, tuple):
        return tuple(function(*values) for values in zip(x, *others, strict=True))
    return function(x, *others)


def named(x: Inputs, name: str) -> dict[str, Tensor]:
    """Each input by what a user calls it.

    >>> list(named((torch.zeros(1), torch.zeros(1)), "train_x")), list(named({"a": torch.zeros(1)}, "train_x"))
    (['train_x[0]', 'train_x[1]'], ["train_x['a']"])
    """
    if isinstance(x, dict):
        return {f"{name}[{key!r}]": value for key, value in x.items()}
    if isinstance(x, tuple):
        return {f"{name}[{place}]": value for place, value in enumerate(x)}
    return {name: x}


def several(x: Inputs) -> bool:
    """Whether a model takes more than one tensor."""
    return isinstance(x, dict | tuple)


def number(x: Inputs) -> int:
    """Of samples."""
    return len(next(iter(named(x, "").values())))


def device_of(x: Inputs) -> torch.device:
    """Where they lie."""
    return next(iter(named(x, "").values())).device


def split(x: Inputs, size: int) -> Iterator[Inputs]:
    """Blocks of so many samples."""
    if not several(x):
        yield from torch.split(x, size)
        return
    for first in range(0, number(x), size):
        yield part(x, slice(first, first + size))


def part(x: Inputs, places: Any) -> Inputs:
    """The samples at these places: a slice, or indices."""
    return each(lambda value: value[places], x)


def shown(model: nn.Module, x: Inputs) -> Tensor:
    """The outputs of a model."""
    positional, keywords = arguments(x)
    outputs: Tensor = model(*positional, **keywords)
    return outputs


def arguments(x: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and named arguments of the model."""
    if isinstance(x, dict):
        return (), x
    return (x if isinstance(x, tuple) else (x,)), {}


def require_sequences(model: str, shape: Sequence[int]) -> None:
    """Refuse inputs of any other shape, for a model that reads tokens."""
    require(
        len(shape) == 1,
        f"the model {model} reads sequences of tokens, got inputs of shape {tuple(shape)}; use another",
    )
