"""Properties that every partition must have, for any labels, split and seed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.data.partition import FIXED, Kind, Split, partition, subset_indices
from fl_lightning.data.partitions import dirichlet
from fl_lightning.data.shares import class_counts, content_hash
from fl_lightning.errors import UserError
from tests.support.splits import KINDS, TEN_CLASSES, Problem, labels_of_any_problem, problems, seeds, sizes, typical

# The labels alone decide nothing: their mixture in each client is the population's, up to chance.
LABEL_BLIND: tuple[Kind, ...] = ("iid", "quantity", "lognormal", "natural", "natural_groups")
BY_ALPHA: tuple[Kind, ...] = ("dirichlet", "dirichlet_balanced", "dirichlet_per_client", "dirichlet_lognormal")


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_sample_that_remains_is_held_by_exactly_one_client(kind: Kind, data: st.DataObject) -> None:
    problem = data.draw(problems((kind,), holdout=True))
    parts = problem.parts()
    assert len(parts) == problem.split.clients
    assert all(part.dtype == torch.int64 for part in parts)
    assert all(torch.equal(part, part.unique()) for part in parts)  # increasing
    assert torch.equal(torch.cat(parts).sort().values, problem.remaining)


@given(problems(holdout=True))
@settings(max_examples=60, deadline=None)
def test_the_same_seed_gives_the_same_partition(problem: Problem) -> None:
    np.random.seed(1)
    first = problem.parts()
    np.random.seed(2)
    torch.manual_seed(3)
    again = problem._replace(labels=problem.labels.clone(), split=replace(problem.split)).parts()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert content_hash(first) == content_hash(again)


@pytest.mark.parametrize("kind", KINDS)
def test_other_seeds_give_other_partitions_where_something_is_drawn(kind: Kind) -> None:
    hashes = {content_hash(typical(kind, seed).parts()) for seed in range(20)}
    assert len(hashes) == (1 if kind in FIXED else 20)


@pytest.mark.parametrize("kind", KINDS)
@given(labels=labels_of_any_problem, seed=seeds)
@settings(max_examples=10, deadline=None)
def test_a_single_client_holds_everything(kind: Kind, labels: Tensor, seed: int) -> None:
    split = Split(clients=1, partition=kind, shards_per_client=1, classes_per_client=len(labels.unique()))
    (part,) = partition(labels, split, seed, torch.zeros_like(labels))
    assert torch.equal(part, torch.arange(len(labels)))


@given(problems(holdout=True))
@settings(max_examples=60, deadline=None)
def test_the_names_of_the_classes_do_not_matter(problem: Problem) -> None:
    """Any other numbers in the same order give the same partition, also with gaps; no number is taken for granted."""
    renamed = problem._replace(labels=problem.labels * 7 + 3)
    assert content_hash(renamed.parts()) == content_hash(problem.parts())


@pytest.mark.parametrize("kind", KINDS)
def test_permuted_labels_are_divided_as_unevenly(kind: Kind) -> None:
    """Which class is called 0 has no say in how mixed the clients are."""
    permuted = (TEN_CLASSES * 3 + 4) % 10

    def spread(labels: Tensor) -> float:
        drawn = [typical(kind, seed)._replace(labels=labels) for seed in range(15)]
        counts = torch.stack([class_counts(labels, one.parts(), 10) for one in drawn])
        return float((counts > 0).sum() / (counts.sum(2) > 0).sum())

    assert spread(permuted) == pytest.approx(spread(TEN_CLASSES), rel=0.15)
    if kind in LABEL_BLIND:
        assert content_hash(typical(kind)._replace(labels=permuted).parts()) == content_hash(typical(kind).parts())


@given(problems(("iid", "dirichlet_per_client")))
@settings(max_examples=60, deadline=None)
def test_sizes_are_equal_where_they_are_promised_to_be(problem: Problem) -> None:
    held = sizes(problem.parts())
    assert max(held) - min(held) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_clients_as_samples(kind: Kind) -> None:
    labels = torch.arange(7).repeat(6)
    split = Split(clients=42, partition=kind, shards_per_client=1)
    if kind == "class_blocks":
        with pytest.raises(UserError, match="must be at most the number of classes"):
            partition(labels, split, seed=0)
    else:
        assert sum(sizes(partition(labels, split, 0, torch.arange(42).flip(0)))) == 42


@pytest.mark.parametrize("kind", [*BY_ALPHA, "quantity"])
def test_a_large_alpha_approaches_iid(kind: Kind) -> None:
    parts = typical(kind, alpha=1e9, sigma=0.0).parts()
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

    for kind in BY_ALPHA:
        spread = [classes_per_client(kind, alpha) for alpha in (0.01, 0.1, 1.0, 10.0)]
        assert spread == sorted(spread)
        assert spread[-1] > 9


def test_the_paper_s_hardest_setting_has_the_known_statistics() -> None:
    """At alpha = .01 and N = 20 about 4.5 clients are empty, and the others hold 1.7 classes on average."""
    labels = torch.arange(10).repeat(5000)
    counts = torch.stack(
        [class_counts(labels, partition(labels, Split(20, "dirichlet", 0.01), seed), 10) for seed in range(40)]
    )
    empty = (counts.sum(2) == 0).sum(1).double().mean()
    classes = (counts > 0).sum() / (counts.sum(2) > 0).sum()
    assert float(empty) == pytest.approx(4.5, abs=1.0)
    assert float(classes) == pytest.approx(1.7, abs=0.2)


def test_shares_have_the_moments_of_a_dirichlet_draw() -> None:
    """Mean 1/N and variance (1/N)(1 - 1/N)/(N alpha + 1) of a client's share of a class, on both sides of alpha = 1."""
    labels = torch.arange(400).repeat_interleave(500)
    for alpha in (0.1, 1.0, 5.0):
        shares = class_counts(labels, partition(labels, Split(5, "dirichlet", alpha), seed=1), 400).double() / 500
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


