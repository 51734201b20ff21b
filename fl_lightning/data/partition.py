"""The training samples of each client: seeded partitions of one labelled training set over N clients.

Every sample of the (sub)set goes to exactly one client, for any number of classes. Counts are rounded by largest
remainders, so that nothing is dropped. Clients may end up without data, unless `min_samples` forbids it.

The default is the FOLA code's: per class over clients, without the balancing of FedMA (`dirichlet_balanced` with
min_samples 10). The FOLA text describes the other direction, per client over classes. How each kind divides is in
`fl_lightning/data/partitions`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal, TypeAlias, assert_never, get_args

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.dataset import Dataset
from fl_lightning.data.partitions import dirichlet, few_classes, natural
from fl_lightning.data.partitions.dealing import (
    Array,
    cut,
    deal,
    dirichlet_sizes,
    equal_sizes,
    lognormal_sizes,
    members,
    whole,
)
from fl_lightning.data.shares import Shares
from fl_lightning.errors import UserError, require, unknown
from fl_lightning.streams import numpy_generator

Kind: TypeAlias = Literal[
    "dirichlet",
    "dirichlet_balanced",
    "dirichlet_per_client",
    "dirichlet_lognormal",
    "shards",
    "classes",
    "class_blocks",
    "iid",
    "quantity",
    "lognormal",
    "natural",
    "natural_groups",
]
FeatureSkew: TypeAlias = Literal["none", "noise", "rotation"]

# Raised when the numbers of a partition, subset or skew change, or a default of `Split` does: part of every run's
# identity.
VERSION = 1

NATURAL: tuple[Kind, ...] = ("natural", "natural_groups")
# These do not look at the targets.
BLIND: tuple[Kind, ...] = ("iid", "quantity", "lognormal", *NATURAL)
# Nothing is drawn for these, so that another draw would be the same.
FIXED: tuple[Kind, ...] = ("class_blocks", "natural")
MAX_DRAWS = 1000
# For the partition "natural" it stands for the number of owners, whatever that is.
DEFAULT_CLIENTS = 10


@dataclass(frozen=True)
class Split:
    """How the training set is divided among the clients.

    Attributes:
        clients: Number of clients (N). With the partition "natural" the default takes the number of owners in the data;
            any other value must equal it.
        partition: "dirichlet": each class is spread over the clients by a draw from Dir(alpha); sizes differ too.
            "dirichlet_balanced": the same, but a client that holds its fair share gets no further class.
            "dirichlet_per_client": each client mixes the classes by its own draw from Dir(alpha), alpha for each class
            (Hsu et al. 2019 have alpha / K); sizes are equal.
            "dirichlet_lognormal": the same with sizes as for lognormal. "shards": sorted by label, cut into shards,
            each client is dealt a few. "classes": each client holds classes_per_client classes. "class_blocks": the
            classes in order, cut into one block per client. "iid": shuffled and cut into equal parts. "quantity": the
            labels are iid, the sizes are a draw from Dir(alpha). "lognormal": the labels are iid, the sizes are
            log-normal with sigma. "natural": each owner that the data name is a client. "natural_groups": those
            owners dealt at random into groups, each group a client.
        alpha: Concentration of the Dirichlet draws (alpha). Small: each client sees few classes; large: close to iid.
        shards_per_client: Shards dealt to each client, for the partition "shards" alone.
        subset: Share of the training set that is used at all: stratified, the same for every seed, taken before
            partitioning.
        holdout: Share of the training samples in use that belongs to no client but to the server: class-balanced,
            taken before partitioning; for methods whose server has data. The same for every method at one seed.
        holdout_seed: Seed of the holdout, for equal holdouts in all runs, as a network that was pretrained on it needs;
            null: the run's seed.
        validation: Share of the training samples in use that belongs to no client and serves only to choose settings:
            stratified, taken before partitioning, apart from the holdout. The same for every method at one seed; the
            server model's accuracy on it is GA_validation.
        test_subset: Share of the test set on which models are measured: stratified, the same for every seed. LA
            measures every client's model in every round, which on small machines costs more than training.
        classes_per_client: Classes that each client holds, for the partition "classes" alone.
        sigma: Standard deviation of the logarithm of a client's size, for the partitions "lognormal" and
            "dirichlet_lognormal" alone; 0 makes sizes equal.
        min_samples: Samples that each client must have at least: partitions are drawn until all have. 0 takes the
            first draw, in which clients may be empty.
        feature_skew: How the inputs of clients differ, whatever the partition of labels. "noise": client n of N adds
            Gaussian noise of standard deviation skew_strength * n / N. "rotation": the images of each client are
            turned by an angle of its own, evenly spread from -skew_strength to skew_strength degrees.
        drop_classes: Classes left out everywhere: neither clients nor server train on them, their test samples are not
            part of the test set, but out-of-distribution inputs (uncertainty.ood dropped_classes).
        skew_strength: Amount of feature_skew: for noise in units of the inputs, where bytes count as 0 to 1;
            for rotation in degrees.
        client_test: Share of every client's samples that becomes its own test set, left out of training: rounded,
            with the client's mixture of classes, taken after partitioning; one sample at least stays for training.
    """

    clients: int = DEFAULT_CLIENTS
    partition: Kind = "dirichlet"
    alpha: float = 0.1
    shards_per_client: int = 2
    subset: float = 1.0
    holdout: float = 0.0
    test_subset: float = 1.0
    classes_per_client: int = 2
    sigma: float = 1.0
    min_samples: int = 0
    feature_skew: FeatureSkew = "none"
    skew_strength: float = 0.0
    validation: float = 0.0
    drop_classes: tuple[int, ...] = ()
    client_test: float = 0.0
    holdout_seed: int | None = None

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
        for name, part in (("subset", "training"), ("test_subset", "test")):
            share = getattr(self, name)
            require(0 < share <= 1, f"data.{name} must be > 0 and <= 1, got {share:g}; 1 uses the whole {part} set")
        rest = "leaves all samples to the clients"
        for name, zero in (("holdout", rest), ("validation", rest), ("client_test", "gives clients no test sets")):
            share = getattr(self, name)
            require(0 <= share < 1, f"data.{name} must be >= 0 and < 1, got {share:g}; 0 {zero}")
        require(
            self.holdout + self.validation < 1,
            "data.holdout + data.validation must be < 1, or nothing is left for the clients, got "
            f"{self.holdout:g} + {self.validation:g}; lower one of them",
        )
        require(
            self.classes_per_client >= 1,
            f"data.classes_per_client must be >= 1, got {self.classes_per_client}; 1 to 3 are the usual choices",
        )
        require(
            isfinite(self.sigma) and self.sigma >= 0,
            f"data.sigma must be >= 0 and finite, got {self.sigma:g}; 0 makes sizes equal, 1 spreads them widely",
        )
        require(
            self.min_samples >= 0,
            f"data.min_samples must be >= 0, got {self.min_samples}; 0 takes any draw",
        )
        if self.feature_skew not in get_args(FeatureSkew):
            raise unknown("data.feature_skew", self.feature_skew, get_args(FeatureSkew))
        if self.feature_skew != "none":
            most, usual = {"noise": (float("inf"), "0.1"), "rotation": (180.0, "45")}[self.feature_skew]
            require(
                isfinite(self.skew_strength) and 0 < self.skew_strength <= most,
                f"data.skew_strength must be > 0 and {'<= 180' if isfinite(most) else 'finite'} for data.feature_skew "
                f"{self.feature_skew}, got {self.skew_strength:g}; {usual} is a usual choice, for no skew use "
                "data.feature_skew none",
            )


def partition(labels: Tensor, split: Split, seed: int, owners: Tensor | None = None) -> list[Tensor]:
    """The indices of each client's samples in the training set, in increasing order; depends on the arguments alone.

    Args:
        labels: Of the training set.
        split: How to divide it.
        seed: The run's seed.
        owners: The owner of each sample by nature, numbers 0 .. n - 1, if the data say so.

    >>> parts = partition(torch.tensor([0, 0, 1, 1, 2, 2]), Split(clients=2, partition="iid"), seed=0)
    >>> [len(part) for part in parts], sorted(torch.cat(parts).tolist())
    ([3, 3], [0, 1, 2, 3, 4, 5])
    """
    return list(divide(labels, split, seed, owners))


def divide(labels: Tensor, split: Split, seed: int, owners: Tensor | None = None) -> Shares:
    """The same as `partition`, without a tensor for each client."""
    split = counted(split, owners)
    spared = torch.cat([held_out(labels, split, seed), validating(labels, split, seed)]).numpy()
    chosen = np.setdiff1d(in_use(labels, split), spared)
    remedy = (
        f"lower data.clients{' or raise data.subset' if split.subset < 1 else ''}"
        f"{' or lower data.holdout' if split.holdout > 0 else ''}"
        f"{' or lower data.validation' if split.validation > 0 else ''}"
    )
    require(
        split.clients <= len(chosen),
        f"data.clients must be at most the number of training samples, {len(chosen)}, got {split.clients}; {remedy}",
    )
    require(
        split.clients * split.min_samples <= len(chosen),
        f"data.clients * data.min_samples must be at most the number of training samples, {len(chosen)}, got "
        f"{split.clients * split.min_samples}; lower data.min_samples or {remedy}",
    )
    held = _array(labels)[chosen]
    owned = np.empty(0, np.int64)
    if split.partition in NATURAL:
        owned = natural.known(owners, len(labels), split.partition, split.clients)[chosen]
    best = 0
    for draw in range(1 if split.partition in FIXED else MAX_DRAWS):
        # The key of the first draw has no number, so that a minimum which it meets anyway changes nothing.
        rng = numpy_generator(seed, "partition", *([draw] if draw else []))
        positions = _draw(held, owned, split, rng)
        smallest = min(map(len, positions))
        if smallest >= split.min_samples:
            return _sorted(chosen, positions)
        best = max(best, smallest)
    drawn = "" if split.partition in FIXED else f" in the best of {MAX_DRAWS} draws"
    raise UserError(
        f"data.min_samples must be at most the size of the smallest client, which is {best}{drawn}, got "
        f"{split.min_samples}; lower it or data.clients, raise data.alpha, or choose a more even partition"
    )


def counted(split: Split, owners: Tensor | None) -> Split:
    """With the number of clients that the data have, where every owner is a client and the setting is the default.

    >>> counted(Split(partition="natural"), torch.tensor([0, 2, 1, 2])).clients
    3
    """
    if split.partition != "natural" or split.clients != DEFAULT_CLIENTS or owners is None:
        return split
    return replace(split, clients=int(owners.max()) + 1)


def _sorted(chosen: Array, positions: Sequence[Array]) -> Shares:
    """The samples at each client's positions, in increasing order; all clients at once."""
    sizes = [len(position) for position in positions]
    places = chosen[np.concatenate(positions)]
    order = np.lexsort((places, np.repeat(np.arange(len(sizes)), sizes)))
    return Shares(torch.from_numpy(places[order]), sizes)


