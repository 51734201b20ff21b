"""The clients of each round, and the epochs that each client runs."""

import math
from collections.abc import Sequence

import torch

from fl_lightning import streams
from fl_lightning.data.shares import Sizes
from fl_lightning.errors import require
from fl_lightning.method import Cohort, Method, Server
from fl_lightning.training import Federation, Training


def draw_cohort(method: Method, server: Server, training: Training, federation: Federation, round: int) -> Cohort:
    """The clients of a round, drawn without replacement, and how far each of them gets.

    Both draws are the same for every method at one seed; a method that drops stragglers goes on with the others.
    """
    all_sizes = server.sizes if isinstance(server.sizes, Sizes) else Sizes(server.sizes)
    eligible = all_sizes.eligible
    number = cohort_size(federation, len(eligible))
    chosen = torch.randperm(len(eligible), generator=streams.generator(server.seed, "cohort", round))[:number]
    members = sorted(eligible[i] for i in chosen.tolist())
    epochs = dict.fromkeys(members, training.epochs)
    stragglers = draw_stragglers(members, training.epochs, federation, server.seed, round)
    if method.traits.drops_stragglers and len(stragglers) < len(members):
        members = [n for n in members if n not in stragglers]
    epochs |= stragglers
    by_samples = federation.weighting == "samples"
    sizes = [server.sizes[n] if by_samples else 1 for n in members]
    population = all_sizes.total if by_samples else len(eligible)
    return Cohort(
        round=round,
        members=tuple(members),
        weights=tuple(size / sum(sizes) for size in sizes),
        shares=tuple(size / population for size in sizes),
        epochs=tuple(epochs[n] for n in members),
        num_clients=len(server.sizes),
        training=training,
        server=server,
    )


def draw_stragglers(
    members: Sequence[int], epochs: int, federation: Federation, seed: int, round: int
) -> dict[int, int]:
    """Which members manage only some epochs, and how many: uniform in 1 .. E - 1."""
    number = math.floor(federation.straggler_fraction * len(members) + 0.5)
    if number == 0 or epochs == 1:
        return {}
    stream = streams.generator(seed, "stragglers", round)
    slow = torch.randperm(len(members), generator=stream)[:number].tolist()
    managed = torch.randint(1, epochs, (number,), generator=stream).tolist()
    return {members[i]: done for i, done in zip(slow, managed, strict=True)}


def cohort_size(federation: Federation, num_eligible: int) -> int:
    """How many clients take part in every round."""
    return federation.cohort or max(1, math.floor(federation.fraction * num_eligible + 0.5))


def check_participation(federation: Federation, sizes: Sequence[int]) -> None:
    """Refuse a cohort that cannot be drawn."""
    eligible = sum(1 for size in sizes if size > 0)
    require(eligible > 0, "no client has any data; use more samples (data.subset) or fewer clients")
    require(
        federation.cohort is None or federation.cohort <= eligible,
        f"federation.cohort asks for {federation.cohort} clients per round, but only {eligible} of the {len(sizes)} "
        "clients have data; lower it or set federation.fraction instead",
    )
