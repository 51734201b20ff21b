"""Problems to be partitioned: any labels, with any split of any kind that they allow."""

from typing import NamedTuple, get_args

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.data.partition import Kind, Split, held_out, partition, subset_indices

KINDS: tuple[Kind, ...] = get_args(Kind)
TEN_CLASSES = torch.arange(10).repeat(200)[torch.randperm(2000, generator=torch.Generator().manual_seed(0))]

labels_of_any_problem = st.lists(st.integers(0, 12), min_size=1, max_size=120).map(torch.tensor)
alphas = st.one_of(st.floats(1e-3, 1e3), st.sampled_from([5e-324, 1e-300, 1e-12, 1e-6, 1e6, 1e300]))
sigmas = st.one_of(st.floats(0, 5), st.sampled_from([1e3, 1e308]))
seeds = st.integers(0, 2**40)


class Problem(NamedTuple):
    labels: Tensor
    split: Split
    seed: int
    owners: Tensor | None = None

    def parts(self) -> list[Tensor]:
        return partition(self.labels, self.split, self.seed, self.owners)

    @property
    def remaining(self) -> Tensor:
        """What clients share: the subset without the holdout."""
        chosen = subset_indices(self.labels, self.split.subset)
        return chosen[~torch.isin(chosen, held_out(self.labels, self.split, self.seed))]


@st.composite
def problems(draw: st.DrawFn, kinds: tuple[Kind, ...] = KINDS, holdout: bool = False) -> Problem:
    """Up to as many clients as samples, as far as the kind allows; natural kinds come with owners."""
    labels = draw(labels_of_any_problem)
    kind = draw(st.sampled_from(kinds))
    subset = draw(st.sampled_from([1.0, 0.5, 0.1]))
    size = len(subset_indices(labels, subset))
    shares = st.floats(0.0, 0.999).filter(lambda share: round(share * size) < size)
    share = draw(st.one_of(st.just(0.0), shares)) if holdout else 0.0
    seed = draw(seeds)
    remaining = Problem(labels, Split(subset=subset, holdout=share), seed).remaining
    number = len(remaining)
    classes = len(labels[remaining].unique())
    owners = None
    if kind in ("natural", "natural_groups"):
        people = draw(st.integers(1, number))
        owners = torch.from_numpy(np.random.default_rng(seed).integers(0, people, len(labels)))
        owners[remaining[:people]] = torch.arange(people)  # nobody is left out
    most = {"class_blocks": classes, "natural_groups": people if owners is not None else 0}.get(kind, number)
    clients = draw(st.one_of(st.integers(1, most), st.just(most)))
    if kind == "natural":
        clients = people
    split = Split(
        clients=clients,
        partition=kind,
        alpha=draw(alphas),
        shards_per_client=draw(st.integers(1, number // clients)),
        subset=subset,
        holdout=share,
        classes_per_client=draw(st.integers(-(-classes // clients), classes)),
        sigma=draw(sigmas),
    )
    return Problem(labels, split, seed, owners)


def typical(kind: Kind, seed: int = 0, **settings: object) -> Problem:
    """Ten classes over ten clients; fifty owners, or as many as clients where each is one."""
    split = Split(partition=kind, **settings)  # type: ignore[arg-type]
    return Problem(TEN_CLASSES, split, seed, torch.arange(2000) % (split.clients if kind == "natural" else 50))


def sizes(parts: list[Tensor]) -> list[int]:
    return [len(part) for part in parts]