def _draw(labels: Array, owners: Array, split: Split, rng: np.random.Generator) -> list[Array]:
    """The positions of each client's samples."""
    total, clients, alpha = len(labels), split.clients, split.alpha
    supply = np.unique(labels, return_counts=True)[1]
    match split.partition:
        case "dirichlet":
            return deal(labels, dirichlet.by_class(supply, clients, alpha, rng), rng)
        case "dirichlet_balanced":
            return deal(labels, dirichlet.by_class_balanced(supply, clients, alpha, rng), rng)
        case "dirichlet_per_client":
            return deal(labels, dirichlet.by_client(supply, equal_sizes(total, clients), alpha, rng), rng)
        case "dirichlet_lognormal":
            numbers = lognormal_sizes(total, clients, split.sigma, rng)
            return deal(labels, dirichlet.by_client(supply, numbers, alpha, rng), rng)
        case "shards":
            return few_classes.shards(labels, clients, split.shards_per_client, rng)
        case "classes":
            return few_classes.classes(labels, clients, split.classes_per_client, rng)
        case "class_blocks":
            return few_classes.class_blocks(labels, clients)
        case "iid":
            return cut(rng.permutation(total), equal_sizes(total, clients))
        case "quantity":
            numbers = dirichlet_sizes(total, clients, alpha, rng)
            return cut(rng.permutation(total), numbers)
        case "lognormal":
            numbers = lognormal_sizes(total, clients, split.sigma, rng)
            return cut(rng.permutation(total), numbers)
        case "natural":
            return natural.each_owner(owners, clients)
        case "natural_groups":
            return natural.groups(owners, clients, rng)
        case _:
            assert_never(split.partition)


