"""Who holds which training samples: seeded partitions of one labelled training set over N clients.

Every sample of the (sub)set goes to exactly one client, for any number of classes. Counts are rounded by largest
remainders, so that nothing is dropped. Clients may end up without data.

The default is FedMA's and the FOLA code's: per class over clients. The FOLA text describes the other direction, per
client over classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from typing import Any, Literal, TypeAlias, assert_never, get_args

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import require, unknown
from fl_lightning.streams import numpy_generator

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Kind: TypeAlias = Literal["dirichlet", "dirichlet_per_client", "iid", "shards", "quantity"]


@dataclass(frozen=True)
class Split:
    """How the training set is divided among the clients.

    Attributes:
        clients: Number of clients (N).
        partition: "dirichlet": each class is spread over the clients by a draw from Dir(alpha); sizes differ too.
            "dirichlet_per_client": each client mixes the classes by its own draw from Dir(alpha); sizes are equal.
            "iid": shuffled and cut into equal parts. "shards": sorted by label, cut into shards, each client is dealt
            a few. "quantity": the labels are iid, the sizes are a draw from Dir(alpha).
        alpha: Concentration of the Dirichlet draws (alpha). Small: each client sees few classes; large: close to iid.
        shards_per_client: Shards dealt to each client, for the partition "shards" alone.
        subset: Share of the training set that is used at all: stratified, the same for every seed, taken before
            partitioning.
        holdout: Share of that which belongs to no client but to the server: class-balanced, taken before partitioning;
            for methods whose server has data. The same for every method at one seed.
    """

    clients: int = 10
    partition: Kind = "dirichlet"
    alpha: float = 0.1
    shards_per_client: int = 2
    subset: float = 1.0
    holdout: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.clients >= 1,
            f"data.clients must be >= 1, got {self.clients}; 1 trains on all data in one place",
        )
        if self.partition not in get_args(Kind):
            raise unknown("data.partition", self.partition, get_args(Kind))
        require(
            isfinite(self.alpha) and self.alpha > 0,
            f"data.alpha must be > 0 and finite, got {self.alpha:g}; small values such as 0.01 are the most "
            "heterogeneous, for none use data.partition iid",
        )
        require(
            self.shards_per_client >= 1,
            f"data.shards_per_client must be >= 1, got {self.shards_per_client}; 2 is the usual choice",
        )
        require(
            0 < self.subset <= 1,
            f"data.subset must be > 0 and <= 1, got {self.subset:g}; 1 uses the whole training set",
        )
        require(
            0 <= self.holdout < 1,
            f"data.holdout must be >= 0 and < 1, got {self.holdout:g}; 0 leaves all samples to the clients",
        )


def partition(labels: Tensor, split: Split, seed: int) -> list[Tensor]:
    """The indices of each client's samples in the training set, in increasing order; depends on the arguments alone.

    >>> parts = partition(torch.tensor([0, 0, 1, 1, 2, 2]), Split(clients=2, partition="iid"), seed=0)
    >>> [len(part) for part in parts], sorted(torch.cat(parts).tolist())
    ([3, 3], [0, 1, 2, 3, 4, 5])
    """
    spared = held_out(labels, split, seed).numpy()
    chosen = np.setdiff1d(subset_indices(labels, split.subset).numpy(), spared)
    require(
        split.clients <= len(chosen),
        f"data.clients must be at most the number of training samples, {len(chosen)}, got {split.clients}; "
        f"lower data.clients{' or raise data.subset' if split.subset < 1 else ''}"
        f"{' or lower data.holdout' if split.holdout > 0 else ''}",
    )
    held = _labels(labels)[chosen]
    rng = numpy_generator(seed, "partition")
    match split.partition:
        case "dirichlet":
            positions = _deal(held, _counts_by_class(held, split, rng), rng)
        case "dirichlet_per_client":
            positions = _deal(held, _counts_by_client(held, split, rng), rng)
        case "iid":
            positions = np.array_split(rng.permutation(len(held)), split.clients)
        case "shards":
            positions = _shards(held, split, rng)
        case "quantity":
            sizes = _whole(_softmax(_log_dirichlet(split.alpha, (split.clients,), rng)), np.array(len(held)))
            positions = _cut(rng.permutation(len(held)), sizes)
        case _:
            assert_never(split.partition)
    return [torch.from_numpy(np.sort(chosen[position])) for position in positions]


def subset_indices(labels: Tensor, share: float, seed: int = 0) -> Tensor:
    """A fixed, stratified share of the samples, in increasing order.

    Runs of every seed use the same subset, so that they differ in the partition and not in the data: `seed` is not
    the run's seed, it only names another subset. Its size is share * len(labels), rounded, and at least 1.

    >>> subset_indices(torch.tensor([0, 1] * 4), 0.5).remainder(2).bincount()
    tensor([2, 2])
    """
    known = _labels(labels)
    if share >= 1:
        return torch.arange(len(known))
    rng = numpy_generator(seed, "subset")
    classes = _members(known)
    sizes = np.array([len(members) for members in classes])
    total = max(1, round(share * len(known))) if len(known) else 0
    counts = _whole(sizes / max(1, sizes.sum()), np.array(total))
    taken = [rng.permutation(members)[:count] for members, count in zip(classes, counts, strict=True)]
    return torch.from_numpy(np.sort(np.concatenate([np.empty(0, np.int64), *taken])))


def held_out(labels: Tensor, split: Split, seed: int) -> Tensor:
    """The samples that belong to no client, in increasing order: as many of each class as of any other, give or take
    one, as far as the classes have that many.

    >>> labels = torch.tensor([0] * 6 + [1] * 2)
    >>> labels[held_out(labels, Split(holdout=0.5), seed=0)].bincount()
    tensor([2, 2])
    """
    chosen = subset_indices(labels, split.subset).numpy()
    rng = numpy_generator(seed, "holdout")
    classes = [rng.permutation(members) for members in _members(_labels(labels)[chosen])]
    number = round(split.holdout * len(chosen))
    # Deal the classes out in turn: the i-th sample of every class before the (i+1)-th of any.
    turns = np.concatenate([np.empty(0, np.int64), *(np.arange(len(members)) for members in classes)])
    order = np.lexsort((rng.permutation(len(turns)), turns))
    taken = np.concatenate([np.empty(0, np.int64), *classes])[order[:number]]
    return torch.from_numpy(np.sort(chosen[taken]))


def content_hash(parts: Sequence[Tensor]) -> str:
    """A short name for "this client has these samples"; the order of samples within a client does not matter.

    >>> first, second = torch.tensor([0, 1]), torch.tensor([2])
    >>> content_hash([first, second]) == content_hash([first.flip(0), second])
    True
    >>> content_hash([first, second]) == content_hash([second, first])
    False
    """
    digest = sha256()
    for part in parts:
        # The length comes first, so that moving a sample over a border changes the text that is hashed.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(np.sort(part.cpu().numpy()).astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def class_counts(labels: Tensor, parts: Sequence[Tensor], num_classes: int) -> Tensor:
    """How many samples of each class each client holds, clients x classes.

    >>> class_counts(torch.tensor([0, 1, 1]), [torch.tensor([0, 1]), torch.tensor([2])], num_classes=2)
    tensor([[1, 1],
            [0, 1]])
    """
    known = labels.cpu().long()
    return torch.stack([known[part.cpu()].bincount(minlength=num_classes) for part in parts])


def _counts_by_class(labels: Array, split: Split, rng: np.random.Generator) -> Array:
    """Per class k over clients: p_k ~ Dir(alpha), and client n receives p_kn of the samples of class k."""
    supply = np.array([len(members) for members in _members(labels)])
    return _whole(_softmax(_log_dirichlet(split.alpha, (len(supply), split.clients), rng)), supply).T


def _counts_by_client(labels: Array, split: Split, rng: np.random.Generator) -> Array:
    """Per client n over classes: q_n ~ Dir(alpha), with equal sizes, as far as the supply of each class allows.

    All clients ask at once for q_n of their size. A class that is asked for more than it has is shared out in
    proportion to the requests and is then used up; the clients ask again for what they lack, with q_n restricted to
    the classes that are left. Each turn uses up a class or serves everybody, so there are at most K turns, the order
    of the clients plays no part, and every sample is assigned.
    """
    supply = np.array([len(members) for members in _members(labels)])
    wishes = _log_dirichlet(split.alpha, (split.clients, len(supply)), rng)
    lacking = np.full(split.clients, len(labels) // split.clients)
    lacking[: len(labels) % split.clients] += 1
    counts = np.zeros_like(wishes, dtype=np.int64)
    while supply.any():
        requests = _whole(_softmax(np.where(supply > 0, wishes, -np.inf)), lacking)
        asked = requests.sum(axis=0)
        rationed = _whole((requests / np.maximum(asked, 1)).T, np.minimum(asked, supply)).T
        counts += rationed
        supply = supply - rationed.sum(axis=0)
        lacking = lacking - rationed.sum(axis=1)
    return counts


def _shards(labels: Array, split: Split, rng: np.random.Generator) -> list[Array]:
    """McMahan et al. (2017): sort by label, cut into equal shards, deal the same number to each client."""
    number = split.clients * split.shards_per_client
    require(
        number <= len(labels),
        f"data.clients * data.shards_per_client must be at most the number of training samples, {len(labels)}, "
        f"got {number}; lower one of them",
    )
    by_label = np.concatenate([rng.permutation(members) for members in _members(labels)])
    shards = np.array_split(by_label, number)
    hands = rng.permutation(number).reshape(split.clients, split.shards_per_client)
    return [np.concatenate([shards[shard] for shard in hand]) for hand in hands]


def _deal(labels: Array, counts: Array, rng: np.random.Generator) -> list[Array]:
    """Hand out each class at random, `counts[n, k]` samples of the k-th class to client n."""
    piles = [_cut(rng.permutation(members), counts[:, k]) for k, members in enumerate(_members(labels))]
    return [np.concatenate(hand) for hand in zip(*piles, strict=True)]


def _labels(labels: Tensor) -> Array:
    known: Array = labels.cpu().numpy()
    return known


def _members(labels: Array) -> list[Array]:
    """The positions of each class that occurs, classes in increasing order."""
    _, sizes = np.unique(labels, return_counts=True)
    return _cut(np.argsort(labels, kind="stable"), sizes)


def _cut(items: Array, sizes: Array) -> list[Array]:
    return np.split(items, np.cumsum(sizes)[:-1])


def _log_dirichlet(alpha: float, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Logarithms, up to a constant per row, of draws from the symmetric Dir(alpha) over the last axis.

    A Dirichlet draw is normalised Gamma(alpha) draws, and Gamma(alpha) = Gamma(alpha + 1) * U^(1/alpha). In logarithms
    this holds for an alpha of any size, where NumPy's own sampler underflows to 0 / 0 for small ones; in the limit
    the draw is one-hot.
    """
    exponential = rng.standard_exponential(shape)
    exponential -= exponential.min(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        # Bounded, so that even the least liked class of a client stays comparable once the others are used up.
        penalty = np.minimum(exponential / alpha, 1e300)
    logarithms: Array = np.log(rng.standard_gamma(alpha + 1.0, shape)) - penalty
    return logarithms


def _softmax(logarithms: Array) -> Array:
    weights = np.exp(logarithms - logarithms.max(axis=-1, keepdims=True))
    shares: Array = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def _whole(shares: Array, totals: Array) -> Array:
    """Split each total by the shares of its row into whole numbers, by largest remainders.

    >>> _whole(np.array([0.5, 0.3, 0.2]), np.array(4)).tolist()
    [2, 1, 1]
    """
    exact = shares * totals[..., None]
    floors = np.floor(exact).astype(np.int64)
    order = np.argsort(floors - exact, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1, kind="stable")
    wholes: Array = floors + (rank < (totals - floors.sum(axis=-1))[..., None])
    return wholes
