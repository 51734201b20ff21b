"""Label skew by giving each client few classes: shards, k classes per client, blocks of classes."""

import numpy as np

from fl_lightning.data.partitions.dealing import Array, members
from fl_lightning.errors import require


def shards(labels: Array, clients: int, per_client: int, rng: np.random.Generator) -> list[Array]:
    """McMahan et al. (2017): sort by label, cut into equal shards, deal the same number to each client."""
    number = clients * per_client
    require(
        number <= len(labels),
        f"data.clients * data.shards_per_client must be at most the number of training samples, {len(labels)}, "
        f"got {number}; lower one of them",
    )
    by_label = np.concatenate([rng.permutation(positions) for positions in members(labels)])
    pieces = np.array_split(by_label, number)
    hands = rng.permutation(number).reshape(clients, per_client)
    return [np.concatenate([pieces[piece] for piece in hand]) for hand in hands]


def classes(labels: Array, clients: int, per_client: int, rng: np.random.Generator) -> list[Array]:
    """NIID-Bench (Li et al. 2022), "#C = k": k classes per client, each class divided equally among its holders.

    The classes, shuffled, are dealt in turn until each client has one and every class is held; the rest of each hand is
    drawn at random. With at least as many clients as classes that is NIID-Bench's rule, which otherwise may drop
    classes.
    """
    found = members(labels)
    number = len(found)
    require(
        per_client <= number,
        f"data.classes_per_client must be at most the number of classes of the training samples, {number}, "
        f"got {per_client}; lower it",
    )
    require(
        clients * per_client >= number,
        f"data.clients * data.classes_per_client must be at least the number of classes, {number}, so that every "
        f"sample has a client, got {clients * per_client}; raise one of them",
    )
    deck = rng.permutation(number)
    holds = np.zeros((clients, number), dtype=bool)
    turns = np.arange(max(clients, number))
    holds[turns % clients, deck[turns % number]] = True
    for hand in holds:
        hand[rng.permutation(np.flatnonzero(~hand))[: per_client - hand.sum()]] = True
    positions: list[list[Array]] = [[] for _ in range(clients)]
    for k, samples in enumerate(found):
        # Shuffled, so that the odd sample does not always go to the first client.
        holders = rng.permutation(np.flatnonzero(holds[:, k]))
        for client, piece in zip(holders, np.array_split(rng.permutation(samples), len(holders)), strict=True):
            positions[client].append(piece)
    return [np.concatenate(pieces) for pieces in positions]


def class_blocks(labels: Array, clients: int) -> list[Array]:
    """The classes in increasing order, cut into N contiguous blocks; no two clients share a class, nothing is drawn."""
    found = members(labels)
    require(
        clients <= len(found),
        f"data.clients must be at most the number of classes of the training samples, {len(found)}, for "
        f"data.partition class_blocks, got {clients}; lower it, or use data.partition classes",
    )
    blocks = np.array_split(np.arange(len(found)), clients)
    return [np.concatenate([found[k] for k in block]) for block in blocks]
