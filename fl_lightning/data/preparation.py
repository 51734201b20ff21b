"""From inputs as a user has them to those of the network: what was done to the training data, in a few numbers.

Bytes are scaled per channel, numbers of a table are standardised, its text becomes a 0 or 1 for each of its values.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.models.inputs import Inputs, named, several


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: Its name.
        mean: Of its numbers in the training rows.
        std: Their standard deviation, 1 where they are all equal.
        values: The different values of a column of text, in order; None of numbers.
    """

    name: str
    mean: float = 0.0
    std: float = 1.0
    values: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Preparation:
    """What becomes of inputs before the network, and of its outputs after it.

    Attributes:
        kinds: The type of each input, as torch calls it: uint8 are bytes, int64 tokens, the others numbers.
        mean: Per channel, subtracted from bytes after scaling them to [0, 1].
        std: Per channel, divides after that.
        columns: Of a table, in order; empty for other inputs.
        targets: Columns of a regression, whose numbers were standardised; empty where they were not.
    """

    kinds: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    columns: tuple[Column, ...] = ()
    targets: tuple[Column, ...] = ()

    def inputs(self, raw: Inputs, dtype: torch.dtype) -> Inputs:
        """Raw inputs as the network takes them; several are a tuple or a dict, the rows of a table a DataFrame."""
        if self.columns:
            return torch.from_numpy(_features(raw, self.columns)).to(dtype)
        given = list(named(raw, "inputs").items())
        require(len(given) == len(self.kinds), f"expected {len(self.kinds)} inputs, got {len(given)}")
        found = [self._input(name, value, kind, dtype) for (name, value), kind in zip(given, self.kinds, strict=True)]
        if not several(raw):
            return found[0]
        return dict(zip(raw, found, strict=True)) if isinstance(raw, dict) else tuple(found)

    def outputs(self, values: Tensor) -> Tensor:
        """Outputs of a regression in the units of its targets."""
        if not self.targets:
            return values
        mean, std = (values.new_tensor([getattr(one, name) for one in self.targets]) for name in ("mean", "std"))
        return values * std + mean

    def text(self) -> str:
        """As a file has it."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """From a file."""
        content = json.loads(text)
        content |= {name: map(column_of, content[name]) for name in ("columns", "targets")}
        return cls(**{name: tuple(value) for name, value in content.items()})

    def _input(self, name: str, value: Any, kind: str, dtype: torch.dtype) -> Tensor:
        x = torch.as_tensor(value)
        require(
            (x.dtype == torch.uint8) == (kind == "uint8"),
            f"{name} must hold {_in_words(kind)}, as the data of the run do, got {x.dtype}; inputs that are prepared "
            "already go to the model itself: model(x)",
        )
        if kind == "uint8" and x.dim() == 3:
            x = x[:, None]  # grey images
        return scaled(x.long() if kind == "int64" else x, self.mean, self.std, dtype)


def scaled(raw: Tensor, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """Bytes are standardised; numbers change their type only, tokens nothing."""
    if raw.dtype == torch.long:
        return raw
    if raw.is_floating_point():
        return raw.to(dtype)
    if len(mean) == len(std) == 1:
        # One channel: numbers instead of tensors, and in place on the fresh copy, cost half as much.
        return raw.to(dtype).div_(255).sub_(mean[0]).div_(std[0])
    shape = (-1, *[1] * (raw.dim() - 2))
    centre, spread = (torch.tensor(one, dtype=dtype, device=raw.device).view(shape) for one in (mean, std))
    return (raw.to(dtype) / 255 - centre) / spread


def column_of(content: tuple[Any, ...] | list[Any]) -> Column:
    """A column again, from JSON."""
    name, mean, std, values = content
    return Column(name, mean, std, None if values is None else tuple(values))


def _features(raw: Any, columns: tuple[Column, ...]) -> np.ndarray[Any, Any]:
    """The features of a DataFrame or dict of columns; or of numbers, a column each, in the order of the columns."""
    names = [one.name for one in columns]
    if isinstance(raw, Mapping) or hasattr(raw, "columns"):
        missing = [name for name in names if name not in raw]
        require(not missing, f"expected the columns {', '.join(names)}, got none of the name {', '.join(missing)}")
        given = [np.asarray(raw[name]) for name in names]
    else:
        array = np.asarray(raw)
        require(
            array.ndim == 2 and array.shape[1] == len(names),
            f"expected a DataFrame with the columns {', '.join(names)}, or as many numbers per row, got an array of "
            f"shape {array.shape}",
        )
        given = list(array.T)
    return np.concatenate([_feature(one, values) for one, values in zip(columns, given, strict=True)], axis=1)


def _feature(one: Column, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if one.values is None:
        require(values.dtype.kind in "biuf", f"column {one.name!r} must hold numbers, got {values.dtype}")
        return ((values.astype(np.float64) - one.mean) / one.std).astype(np.float32)[:, None]
    text = values.astype(str)
    strange = [value for value in text if value not in one.values]
    require(not strange, f"column {one.name!r} must hold one of {', '.join(one.values)}, got {''.join(strange[:1])!r}")
    chosen: np.ndarray[Any, Any] = text[:, None] == np.array(one.values)
    return chosen.astype(np.float32)


def _in_words(kind: str) -> str:
    return {"uint8": "bytes (uint8)", "int64": "tokens (whole numbers)"}.get(kind, "numbers (floating point)")
