"""Properties that every partition must have, for any labels, split and seed."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.data.partition import Kind, Split, class_counts, content_hash, partition, subset_indices
from fl_lightning.errors import UserError

KINDS = get_args(Kind)
TEN_CLASSES = torch.arange(10).repeat(200)[torch.randperm(2000, generator=torch.Generator().manual_seed(0))]

labels_of_any_problem = st.lists(st.integers(0, 12), min_size=1, max_size=120).map(torch.tensor)
alphas = st.one_of(st.floats(1e-3, 1e3), st.sampled_from([5e-324, 1e-300, 1e-12, 1e-6, 1e6, 1e300]))
seeds = st.integers(0, 2**40)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Split]:
    """Any labels, with any split that they allow: up to as many clients as samples."""
    labels = draw(labels_of_any_problem)
    subset = draw(st.sampled_from([1.0, 0.5, 0.1]))
    size = len(subset_indices(labels, subset))
    clients = draw(st.one_of(st.integers(1, size), st.just(size)))
    shards = draw(st.integers(1, size // clients))
    return labels, Split(clients, draw(st.sampled_from(KINDS)), draw(alphas), shards, subset)


def sizes(parts: list[Tensor]) -> list[int]:
    return [len(part) for part in parts]


@given(problems(), seeds)
@settings(max_examples=300, deadline=None)
def test_every_sample_of_the_subset_is_held_by_exactly_one_client(problem: tuple[Tensor, Split], seed: int) -> None:
    labels, split = problem
    parts = partition(labels, split, seed)
    assert len(parts) == split.clients
    assert all(part.dtype == torch.int64 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, subset_indices(labels, split.subset))


@given(problems(), seeds)
@settings(max_examples=100, deadline=None)
def test_the_same_seed_gives_the_same_partition(problem: tuple[Tensor, Split], seed: int) -> None:
    labels, split = problem
    np.random.seed(1)
    first = partition(labels, split, seed)
    np.random.seed(2)
    torch.manual_seed(3)
    again = partition(labels.clone(), replace(split), seed)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert content_hash(first) == content_hash(again)


@pytest.mark.parametrize("kind", KINDS)
def test_other_seeds_give_other_partitions(kind: Kind) -> None:
    hashes = {content_hash(partition(TEN_CLASSES, Split(partition=kind), seed)) for seed in range(20)}
    assert len(hashes) == 20


@pytest.mark.parametrize("kind", KINDS)
@given(labels=labels_of_any_problem, seed=seeds)
@settings(max_examples=10, deadline=None)
def test_a_single_client_holds_everything(kind: Kind, labels: Tensor, seed: int) -> None:
    (part,) = partition(labels, Split(clients=1, partition=kind, shards_per_client=1), seed)
    assert torch.equal(part, torch.arange(len(labels)))


@given(problems(), seeds)
@settings(max_examples=100, deadline=None)
def test_sizes_are_equal_where_they_are_promised_to_be(problem: tuple[Tensor, Split], seed: int) -> None:
    labels, split = problem
    for kind in ("iid", "dirichlet_per_client"):
        held = sizes(partition(labels, replace(split, partition=kind), seed))
        assert max(held) - min(held) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_clients_as_samples(kind: Kind) -> None:
    labels = torch.arange(7).repeat(6)
    parts = partition(labels, Split(clients=42, partition=kind, shards_per_client=1), seed=0)
    assert sum(sizes(parts)) == 42


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet_per_client", "quantity"])
def test_a_large_alpha_approaches_iid(kind: Kind) -> None:
    parts = partition(TEN_CLASSES, Split(clients=10, partition=kind, alpha=1e9), seed=0)
    counts = class_counts(TEN_CLASSES, parts, 10)
    expected = class_counts(TEN_CLASSES, partition(TEN_CLASSES, Split(partition="iid"), seed=0), 10)
    assert (counts.sum(1) - 200).abs().max() <= 10
    if kind == "quantity":  # as iid as "iid": proportions scatter by chance
        assert (counts - 20).abs().max() <= 2 * (expected - 20).abs().max()
    else:
        assert (counts - 20).abs().max() <= 1


def test_heterogeneity_grows_as_alpha_falls() -> None:
    def classes_per_client(kind: Kind, alpha: float) -> float:
        counts = [
            class_counts(TEN_CLASSES, partition(TEN_CLASSES, Split(20, kind, alpha), seed), 10) for seed in range(20)
        ]
        held = torch.cat(counts)
        return float((held > 0).sum() / (held.sum(1) > 0).sum())

    for kind in ("dirichlet", "dirichlet_per_client"):
        spread = [classes_per_client(kind, alpha) for alpha in (0.01, 0.1, 1.0, 10.0)]
        assert spread == sorted(spread)
        assert spread[-1] > 9


def test_the_paper_s_hardest_setting_has_the_known_statistics() -> None:
    """At alpha = .01 and N = 20 about 4.5 clients are empty, and the others hold 1.7 classes on average."""
    labels = torch.arange(10).repeat(5000)
    counts = torch.stack(
        [class_counts(labels, partition(labels, Split(20, "dirichlet", 0.01), seed), 10) for seed in range(60)]
    )
    empty = (counts.sum(2) == 0).sum(1).double().mean()
    classes = (counts > 0).sum() / (counts.sum(2) > 0).sum()
    assert float(empty) == pytest.approx(4.5, abs=1.0)
    assert float(classes) == pytest.approx(1.7, abs=0.2)


def test_shares_have_the_moments_of_a_dirichlet_draw() -> None:
    """Mean 1/N and variance (1/N)(1 - 1/N)/(N alpha + 1) of a client's share of a class, on both sides of alpha = 1."""
    labels = torch.arange(400).repeat_interleave(2000)
    for alpha in (0.1, 1.0, 5.0):
        shares = class_counts(labels, partition(labels, Split(5, "dirichlet", alpha), seed=1), 400).double() / 2000
        assert float(shares.mean()) == pytest.approx(0.2)
        assert float(((shares - 0.2) ** 2).mean()) == pytest.approx(0.2 * 0.8 / (5 * alpha + 1), rel=0.15)


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-6])
def test_a_vanishing_alpha_is_one_hot(alpha: float) -> None:
    by_class = class_counts(TEN_CLASSES, partition(TEN_CLASSES, Split(8, "dirichlet", alpha), seed=0), 10)
    assert ((by_class > 0).sum(0) == 1).all(), "each class lies with one client"
    (size,) = {size for size in sizes(partition(TEN_CLASSES, Split(8, "quantity", alpha), seed=0)) if size}
    assert size == 2000, "one client holds everything"
    # 10 clients of 200 want one of 10 classes of 200 each: whoever is alone in its wish gets that class whole.
    by_client = class_counts(TEN_CLASSES, partition(TEN_CLASSES, Split(10, "dirichlet_per_client", alpha), seed=0), 10)
    assert (by_client.sum(1) == 200).all()
    assert (by_client == 200).any()


