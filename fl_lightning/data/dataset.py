"""Tensors of one problem, kept in memory as they were stored (images as bytes)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_lightning.data.augment import check as check_augmentation
from fl_lightning.data.preparation import Column, Preparation, scaled
from fl_lightning.errors import UserError, require
from fl_lightning.models.inputs import Inputs, each, named, part, several
from fl_lightning.models.likelihoods.base import Likelihood
from fl_lightning.models.likelihoods.classification import Classification

CLASSIFICATION = Classification()
# Numbers that are looked at together, so that a check needs little memory of its own.
BLOCK = 1_000_000
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Dataset:
    """Training and test set of one problem.

    Attributes:
        train_x: Inputs, first dimension the samples: bytes, floating point numbers that are used as they are, or whole
            numbers (torch.long) from 0 on, which are tokens. Several inputs are a tuple of tensors, which the model
            takes as positional arguments, or a dict of them, which it takes as named ones.
        train_y: Targets, as the likelihood has them: labels 0 .. num_classes - 1 for classification.
        test_x: Inputs of the global test set, on which GA and LA are measured.
        test_y: Its targets.
        num_classes: K; for a likelihood without classes, the number of outputs.
        mean: Per channel, subtracted from byte inputs after scaling them to [0, 1].
        std: Per channel, divides after that.
        augment: Name of the augmentation of training batches (`fl_lightning.data.augment`).
        owners: The owner of each training sample by nature (a writer, a hospital): numbers 0 .. n - 1, or None if the
            data name no clients.
        validation: Indices of the training samples that belong to no client and serve only to choose settings, or None.
        client_tests: Indices of those samples of each client that are left out of training, because they are the
            client's own test set; None if clients have none.
        likelihood: What the model's outputs say of the targets: the task.
        vocabulary: How many different tokens there may be, where inputs are tokens; None takes the largest one.
        columns: Those of a table that the inputs were made of; empty where they were not.
        target_columns: Of a table that holds a regression: those of the targets, in units of which they are.
    """

    train_x: Inputs
    train_y: Tensor
    test_x: Inputs
    test_y: Tensor
    num_classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augment: str = "none"
    owners: Tensor | None = None
    validation: Tensor | None = None
    client_tests: Sequence[Tensor] | None = None
    likelihood: Likelihood = CLASSIFICATION
    vocabulary: int | None = None
    columns: tuple[Column, ...] = ()
    target_columns: tuple[Column, ...] = ()

    def __post_init__(self) -> None:
        for half, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            for name, one in named(x, f"{half}_x").items():
                _check_inputs(half, name, one, y)
            require(y.shape[1:] == self.train_y.shape[1:], "train_y and test_y must hold targets of one shape")
            self.likelihood.check_targets(half, y, self.num_classes)
        train, test = named(self.train_x, "train_x"), named(self.test_x, "test_x")
        require(
            type(self.train_x) is type(self.test_x) and len(train) == len(test) > 0,
            f"train_x and test_x must hold the same inputs, got {', '.join(train)} and {', '.join(test)}",
        )
        for (name, one), (other_name, other) in zip(train.items(), test.items(), strict=True):
            require(
                one.shape[1:] == other.shape[1:] and one.dtype == other.dtype,
                f"{name} and {other_name} must hold inputs of one shape and type, got {tuple(one.shape[1:])} of "
                f"{one.dtype} and {tuple(other.shape[1:])} of {other.dtype}; make them alike",
            )
            if one.is_floating_point():
                check_finite(name, one)
                check_finite(other_name, other)
            elif one.dtype == torch.uint8:
                self._check_scaling(one.shape[1])
            else:
                self._check_tokens(name, one)
                self._check_tokens(other_name, other)
        if not several(self.train_x):
            check_augmentation(self.augment, self.shape, self.train_x.dtype)
        else:
            require(self.augment == "none", f"data.augment {self.augment} needs images alone, got several inputs")
        if self.owners is not None:
            _check_owners(self.owners, len(self.train_y))

    def _check_tokens(self, name: str, x: Tensor) -> None:
        low, high = int(x.min()), int(x.max())
        require(low >= 0, f"{name} must hold tokens from 0 on, got {low}; use .float() for other inputs")
        require(
            self.vocabulary is None or high < self.vocabulary,
            f"{name} must hold tokens below vocabulary, {self.vocabulary}, got {high}; raise it",
        )

    def _check_scaling(self, channels: int) -> None:
        fitting = {1, channels}
        require(
            len(self.mean) in fitting and len(self.std) in fitting,
            f"mean and std must have one number, or one for each of the {channels} channels, got "
            f"{len(self.mean)} and {len(self.std)}; the channels are the second dimension of train_x",
        )
        require(
            all(map(isfinite, self.mean)) and all(isfinite(value) and value > 0 for value in self.std),
            f"mean must be finite and std positive, got {self.mean} and {self.std}; 0.5 and 0.5 scale to [-1, 1]",
        )

    @property
    def shape(self) -> Any:
        """Shape of one input; of several inputs a tuple or dict of shapes, as they are."""
        return each(lambda x: tuple(x.shape[1:]), self.train_x)

    @property
    def num_tokens(self) -> int | None:
        """How many different tokens there may be; None where no input holds tokens."""
        both = [*named(self.train_x, "").values(), *named(self.test_x, "").values()]
        largest = [int(x.max()) for x in both if x.dtype == torch.long]
        if self.vocabulary is not None or not largest:
            return self.vocabulary
        # A model that is to say the next token must know every token, and the other way round.
        return max(1 + max(largest), self.num_classes if self.likelihood.task == "tokens" else 0)

    @cached_property
    def strata(self) -> Tensor:
        """A whole number for each training sample, by which samples are divided among clients: its class, mostly."""
        found = self.likelihood.strata(self.train_y)
        return torch.zeros(len(self.train_y), dtype=torch.long) if found is None else found

    @property
    def test_strata(self) -> Tensor:
        """The same for the samples of the test set."""
        found = self.likelihood.strata(self.test_y)
        return torch.zeros(len(self.test_y), dtype=torch.long) if found is None else found

    def tested_on(self, places: Tensor) -> "Dataset":
        """The same with a part of the test set: indices, or for each sample whether it stays."""
        return replace(self, test_x=part(self.test_x, places), test_y=self.test_y[places])

    @property
    def num_strata(self) -> int:
        """How many there are: classes, mostly."""
        return self.num_classes if self.likelihood.has_classes else 1 + int(self.strata.max())

    def inputs(self, raw: Inputs, dtype: torch.dtype) -> Inputs:
        """A batch as the model takes it. Bytes are standardised here, batch by batch, on the device they lie on."""
        return each(lambda x: scaled(x, self.mean, self.std, dtype), raw)

    @property
    def preparation(self) -> Preparation:
        """What a model that was trained on these data must know of its inputs."""
        kinds = tuple(str(x.dtype).removeprefix("torch.") for x in named(self.train_x, "").values())
        return Preparation(kinds, self.mean, self.std, self.columns, self.target_columns)

    def targets(self, raw: Tensor, dtype: torch.dtype) -> Tensor:
        """Targets as the likelihood takes them: real numbers in the model's type, labels as they are."""
        return raw.to(dtype) if raw.is_floating_point() else raw

    def to(self, device: torch.device) -> "Dataset":
        """The same data on another device; the very same where it is there already, so that mapped files stay so."""
        tensors = [*named(self.train_x, "").values(), *named(self.test_x, "").values(), self.train_y, self.test_y]
        if all(tensor.to(device) is tensor for tensor in tensors):
            return self
        names = ("train_x", "train_y", "test_x", "test_y")
        return replace(self, **{name: each(lambda x: x.to(device), getattr(self, name)) for name in names})


