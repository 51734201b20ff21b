"""What each kind of partition promises beyond the properties of all."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.data.partition import MAX_DRAWS, Split, partition
from fl_lightning.data.partitions import dealing, dirichlet, few_classes
from fl_lightning.data.shares import class_counts, content_hash
from fl_lightning.errors import UserError
from fl_lightning.streams import numpy_generator
from tests.support.splits import TEN_CLASSES, Problem, problems, sizes, typical


def counts_of(problem: Problem) -> torch.Tensor:
    return class_counts(problem.labels, problem.parts(), int(problem.labels.max()) + 1)


# --- classes: k classes per client


@given(problems(("classes",), holdout=True))
@settings(max_examples=100, deadline=None)
def test_classes_are_shared_equally_and_never_more_than_k_are_held(problem: Problem) -> None:
    counts = counts_of(problem)
    assert ((counts > 0).sum(1) <= problem.split.classes_per_client).all()
    for column in counts.T:
        held = column[column > 0]
        assert len(held) == 0 or held.max() - held.min() <= 1


@pytest.mark.parametrize(("clients", "k"), [(10, 1), (10, 2), (10, 10), (37, 3), (4, 3), (5, 2), (1, 10), (100, 1)])
def test_every_client_holds_exactly_k_classes_and_every_class_is_held(clients: int, k: int) -> None:
    for seed in range(10):
        counts = counts_of(typical("classes", seed, clients=clients, classes_per_client=k))
        assert ((counts > 0).sum(1) == k).all()
        holders = (counts > 0).sum(0)
        assert (holders >= max(1, clients // 10)).all()
        # Equally: of 200 samples and h holders, each has 200 / h, give or take one.
        for column, number in zip(counts.T, holders, strict=True):
            assert set(column[column > 0].tolist()) <= {200 // int(number), -(-200 // int(number))}


def test_each_class_is_as_likely_for_each_client() -> None:
    held = sum((counts_of(typical("classes", seed, clients=5)) > 0).double() for seed in range(400))
    assert float((held / 400 - 0.2).abs().max()) < 0.08


def test_the_odd_sample_goes_to_anybody() -> None:
    labels = np.zeros(5, dtype=np.int64)
    extra = {
        tuple(map(len, few_classes.classes(labels, 2, 1, numpy_generator(seed, "partition")))) for seed in range(20)
    }
    assert extra == {(2, 3), (3, 2)}


def test_impossible_numbers_of_classes_are_refused() -> None:
    with pytest.raises(UserError, match=r"classes_per_client must be at most .*, 10, got 11; lower it$"):
        typical("classes", classes_per_client=11).parts()
    with pytest.raises(UserError, match=r"must be at least the number of classes, 10, .* got 8; raise one of them$"):
        typical("classes", clients=4, classes_per_client=2).parts()


# --- class_blocks: contiguous classes


def test_two_clients_have_the_lower_and_the_upper_half() -> None:
    first, second = typical("class_blocks", clients=2).parts()
    assert TEN_CLASSES[first].unique().tolist() == [0, 1, 2, 3, 4]
    assert TEN_CLASSES[second].unique().tolist() == [5, 6, 7, 8, 9]


@given(problems(("class_blocks",), holdout=True))
@settings(max_examples=50, deadline=None)
def test_blocks_are_disjoint_contiguous_and_nearly_equal(problem: Problem) -> None:
    held = [problem.labels[part].unique().tolist() for part in problem.parts()]
    assert [k for block in held for k in block] == problem.labels[problem.remaining].unique().tolist()
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_more_blocks_than_classes_are_refused() -> None:
    with pytest.raises(UserError, match=r"at most the number of classes .*, 10, for .* class_blocks, got 11"):
        typical("class_blocks", clients=11).parts()


# --- dirichlet_balanced


@given(problems(("dirichlet_balanced",), holdout=True))
@settings(max_examples=100, deadline=None)
def test_who_has_a_fair_share_gets_no_further_class(problem: Problem) -> None:
    fair = len(problem.remaining) / problem.split.clients
    for counts in counts_of(problem):
        if counts.sum() > 0:
            last = int(counts.nonzero().max())
            assert counts[:last].sum() < fair


def test_balancing_is_the_published_loop() -> None:
    """NIID-Bench's loop over classes in plain Python, with the same shares and rounding."""
    supply, clients, alpha = np.array([50, 20, 80, 30]), 4, 0.5
    for seed in range(50):
        shares = np.exp(dealing.log_dirichlet(alpha, (4, clients), numpy_generator(seed, "x")))
        held = np.zeros((clients, 4))
        for k in range(4):
            p = [share * (sum(own) < 180 / clients) for share, own in zip(shares[k], held, strict=True)]
            exact = np.array(p) / sum(p) * supply[k]
            held[:, k] = np.floor(exact)
            for client in sorted(range(clients), key=lambda n: held[n, k] - exact[n])[
                : supply[k] - int(held[:, k].sum())
            ]:
                held[client, k] += 1
        assert dirichlet.by_class_balanced(supply, clients, alpha, numpy_generator(seed, "x")).tolist() == held.tolist()


def test_balancing_makes_sizes_more_even() -> None:
    def largest(kind: str) -> float:
        return float(np.mean([max(sizes(typical(kind, seed, alpha=0.05).parts())) for seed in range(30)]))

    assert largest("dirichlet_balanced") < 0.8 * largest("dirichlet")


# --- log-normal sizes


