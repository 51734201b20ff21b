"""Tensors of one classification problem, kept in memory as they were stored (images as bytes)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.data.augment import check as check_augmentation
from fl_lightning.errors import UserError, require

# Numbers that are looked at together, so that a check needs little memory of its own.
BLOCK = 1_000_000


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
        validation: Indices of the training samples that belong to nobody and serve only to choose settings, or None.
        client_tests: Indices of those training samples of each client on which nobody trains, because they are the
            client's own test set; None if clients have none.
        vocabulary: How many different tokens there may be, where inputs are tokens; None takes the largest one.
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
    validation: Tensor | None = None
    client_tests: Sequence[Tensor] | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            require(
                isinstance(x, Tensor) and isinstance(y, Tensor),
                f"{part}_x and {part}_y must be torch tensors, got {type(x).__name__} and {type(y).__name__}; "
                "torch.as_tensor makes one of an array",
            )
            _check_labels(part, x, y, self.num_classes)
            require(
                x.dim() >= 2 and (x.dtype in (torch.uint8, torch.long) or x.is_floating_point()),
                f"{part}_x must hold bytes, floating point numbers or tokens, at least one per sample in a dimension "
                f"of their own, got {x.dtype} of shape {tuple(x.shape)}; use .float(), .to(torch.uint8) or [:, None]",
            )
        require(
            self.train_x.shape[1:] == self.test_x.shape[1:] and self.train_x.dtype == self.test_x.dtype,
            f"train_x and test_x must hold inputs of one shape and type, got {tuple(self.train_x.shape[1:])} of "
            f"{self.train_x.dtype} and {tuple(self.test_x.shape[1:])} of {self.test_x.dtype}; make them alike",
        )
        if self.train_x.is_floating_point():
            _check_finite("train_x", self.train_x)
            _check_finite("test_x", self.test_x)
        elif self.train_x.dtype == torch.uint8:
            self._check_scaling()
        check_augmentation(self.augment, self.shape, self.train_x.dtype)
        if self.owners is not None:
            _check_owners(self.owners, len(self.train_y))

    def _check_scaling(self) -> None:
        fitting = {1, self.shape[0]}
        require(
            len(self.mean) in fitting and len(self.std) in fitting,
            f"mean and std must have one number, or one for each of the {self.shape[0]} channels, got "
            f"{len(self.mean)} and {len(self.std)}; the channels are the second dimension of train_x",
        )
        require(
            all(map(isfinite, self.mean)) and all(isfinite(value) and value > 0 for value in self.std),
            f"mean must be finite and std positive, got {self.mean} and {self.std}; 0.5 and 0.5 scale to [-1, 1]",
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train_x.shape[1:])

    def inputs(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """A batch as the model takes it. Bytes are standardised here, batch by batch, on the device they lie on."""
        if raw.dtype == torch.long:
            return raw
        if raw.is_floating_point():
            return raw.to(dtype)
        if len(self.mean) == len(self.std) == 1:
            # One channel: numbers instead of tensors, and in place on the fresh copy, cost half as much.
            return raw.to(dtype).div_(255).sub_(self.mean[0]).div_(self.std[0])
        mean = torch.tensor(self.mean, dtype=dtype, device=raw.device).view(-1, *[1] * (raw.dim() - 2))
        std = torch.tensor(self.std, dtype=dtype, device=raw.device).view(-1, *[1] * (raw.dim() - 2))
        return (raw.to(dtype) / 255 - mean) / std

    def to(self, device: torch.device) -> "Dataset":
        """The same data on another device; the very same where it is there already, so that mapped files stay so."""
        move = {name: getattr(self, name).to(device) for name in ("train_x", "train_y", "test_x", "test_y")}
        if all(tensor is getattr(self, name) for name, tensor in move.items()):
            return self
        return replace(self, **move)


@dataclass(frozen=True)
class Source(ABC):
    """Where a dataset comes from. Its fields are its settings; one file of `fl_lightning/data/sources` each.

    `version` is part of a run's identity: raise it when the data change that it yields, or a default of its fields.
    """

    version: ClassVar[int] = 1

    @abstractmethod
    def load(self) -> Dataset:
        """Read it into memory, or raise `UserError` that says which files were expected where."""

    def fingerprint(self) -> str | None:
        """A hash of what a user's own files hold, which then stands for their path in what a run is known by.

        Results of a file that was changed are not taken for results of the new one, and a file that was moved is
        still the same. None, where the name and the settings of the source say which data they are: embedded data, and
        the official files of a public dataset.
        """
        return None


def _check_labels(part: str, x: Tensor, y: Tensor, num_classes: int) -> None:
    require(
        y.dim() == 1 and x.dim() >= 1 and len(x) == len(y) > 0,
        f"{part}_x and {part}_y must have the same number of samples, at least 1, got shapes {tuple(x.shape)} and "
        f"{tuple(y.shape)}; {part}_y holds one label per sample",
    )
    require(y.dtype == torch.long, f"{part}_y must hold labels of type torch.long, got {y.dtype}; use .long()")
    low, high = int(y.min()), int(y.max())
    require(
        0 <= low <= high < num_classes,
        f"{part}_y must hold labels 0 to {num_classes - 1}, got {low} to {high}; correct num_classes or y",
    )


def _check_finite(name: str, x: Tensor) -> None:
    """Block by block: of a mapped file, no copy is made."""
    size = max(1, BLOCK // max(1, x[0].numel()))
    for number, block in enumerate(torch.split(x, size)):
        finite = block.isfinite()
        if not finite.all():
            sample = number * size + int(finite.flatten(1).all(1).logical_not().nonzero()[0])
            value = float(x[sample].flatten()[x[sample].flatten().isfinite().logical_not()][0])
            raise UserError(f"{name} must hold finite numbers, got {value} in sample {sample}; correct or remove it")


def _check_owners(owners: Tensor, num_samples: int) -> None:
    require(
        isinstance(owners, Tensor) and owners.dtype == torch.long and tuple(owners.shape) == (num_samples,),
        f"owners must be a torch.long tensor with one number for each of the {num_samples} training samples, got "
        f"{type(owners).__name__} {getattr(owners, 'dtype', '')} {tuple(getattr(owners, 'shape', ()))}",
    )
    low, last = int(owners.min()), int(owners.max())
    require(low >= 0, f"owners must be numbers from 0 on, got {low}")
    present = set(owners.tolist())
    if len(present) != last + 1:
        empty = next(owner for owner in range(last + 1) if owner not in present)
        raise UserError(
            f"every client from 0 to {last} must own a sample, but client {empty} has none; "
            "torch.unique(owners, return_inverse=True)[1] numbers those that do without gaps"
        )