def test_plentiful_classes_leave_every_client_its_wish() -> None:
    """Where no class runs short, client n's counts are q_n of its size: then sizes alone are constrained."""
    parts = partition(TEN_CLASSES, Split(1, "dirichlet_per_client", 0.5), seed=0)
    assert class_counts(TEN_CLASSES, parts, 10).tolist() == [[200] * 10]
    for seed in range(10):
        counts = class_counts(
            TEN_CLASSES, partition(TEN_CLASSES, Split(10, "dirichlet_per_client", 100.0), seed), 10
        ).double()
        # Var(q) = .1 * .9 / (10 * 100 + 1) is a standard deviation of 1.9 samples out of 200.
        assert float((counts - 20).std()) == pytest.approx(1.9, rel=0.3)


def test_shards_hold_few_classes() -> None:
    parts = partition(TEN_CLASSES, Split(20, "shards", shards_per_client=2), seed=0)
    counts = class_counts(TEN_CLASSES, parts, 10)
    assert sizes(parts) == [100] * 20
    assert ((counts > 0).sum(1) <= 2).all()


def test_indices_do_not_follow_the_order_of_the_file() -> None:
    """A class is shuffled before it is cut, so that a client does not get the first writers of the file."""
    labels = torch.zeros(1000, dtype=torch.int64)
    for kind in KINDS:
        first = partition(labels, Split(2, kind, alpha=100.0, shards_per_client=1), seed=0)[0]
        assert 350 < float(first.double().mean()) < 650