def subset_indices(labels: Tensor, share: float, seed: int = 0) -> Tensor:
    """A fixed, stratified share of the samples, in increasing order.

    Runs of every seed use the same subset, so that they differ in the partition and not in the data: `seed` is not
    the run's seed, it only names another subset. Its size is share * len(labels), rounded, and at least 1.

    >>> subset_indices(torch.tensor([0, 1] * 4), 0.5).remainder(2).bincount()
    tensor([2, 2])
    """
    known = _array(labels)
    if share >= 1:
        return torch.arange(len(known))
    total = max(1, round(share * len(known))) if len(known) else 0
    return torch.from_numpy(np.sort(_stratified(known, total, numpy_generator(seed, "subset"))))


def in_use(labels: Tensor, split: Split) -> Array:
    """The training samples that are used at all: the subset, without the dropped classes."""
    chosen = subset_indices(labels, split.subset).numpy()
    remaining: Array = chosen if not split.drop_classes else chosen[remaining_classes(labels, split).numpy()[chosen]]
    return remaining


def remaining_classes(labels: Tensor, split: Split) -> Tensor:
    """Whether each sample is of a class that is in use.

    Raises:
        UserError: If a class does not exist, or none is left.
    """
    known = set(np.unique(_array(labels)).tolist())
    missing = sorted(set(split.drop_classes) - known)
    require(
        not missing,
        f"data.drop_classes must name classes of the data, {min(known)} to {max(known)}, got {missing[:1]}",
    )
    require(
        len(known - set(split.drop_classes)) >= 2,
        f"data.drop_classes must leave at least two classes, got {list(split.drop_classes)} of {len(known)}",
    )
    return ~torch.isin(labels.cpu(), torch.tensor(split.drop_classes))