@dataclass(frozen=True)
class Source(ABC):
    """Where a dataset comes from. Its fields are its settings; one file of `fl_lightning/data/sources` each.

    `version` is part of a run's identity: raise it when the data change that it yields, or a default of its fields.
    """

    version: ClassVar[int] = 1
    # The setting that names the column of clients. Where it is given, data.partition is natural by default.
    owners_by: ClassVar[str | None] = None

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


def _check_inputs(half: str, name: str, x: Tensor, y: Tensor) -> None:
    require(
        isinstance(x, Tensor) and isinstance(y, Tensor),
        f"{name} and {half}_y must be torch tensors, got {type(x).__name__} and {type(y).__name__}; "
        "torch.as_tensor makes one of an array",
    )
    require(
        y.dim() >= 1 and x.dim() >= 1 and len(x) == len(y) > 0,
        f"{name} and {half}_y must have the same number of samples, at least 1, got shapes {tuple(x.shape)} and "
        f"{tuple(y.shape)}; {half}_y holds one target per sample",
    )
    require(
        x.dim() >= 2 and (x.dtype in (torch.uint8, torch.long) or x.is_floating_point()),
        f"{name} must hold bytes, floating point numbers or tokens (torch.long), at least one per sample in a "
        f"dimension of their own, got {x.dtype} of shape {tuple(x.shape)}; use .float(), .to(torch.uint8), .long() or "
        "[:, None]",
    )
    require(
        x[0].numel() > 0,
        f"{name} must hold at least one number per sample, got shape {tuple(x.shape)}; save it again",
    )


def check_finite(name: str, x: Tensor) -> None:
    """Refuse what float32 cannot hold, block by block: of a mapped file, no copy is made."""
    size = max(1, BLOCK // max(1, x[0].numel()))
    for number, block in enumerate(torch.split(x, size)):
        # Models compute in float32 by default: a larger number becomes infinite there.
        finite = block.abs() <= LARGEST if block.dtype == torch.float64 else block.isfinite()
        if not finite.all():
            row, *place = finite.logical_not().nonzero()[0].tolist()
            column = f"column {place[0]}" if len(place) == 1 else f"place {tuple(place)}"
            raise UserError(
                f"{name} must hold finite numbers of at most {LARGEST:.2g}, got {float(block[row, *place]):g} in "
                f"sample {number * size + row}, {column}; correct or remove it"
            )


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