@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
def test_log_sizes_have_the_standard_deviation_sigma(sigma: float) -> None:
    drawn = dealing.lognormal_sizes(10**12, 20_000, sigma, numpy_generator(0, "x"))
    assert drawn.sum() == 10**12
    logarithms = np.log(drawn)
    assert logarithms.std() == pytest.approx(sigma, rel=0.03)
    assert ((logarithms - logarithms.mean()) ** 3).mean() == pytest.approx(0, abs=0.1 * sigma**3)  # no skew: normal


def test_sigma_0_is_equal_and_a_huge_sigma_is_one_client() -> None:
    for kind in ("lognormal", "dirichlet_lognormal"):
        assert sizes(typical(kind, sigma=0.0).parts()) == [200] * 10
        assert sorted(sizes(typical(kind, sigma=1e308).parts())) == [0] * 9 + [2000]


def test_log_normal_sizes_leave_the_wishes_for_classes() -> None:
    """The two kinds draw the same sizes; one mixes all classes alike, the other by Dir(alpha)."""
    plain, mixed = typical("lognormal", sigma=0.5), typical("dirichlet_lognormal", sigma=0.5, alpha=0.05)
    assert sizes(plain.parts()) == sizes(mixed.parts())
    assert (counts_of(mixed) > 0).sum() < 0.7 * (counts_of(plain) > 0).sum()


# --- natural


@given(problems(("natural",), holdout=True))
@settings(max_examples=60, deadline=None)
def test_each_owner_is_a_client(problem: Problem) -> None:
    for owner, part in enumerate(problem.parts()):
        assert torch.equal(part, problem.remaining[problem.owners[problem.remaining] == owner])


@given(problems(("natural_groups",), holdout=True))
@settings(max_examples=60, deadline=None)
def test_groups_hold_whole_owners_in_nearly_equal_numbers(problem: Problem) -> None:
    groups = [set(problem.owners[part].tolist()) for part in problem.parts()]
    everybody = problem.owners[problem.remaining].unique().tolist()
    assert sorted(owner for group in groups for owner in group) == everybody
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_owners_without_remaining_samples_form_no_group() -> None:
    owners = torch.tensor([0] * 4 + [1] * 4 + [2])
    labels = torch.zeros(9, dtype=torch.int64)
    for seed in range(20):
        split = Split(2, "natural_groups", holdout=0.4)
        present = owners[Problem(labels, split, seed, owners).remaining].unique()
        parts = partition(labels, split, seed, owners)
        assert len({int(owner) for part in parts for owner in owners[part].unique()}) == len(present)
        assert min(sizes(parts)) > 0


@pytest.mark.parametrize("kind", ["natural", "natural_groups"])
def test_data_without_owners_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match=rf"data.partition {kind} needs data that name the owner .*--data table"):
        partition(TEN_CLASSES, Split(10, kind), seed=0)
    with pytest.raises(UserError, match="owners must name one owner per training sample, 2000, got 3"):
        partition(TEN_CLASSES, Split(10, kind), 0, torch.arange(3))


def test_the_number_of_clients_to_give_is_named() -> None:
    with pytest.raises(UserError, match=r"the number of owners in the data, 50, .* got 12; leave it out"):
        partition(TEN_CLASSES, Split(12, "natural"), 0, torch.arange(2000) % 50)
    with pytest.raises(UserError, match=r"at most the number of owners with samples, 50, .* got 51; lower it"):
        partition(TEN_CLASSES, Split(51, "natural_groups"), 0, torch.arange(2000) % 50)


def test_an_owner_with_nothing_left_is_named() -> None:
    owners = torch.zeros(2000, dtype=torch.int64)
    owners[0], owners[1] = 1, 2
    with pytest.raises(UserError, match=r"owner 1 and 1 more have none left; raise data.subset, lower data.holdout"):
        partition(TEN_CLASSES, Split(3, "natural", subset=0.01), 0, owners)
    owners[1] = 0
    with pytest.raises(UserError, match=r"owner 1 has none left; raise data.subset"):
        partition(TEN_CLASSES, Split(2, "natural", subset=0.01), 0, torch.where(owners == 2, 0, owners))


# --- min_samples


@given(st.integers(0, 2**40), st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_a_minimum_is_met_by_the_first_draw_that_meets_it(seed: int, least: int) -> None:
    problem = typical("dirichlet", seed, alpha=0.3)
    parts = typical("dirichlet", seed, alpha=0.3, min_samples=least).parts()
    assert min(sizes(parts)) >= least
    assert sum(sizes(parts)) == 2000
    if min(sizes(problem.parts())) >= least:
        assert content_hash(parts) == content_hash(problem.parts())


def test_a_minimum_of_one_leaves_nobody_empty() -> None:
    def smallest(least: int) -> list[int]:
        drawn = [typical("dirichlet", seed, clients=15, alpha=0.05, min_samples=least) for seed in range(10)]
        return [min(sizes(one.parts())) for one in drawn]

    assert 0 in smallest(0)
    assert 0 not in smallest(1)


def test_impossible_minima_are_refused() -> None:
    with pytest.raises(UserError, match=r"data.clients \* data.min_samples must be at most .* 2000, got 2010; lower"):
        typical("iid", min_samples=201).parts()
    with pytest.raises(UserError, match=rf"which is \d+ in the best of {MAX_DRAWS} draws, got 50; lower it"):
        typical("dirichlet", clients=30, alpha=1e-3, min_samples=50).parts()
    owners = torch.zeros(2000, dtype=torch.int64)
    owners[0] = 1
    with pytest.raises(UserError, match=r"smallest client, which is 1, got 2; lower it"):
        partition(TEN_CLASSES, Split(2, "natural", min_samples=2), 0, owners)