def held_out(labels: Tensor, split: Split, seed: int) -> Tensor:
    """The samples that belong to no client, in increasing order: as many of each class as of any other, give or take
    one, as far as the classes have that many.

    >>> labels = torch.tensor([0] * 6 + [1] * 2)
    >>> labels[held_out(labels, Split(holdout=0.5), seed=0)].bincount()
    tensor([2, 2])
    """
    if split.holdout == 0:
        return torch.empty(0, dtype=torch.long)
    chosen = in_use(labels, split)
    rng = numpy_generator(seed if split.holdout_seed is None else split.holdout_seed, "holdout")
    classes = [rng.permutation(positions) for positions in members(_array(labels)[chosen])]
    number = round(split.holdout * len(chosen))
    # Deal the classes out in turn: the i-th sample of every class before the (i+1)-th of any.
    turns = np.concatenate([np.empty(0, np.int64), *(np.arange(len(positions)) for positions in classes)])
    order = np.lexsort((rng.permutation(len(turns)), turns))
    taken = np.concatenate([np.empty(0, np.int64), *classes])[order[:number]]
    return torch.from_numpy(np.sort(chosen[taken]))


def validating(labels: Tensor, split: Split, seed: int) -> Tensor:
    """The samples that serve only to choose settings, in increasing order: a stratified share of those in use, none of
    which is held out. At least one, unless the share is 0.

    >>> labels = torch.tensor([0] * 6 + [1] * 2)
    >>> labels[validating(labels, Split(validation=0.5), seed=0)].bincount()
    tensor([3, 1])
    """
    if split.validation == 0:
        return torch.empty(0, dtype=torch.long)
    used = in_use(labels, split)
    free = np.setdiff1d(used, held_out(labels, split, seed).numpy())
    number = min(max(1, round(split.validation * len(used))), len(free))
    taken = _stratified(_array(labels)[free], number, numpy_generator(seed, "validation"))
    return torch.from_numpy(np.sort(free[taken]))


def _stratified(labels: Array, number: int, rng: np.random.Generator) -> Array:
    """The positions of so many samples, with the shares that the classes have among all."""
    classes = members(labels)
    supply = np.array([len(positions) for positions in classes])
    counts = whole(supply / max(1, supply.sum()), np.array(number))
    taken = [rng.permutation(positions)[:count] for positions, count in zip(classes, counts, strict=True)]
    return np.concatenate([np.empty(0, np.int64), *taken])


def _array(numbers: Tensor) -> Array:
    known: Array = numbers.cpu().numpy()
    return known


def check_divisible(dataset: Dataset, split: Split) -> None:
    """Raise `UserError` if these data cannot be divided like that."""
    likelihood = dataset.likelihood
    require(
        split.partition in BLIND or likelihood.strata(dataset.train_y[:1]) is not None,
        f"data.partition {split.partition} divides samples by their class, and those of {likelihood.task} have none; "
        f"use --data.partition {', '.join(BLIND[:-1])} or {BLIND[-1]}",
    )
    require(
        not split.drop_classes or likelihood.has_classes,
        f"data.drop_classes needs a task of classification, got {likelihood.task}; leave it out",
    )