@pytest.mark.parametrize(
    ("clients", "alpha", "share"), [(10, 0.1, 0.63), (10, 1.0, 0.77), (10, 10.0, 0.87), (100, 1.0, 0.94)]
)
def test_classes_that_run_out_make_clients_milder_than_dirichlet(clients: int, alpha: float, share: float) -> None:
    """The variance of a client's shares, relative to that of Dir(alpha): the numbers of docs/data.md."""
    found = []
    for seed in range(200):
        stream = np.random.default_rng(seed)
        supply, sizes = np.full(10, 600), np.full(clients, 6000 // clients)
        counts = dirichlet.by_client(supply, sizes, alpha, stream)
        found.append(np.square(counts / sizes[:, None] - 0.1).mean())
    assert np.mean(found) / (0.09 / (10 * alpha + 1)) == pytest.approx(share, abs=0.03)


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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FIXED])
def test_indices_do_not_follow_the_order_of_the_file(kind: Kind) -> None:
    """A class is shuffled before it is cut, so that a client does not get the first writers of the file."""
    labels = torch.zeros(1000, dtype=torch.int64)
    split = Split(2, kind, alpha=100.0, shards_per_client=1, classes_per_client=1)
    first = partition(labels, split, 0, torch.arange(1000))[0]
    assert 350 < float(first.double().mean()) < 650


@given(labels_of_any_problem, st.floats(1e-6, 1.0))
@settings(max_examples=60, deadline=None)
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


@given(problems())
@settings(max_examples=60, deadline=None)
def test_the_hash_names_who_holds_what(problem: Problem) -> None:
    parts = problem.parts()
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
        ({"classes_per_client": 0}, "data.classes_per_client must be >= 1, got 0"),
        ({"sigma": -0.1}, "data.sigma must be >= 0 and finite, got -0.1"),
        ({"sigma": float("inf")}, "data.sigma must be >= 0 and finite, got inf"),
        ({"min_samples": -1}, "data.min_samples must be >= 0, got -1"),
        ({"feature_skew": "blur"}, "unknown data.feature_skew 'blur'"),
        ({"feature_skew": "noise"}, "data.skew_strength must be > 0 and finite for data.feature_skew noise, got 0"),
        ({"feature_skew": "noise", "skew_strength": float("inf")}, "data.skew_strength must be > 0 and finite"),
        ({"feature_skew": "rotation", "skew_strength": 181.0}, "data.skew_strength must be > 0 and <= 180"),
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
