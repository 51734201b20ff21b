"""Tensors of one classification problem, kept in memory as they were stored (images as bytes)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_lightning.errors import require


@dataclass(frozen=True)
class Dataset:
    """Training and test set of one problem.

    Attributes:
        train_x: Inputs, first dimension the samples: bytes, or floating point numbers that are used as they are.
        train_y: Labels 0 .. num_classes - 1.
        test_x: Inputs of the global test set, on which GA and LA are measured.
        test_y: Its labels.
        num_classes: K.
        mean: Per channel, subtracted from byte inputs after scaling them to [0, 1].
        std: Per channel, divides after that.
        augment: Name of the augmentation of training batches (`fl_lightning.data.augment`).
        owners: Who a training sample belongs to by nature (a writer, a hospital): numbers 0 .. n - 1, or None if the
            data name no clients.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    num_classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augment: str = "none"
    owners: Tensor | None = None

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            require(
                isinstance(x, Tensor) and isinstance(y, Tensor),
                f"{part}_x and {part}_y must be torch tensors, got {type(x).__name__} and {type(y).__name__}; "
                "torch.as_tensor makes one of an array",
            )
            require(
                len(x) == len(y) > 0,
                f"{part}_x and {part}_y must have the same number of samples, at least 1, got {len(x)} and {len(y)}",
            )
            require(y.dtype == torch.long, f"{part}_y must hold labels of type torch.long, got {y.dtype}; use .long()")
            low, high = int(y.min()), int(y.max())
            require(
                0 <= low <= high < self.num_classes,
                f"{part}_y must hold labels 0 to {self.num_classes - 1}, got {low} to {high}; correct num_classes or y",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train_x.shape[1:])

    def inputs(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """A batch as the model takes it. Bytes are standardised here, batch by batch, on the device they lie on."""
        if raw.is_floating_point():
            return raw.to(dtype)
        if len(self.mean) == len(self.std) == 1:
            # One channel: numbers instead of tensors, and in place on the fresh copy, cost half as much.
            return raw.to(dtype).div_(255).sub_(self.mean[0]).div_(self.std[0])
        mean = torch.tensor(self.mean, dtype=dtype, device=raw.device).view(-1, *[1] * (raw.dim() - 2))
        std = torch.tensor(self.std, dtype=dtype, device=raw.device).view(-1, *[1] * (raw.dim() - 2))
        return (raw.to(dtype) / 255 - mean) / std

    def to(self, device: torch.device) -> "Dataset":
        """The same data on another device; no copy where it is there already."""
        move = {name: getattr(self, name).to(device) for name in ("train_x", "train_y", "test_x", "test_y")}
        return replace(self, **move)


@dataclass(frozen=True)
class Source(ABC):
    """Where a dataset comes from. Its fields are its settings; one file of `fl_lightning/data` each, discovered."""

    @abstractmethod
    def load(self) -> Dataset:
        """Read it into memory, or raise `UserError` that says which files were expected where."""
