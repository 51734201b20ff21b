"""Partitions that the data bring along: the writer or photographer of a sample is a client, or part of one.

`owners` holds the owner of each sample that clients may hold, a number.
"""

import numpy as np
from torch import Tensor

from fl_lightning.data.partitions.dealing import Array, cut, members
from fl_lightning.errors import UserError, require

SOURCES = "use --data table with --data.client COLUMN, or arrays, a function or a dataset of your own with `owners`"


def known(owners: Tensor | None, total: int, kind: str, clients: int) -> Array:
    """The owners of all `total` samples of the training set, if they can be used for this kind of partition."""
    if owners is None:
        raise UserError(f"data.partition {kind} needs data that name the owner of each sample; {SOURCES}")
    require(len(owners) == total, f"owners must name one owner per training sample, {total}, got {len(owners)}")
    numbers: Array = owners.cpu().numpy()
    most = int(numbers.max()) + 1
    require(
        kind != "natural" or clients == most,
        f"data.clients must be the number of owners in the data, {most}, for data.partition natural, got {clients}; "
        f"leave it out, or use data.partition natural_groups for fewer clients",
    )
    return numbers


def each_owner(owners: Array, clients: int) -> list[Array]:
    """Client n is owner n; nothing is drawn."""
    sizes = np.bincount(owners, minlength=clients)
    if missing := np.flatnonzero(sizes == 0).tolist():
        others = f" and {len(missing) - 1} more have" if len(missing) > 1 else " has"
        raise UserError(
            f"each owner must have a sample to be a client, but owner {missing[0]}{others} none left; "
            "raise data.subset, lower data.holdout and data.validation, or use data.partition natural_groups"
        )
    return cut(np.argsort(owners, kind="stable"), sizes)


def groups(owners: Array, clients: int, rng: np.random.Generator) -> list[Array]:
    """The owners that have samples, dealt at random into N groups whose numbers of owners differ by at most one."""
    found = members(owners)
    require(
        clients <= len(found),
        f"data.clients must be at most the number of owners with samples, {len(found)}, for data.partition "
        f"natural_groups, got {clients}; lower it",
    )
    hands = np.array_split(rng.permutation(len(found)), clients)
    return [np.concatenate([found[owner] for owner in hand]) for hand in hands]
