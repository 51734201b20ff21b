"""Which samples a client sees in which step, and how they are augmented.

Drawn once per (seed, round, client, epoch), the same for every engine and method, so that two methods are compared on
identical batches of identical images.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from fl_lightning import streams
from fl_lightning.data import augment
from fl_lightning.data.dataset import Dataset
from fl_lightning.models.inputs import Inputs, each
from fl_lightning.params import Params, count, unflatten
from fl_lightning.training import Training

# The id under which the server's own data go.
SERVER = -1
# Passes over a client's data outside of training (offline curvature) go in blocks of this many samples.
BLOCK = 500
# Augmentation sorts samples by operation, which pays for many at once: so many are made ahead, in whole batches. Each
# image is the same whatever this number is.
AUGMENTED_AHEAD = 512


@dataclass(frozen=True)
class ClientData:
    """One client's share of the training set: an index into it, not a copy.

    Attributes:
        client: The client's id.
        dataset: The training set of all clients.
        indices: Which samples are the client's.
        dtype: Type of the inputs that the model takes.
    """

    client: int
    dataset: Dataset
    indices: Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: Tensor, choices: augment.Choices | None = None) -> tuple[Inputs, Tensor]:
        """The samples at these places of the training set, ready for the model; augmented if choices are given."""
        raw = each(lambda x: x.index_select(0, indices), self.dataset.train_x)
        if choices is not None:
            raw = augment.apply(self.dataset.augment, raw, choices)
        targets = self.dataset.targets(self.dataset.train_y.index_select(0, indices), self.dtype)
        return self.dataset.inputs(raw, self.dtype), targets

    def blocks(self, size: int = BLOCK) -> Iterator[tuple[Inputs, Tensor]]:
        """All samples once, in storage order, unaugmented."""
        for indices in torch.split(self.indices, size):
            yield self.fetch(indices)


class AllClients(Sequence[ClientData]):
    """The data of all clients, each client's made when it is asked for: there may be many more than take part.

    Args:
        dataset: The training set of all clients.
        places: Which samples are whose.
        dtype: Type of the inputs that the model takes.
    """

    def __init__(self, dataset: Dataset, places: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._dataset, self._places, self._dtype = dataset, places, dtype

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> ClientData: ...

    @overload
    def __getitem__(self, index: slice) -> list[ClientData]: ...

    def __getitem__(self, index: int | slice) -> ClientData | list[ClientData]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        n = range(len(self))[index]
        return ClientData(n, self._dataset, self._places[n].to(self._dataset.train_y.device), self._dtype)


@dataclass(frozen=True)
class Plan:
    """The batches of one client in one round.

    Attributes:
        data: The client's data.
        seed: The run's seed.
        round: r.
        training: The optimiser settings of the round.
        num_epochs: Epochs of this client in this round.
        smallest_batch: The fewest samples that the model can be trained on at once.
    """

    data: ClientData
    seed: int
    round: int
    training: Training
    num_epochs: int
    smallest_batch: int = 1

    @property
    def batch_sizes(self) -> list[int]:
        """The sizes of every epoch's batches."""
        return self.training.batch_sizes(len(self.data), self.smallest_batch)

    @property
    def steps_per_epoch(self) -> int:
        return self.training.steps_per_epoch(len(self.data), self.smallest_batch)

    @property
    def num_steps(self) -> int:
        return self.num_epochs * self.steps_per_epoch

    def order(self, epoch: int) -> Tensor:
        """The client's samples in the order of this epoch."""
        stream = streams.generator(self.seed, "batches", self.round, self.data.client, epoch)
        shuffled = torch.randperm(len(self.data), generator=stream)
        return self.data.indices[shuffled.to(self.data.indices.device)]

    def batches(self, epoch: int) -> tuple[Tensor, ...]:
        """The epoch cut into batches; the last one may be smaller and is never dropped."""
        return torch.split(self.order(epoch), self.batch_sizes)

    def all_batches(self) -> Iterator[Tensor]:
        """The batches of all epochs."""
        for epoch in range(self.num_epochs):
            yield from self.batches(epoch)

    @property
    def augments(self) -> bool:
        return self.data.dataset.augment != "none"

    def choices(self, epoch: int) -> augment.Choices:
        """What augmentation does to each sample of this epoch, in the epoch's order."""
        stream = streams.generator(self.seed, "augment", self.round, self.data.client, epoch)
        return augment.draw(len(self.data), self.data.dataset.shape, stream)

    def examples(self, epoch: int) -> Iterator[tuple[Inputs, Tensor]]:
        """The epoch's batches, augmented and ready for the model."""
        if not self.augments:
            yield from map(self.data.fetch, self.batches(epoch))
            return
        sizes = self.batch_sizes
        ahead = max(1, AUGMENTED_AHEAD // sizes[0])
        blocks = [sizes[first : first + ahead] for first in range(0, len(sizes), ahead)]
        lengths = list(map(sum, blocks))
        places, choices = torch.split(self.order(epoch), lengths), self.choices(epoch).split(lengths)
        for block, where, how in zip(blocks, places, choices, strict=True):
            x, y = self.data.fetch(where, how)
            yield from zip(torch.split(x, block), torch.split(y, block), strict=True)

    def all_examples(self) -> Iterator[tuple[Inputs, Tensor]]:
        """The examples of all epochs."""
        for epoch in range(self.num_epochs):
            yield from self.examples(epoch)

    def noise(self, step: int, like: Params) -> Params:
        """Standard normal numbers of one step, one per parameter, for local rules that are random.

        They are drawn where the parameters lie: to draw them on the CPU would cost more than a step on a GPU.
        """
        one = next(iter(like.values()))
        stream = streams.generator(self.seed, "rule", self.round, self.data.client, step, device=one.device)
        return unflatten(torch.randn(count(like), generator=stream, dtype=one.dtype, device=one.device), like)