@given(labels_of_any_problem, st.floats(1e-6, 1.0))
@settings(max_examples=100, deadline=None)
def test_a_subset_is_stratified_and_fixed(labels: Tensor, share: float) -> None:
    chosen = subset_indices(labels, share)
    assert torch.equal(chosen, chosen.unique())
    assert torch.equal(chosen, subset_indices(labels, share))
    assert len(chosen) == max(1, round(share * len(labels)))
    exact = share * labels.bincount().double()
    assert (labels[chosen].bincount(minlength=len(exact)) - exact).abs().max() <= 1.5


def test_runs_of_all_seeds_share_the_subset() -> None:
    split = Split(subset=0.1)
    first, second = (torch.cat(partition(TEN_CLASSES, split, seed)).sort().values for seed in (0, 1))
    assert torch.equal(first, second)
    assert TEN_CLASSES[first].bincount().tolist() == [20] * 10


@given(problems(), seeds)
@settings(max_examples=100, deadline=None)
def test_the_hash_names_who_holds_what(problem: tuple[Tensor, Split], seed: int) -> None:
    labels, split = problem
    parts = partition(labels, split, seed)
    name = content_hash(parts)
    assert content_hash([part.flip(0) for part in parts]) == name
    assert content_hash([*parts, torch.empty(0, dtype=torch.int64)]) != name
    fullest = max(range(len(parts)), key=lambda client: len(parts[client]))
    without = list(parts)
    without[fullest] = parts[fullest][1:]
    assert content_hash(without) != name
    if len(parts) > 1:
        neighbour = (fullest + 1) % len(parts)
        moved = list(without)
        moved[neighbour] = torch.cat([parts[neighbour], parts[fullest][:1]])
        assert content_hash(moved) not in (name, content_hash(without))


def test_a_hash_does_not_change_between_machines_and_versions() -> None:
    """A run is resumed, and two runs are compared, by this name: changing it is a decision."""
    assert content_hash([torch.tensor([0, 2]), torch.tensor([1])]) == "5898622a490e7300"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": 0}, "data.clients must be >= 1, got 0"),
        ({"alpha": 0.0}, "data.alpha must be > 0 and finite, got 0"),
        ({"alpha": -1.0}, "data.alpha must be > 0 and finite, got -1"),
        ({"alpha": float("inf")}, "data.alpha must be > 0 and finite, got inf"),
        ({"alpha": float("nan")}, "data.alpha must be > 0 and finite, got nan"),
        ({"shards_per_client": 0}, "data.shards_per_client must be >= 1, got 0"),
        ({"subset": 0.0}, "data.subset must be > 0 and <= 1, got 0"),
        ({"subset": 1.5}, "data.subset must be > 0 and <= 1, got 1.5"),
        ({"subset": float("nan")}, "data.subset must be > 0 and <= 1, got nan"),
        ({"partition": "dirichlett"}, "unknown data.partition 'dirichlett': did you mean 'dirichlet'?"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Split(**settings)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_more_clients_than_samples_are_refused() -> None:
    labels = torch.arange(10)
    with pytest.raises(UserError, match=r"at most the number of training samples, 10, got 11; lower data.clients$"):
        partition(labels, Split(clients=11), seed=0)
    with pytest.raises(UserError, match=r"samples, 5, got 6; lower data.clients or raise data.subset"):
        partition(labels, Split(clients=6, subset=0.5), seed=0)
    with pytest.raises(UserError, match=r"shards_per_client must be at most .* 10, got 12"):
        partition(labels, Split(clients=4, partition="shards", shards_per_client=3), seed=0)
