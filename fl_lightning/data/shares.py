"""The samples of each client, for any number of clients: a client's share is made when it is needed.

A part of each client's samples may be split off as its own test set.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from typing import overload

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.streams import numpy_generator


class Sizes(tuple[int, ...]):
    """The numbers of samples of all clients, with what is asked of them in every round."""

    @cached_property
    def eligible(self) -> list[int]:
        """The clients that have samples, increasing."""
        return [n for n, size in enumerate(self) if size > 0]

    @cached_property
    def total(self) -> int:
        return sum(self)


class Shares(Sequence[Tensor]):
    """The samples of each client, as a sequence of tensors of indices.

    Attributes:
        places: The indices of all clients' samples, client after client.
        sizes: How many of them each client has.

    >>> shares = Shares(torch.tensor([4, 7, 1]), [2, 0, 1])
    >>> len(shares), shares[0], shares[-1], [len(share) for share in shares]
    (3, tensor([4, 7]), tensor([1]), [2, 0, 1])
    """

    def __init__(self, places: Tensor, sizes: Sequence[int]) -> None:
        self.places, self.sizes = places, Sizes(sizes)
        self._ends: list[int] = [0, *torch.tensor(self.sizes, dtype=torch.long).cumsum(0).tolist()]
        if self._ends[-1] != len(places):
            raise ValueError(f"expected {len(places)} samples in all shares, got {self._ends[-1]}")

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> "Shares":
        """The same samples, on the CPU."""
        if isinstance(parts, Shares):
            return parts
        places = torch.cat([torch.empty(0, dtype=torch.long), *(part.cpu() for part in parts)])
        return cls(places, [len(part) for part in parts])

    def owners(self) -> Tensor:
        """The client of each of the places."""
        return torch.repeat_interleave(torch.arange(len(self)), torch.tensor(self.sizes, dtype=torch.long))

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        n = range(len(self))[index]
        # A copy: a view would take all others along to wherever it is sent.
        return self.places[self._ends[n] : self._ends[n + 1]].clone()

    def __iter__(self) -> Iterator[Tensor]:
        return (self.places[start:end].clone() for start, end in pairwise(self._ends))


def sizes_of(parts: Sequence[Tensor]) -> Sizes:
    """The numbers of samples of all clients."""
    return parts.sizes if isinstance(parts, Shares) else Sizes(len(part) for part in parts)


def content_hash(parts: Sequence[Tensor]) -> str:
    """A short name for "this client has these samples"; the order of samples within a client does not matter.

    >>> first, second = torch.tensor([0, 1]), torch.tensor([2])
    >>> content_hash([first, second]) == content_hash([first.flip(0), second])
    True
    >>> content_hash([first, second]) == content_hash([second, first])
    False
    """
    shares = Shares.of(parts)
    places, owners, sizes = shares.places.numpy(), shares.owners().numpy(), np.array(shares.sizes, dtype=np.int64)
    # The length comes first, so that moving a sample over a border changes the text that is hashed.
    ordered = places[np.lexsort((places, owners))]
    text = np.insert(ordered, np.cumsum(sizes) - sizes, sizes).astype("<i8")
    return sha256(text.tobytes()).hexdigest()[:16]


def class_counts(labels: Tensor, parts: Sequence[Tensor], num_classes: int) -> Tensor:
    """How many samples of each class each client holds, clients x classes.

    >>> class_counts(torch.tensor([0, 1, 1]), [torch.tensor([0, 1]), torch.tensor([2])], num_classes=2)
    tensor([[1, 1],
            [0, 1]])
    """
    shares = Shares.of(parts)
    cells = shares.owners() * num_classes + labels.cpu().long()[shares.places]
    return cells.bincount(minlength=len(shares) * num_classes).view(len(shares), num_classes)


def client_test_sets(labels: Tensor, clients: Shares, share: float, seed: int) -> tuple[Shares, Shares]:
    """What each client trains on, and its own test set; both in increasing order.

    A client's samples, by class and at random within a class, are drawn at equal distances: so its test set has
    share * samples of them, rounded, and of each class its share up to one sample.

    Raises:
        UserError: If no client has enough samples for a test set.

    >>> train, test = client_test_sets(torch.tensor([0, 0, 1, 1]), Shares(torch.arange(4), [4]), 0.5, 0)
    >>> len(train[0]), sorted(torch.tensor([0, 0, 1, 1])[test[0]].tolist())
    (2, [0, 1])
    """
    sizes = np.array(clients.sizes, dtype=np.int64)
    numbers = np.minimum(np.floor(share * sizes + 0.5).astype(np.int64), np.maximum(sizes - 1, 0))
    require(
        bool(numbers.any()),
        f"data.client_test {share:g} leaves no client a test sample: the largest client has {sizes.max()} "
        "samples; raise it, or lower data.clients",
    )
    rng = numpy_generator(seed, "client test")
    places, owners = clients.places.numpy(), clients.owners().numpy()
    order = np.lexsort((rng.random(len(places)), labels.cpu().numpy()[places], owners))
    starts = np.cumsum(sizes) - sizes
    taker = np.repeat(np.arange(len(sizes)), numbers)
    turn = np.arange(len(taker)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    steps = (turn + rng.random(len(sizes))[taker]) * sizes[taker] / numbers[taker]
    is_test = np.zeros(len(places), bool)
    is_test[order[starts[taker] + np.minimum(steps.astype(np.int64), sizes[taker] - 1)]] = True
    return (
        Shares(torch.from_numpy(places[~is_test]), (sizes - numbers).tolist()),
        Shares(torch.from_numpy(places[is_test]), numbers.tolist()),
    )
