"""The server's share of the training set: balanced, apart from all clients, and nothing lost."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fl_lightning.data.partition import Kind, Split, held_out, partition, subset_indices
from fl_lightning.errors import UserError
from fl_lightning.streams import numpy_generator
from tests.support.splits import KINDS, Problem, labels_of_any_problem, problems, seeds

LABELS = torch.arange(10).repeat(60)[torch.randperm(600, generator=torch.Generator().manual_seed(0))]


@given(problems(holdout=True))
@settings(max_examples=100, deadline=None)
def test_server_and_clients_together_hold_the_subset_exactly_once(problem: Problem) -> None:
    labels, split, seed, owners = problem
    spared, parts = held_out(labels, split, seed), partition(labels, split, seed, owners)
    assert len(parts) == split.clients
    assert torch.equal(torch.cat([spared, *parts]).sort().values, subset_indices(labels, split.subset))


@given(problems(holdout=True))
@settings(max_examples=60, deadline=None)
def test_no_client_holds_a_sample_of_the_server(problem: Problem) -> None:
    labels, split, seed, owners = problem
    spared = set(held_out(labels, split, seed).tolist())
    assert all(spared.isdisjoint(part.tolist()) for part in partition(labels, split, seed, owners))


@given(problems(holdout=True))
@settings(max_examples=60, deadline=None)
def test_the_size_is_the_share_of_the_subset(problem: Problem) -> None:
    labels, split, seed, _ = problem
    spared = held_out(labels, split, seed)
    assert len(spared) == round(split.holdout * len(subset_indices(labels, split.subset)))
    assert spared.dtype == torch.int64
    assert torch.equal(spared, spared.unique())  # increasing, nothing twice


@given(problems(holdout=True))
@settings(max_examples=100, deadline=None)
def test_classes_are_balanced_as_far_as_their_supply_allows(problem: Problem) -> None:
    """A class may have fewer than another only if the difference is one, or if it is used up."""
    labels, split, seed, _ = problem
    supply = labels[subset_indices(labels, split.subset)].bincount(minlength=13)
    taken = labels[held_out(labels, split, seed)].bincount(minlength=13)
    assert (taken <= supply).all()
    scarce = taken == supply
    assert (taken[~scarce] >= taken.max() - 1).all()


def test_ample_classes_differ_by_at_most_one() -> None:
    for share in (0.001, 0.05, 0.2, 0.333, 0.9):
        taken = LABELS[held_out(LABELS, Split(holdout=share), seed=0)].bincount(minlength=10)
        assert int(taken.max() - taken.min()) <= 1
        assert int(taken.sum()) == round(600 * share)


def test_scarce_classes_give_all_they_have() -> None:
    labels = torch.tensor([0] * 90 + [1] * 3 + [2] * 7)
    spared = held_out(labels, Split(holdout=0.3), seed=0)
    assert labels[spared].bincount().tolist() == [20, 3, 7]


def test_the_odd_sample_falls_to_any_class() -> None:
    """Who gets one more is drawn, not always the first class."""
    favoured = [LABELS[held_out(LABELS, Split(holdout=1 / 600), seed)].item() for seed in range(200)]
    assert set(favoured) == set(range(10))


@given(problems(holdout=True))
@settings(max_examples=100, deadline=None)
def test_the_same_seed_holds_out_the_same_samples(problem: Problem) -> None:
    labels, split, seed, _ = problem
    np.random.seed(1)
    first = held_out(labels, split, seed)
    np.random.seed(2)
    torch.manual_seed(3)
    assert torch.equal(held_out(labels.clone(), replace(split), seed), first)


def test_other_seeds_hold_out_other_samples() -> None:
    drawn = {tuple(held_out(LABELS, Split(holdout=0.2), seed).tolist()) for seed in range(20)}
    assert len(drawn) == 20


def test_every_sample_is_held_out_for_some_seed() -> None:
    counts = torch.zeros(600)
    for seed in range(200):
        counts[held_out(LABELS, Split(holdout=0.2), seed)] += 1
    assert counts.min() > 0
    assert counts.max() < 80  # 40 expected


@pytest.mark.parametrize("kind", KINDS)
def test_how_clients_share_has_no_say(kind: Kind) -> None:
    """Methods and partitions are compared on the same held-out data."""
    expected = held_out(LABELS, Split(holdout=0.2), seed=3)
    other = Split(clients=3, partition=kind, alpha=7.0, shards_per_client=5, holdout=0.2)
    assert torch.equal(held_out(LABELS, other, seed=3), expected)


@given(problems(holdout=True))
@settings(max_examples=100, deadline=None)
def test_no_holdout_is_empty_and_leaves_the_partition(problem: Problem) -> None:
    labels, split, seed, _ = problem
    everything = replace(split, holdout=0.0)
    none = held_out(labels, everything, seed)
    assert none.shape == (0,)
    assert none.dtype == torch.int64
    parts = partition(labels, replace(everything, partition="iid"), seed)
    assert torch.equal(torch.cat(parts).sort().values, subset_indices(labels, split.subset))


@given(problems(holdout=True))
@settings(max_examples=60, deadline=None)
def test_the_rest_is_partitioned_as_if_it_were_everything(problem: Problem) -> None:
    """Drawing the holdout does not disturb the draw of the partition."""
    labels, split, seed, owners = problem
    spared = held_out(labels, split, seed)
    chosen = subset_indices(labels, split.subset)
    rest = chosen[~torch.isin(chosen, spared)]
    owned = None if owners is None else owners[rest]
    expected = partition(labels[rest], replace(split, subset=1.0, holdout=0.0), seed, owned)
    for part, positions in zip(partition(labels, split, seed, owners), expected, strict=True):
        assert torch.equal(part, rest[positions])


@given(labels_of_any_problem, seeds)
@settings(max_examples=50, deadline=None)
def test_without_holdout_the_stream_of_the_partition_is_untouched(labels: Tensor, seed: int) -> None:
    """The iid partition is the first permutation of its own stream, cut into equal parts, as it always was."""
    clients = min(3, len(labels))
    order = numpy_generator(seed, "partition").permutation(len(labels))
    parts = partition(labels, Split(clients=clients, partition="iid"), seed)
    assert [part.tolist() for part in parts] == [sorted(cut.tolist()) for cut in np.array_split(order, clients)]


def test_a_holdout_that_leaves_too_little_is_refused() -> None:
    with pytest.raises(UserError, match="at most the number of training samples, 60, got 100"):
        partition(LABELS, Split(clients=100, holdout=0.9), seed=0)


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
def test_impossible_shares_are_refused(share: float) -> None:
    with pytest.raises(UserError, match=r"data\.holdout must be >= 0 and < 1"):
        Split(holdout=share)


def test_a_seed_of_its_own_makes_it_the_same_for_every_run() -> None:
    usual, own = Split(holdout=0.2), Split(holdout=0.2, holdout_seed=3)
    assert not torch.equal(held_out(LABELS, usual, 0), held_out(LABELS, usual, 1))
    assert torch.equal(held_out(LABELS, own, 0), held_out(LABELS, own, 1))
    assert torch.equal(held_out(LABELS, own, 0), held_out(LABELS, usual, 3))
