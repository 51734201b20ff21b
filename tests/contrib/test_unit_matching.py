"""The matching of units against enumeration, and its degenerate cases."""

import itertools
import math

import pytest
import torch

from fl_lightning.contrib.unit_matching import Prior, Units, best_labels, by_class, class_shares, match


def stream():
    return torch.Generator().manual_seed(0)


def drawn(seed, sizes, dims=3):
    torch.manual_seed(seed)
    return [
        Units(torch.randn(size, dims, dtype=torch.float64), 0.2 + torch.rand(dims, dtype=torch.float64))
        for size in sizes
    ]


def prior_of(dims=3, variance=1.0, gamma=1.0):
    return Prior(torch.linspace(0, 0.1, dims, dtype=torch.float64), variance, gamma)


def fit(clients, labels, prior):
    """Q without the logarithms, unit by unit."""
    a0, p0 = prior.mean / prior.variance, torch.full_like(prior.mean, 1 / prior.variance)
    total = 0.0
    for unit in {int(name) for label in labels for name in label}:
        a, p = a0.clone(), p0.clone()
        for client, label in zip(clients, labels, strict=True):
            for vector, name in zip(client.vectors, label, strict=True):
                if int(name) == unit:
                    a, p = a + client.precision * vector, p + client.precision
        total += float((a**2 / p).sum() - (a0**2 / p0).sum())
    return total


def gain(clients, labels, last, prior):
    """Q of an assignment in which client `last` came last: the fit, and the prior of its choice given the others."""
    others = [label for j, label in enumerate(labels) if j != last]
    number, new, total = len(clients), 0, fit(clients, labels, prior)
    for name in labels[last]:
        popularity = sum(int(name) in {int(v) for v in label} for label in others)
        if popularity:
            total += 2 * math.log(popularity / (number - popularity))
        else:
            new += 1
            total += 2 * math.log(prior.gamma / number) - 2 * math.log(new)
    return total


def all_labels(size, known):
    """Every assignment of `size` units to distinct known units or new ones."""
    for choice in itertools.product([*known, None], repeat=size):
        taken = [name for name in choice if name is not None]
        if len(taken) == len(set(taken)):
            fresh = itertools.count(1000)
            yield [next(fresh) if name is None else name for name in choice]


@pytest.mark.parametrize("gamma", [0.1, 1.0, 30.0])
@pytest.mark.parametrize(("seed", "sizes"), [(0, (3, 3)), (1, (4, 4)), (2, (4, 2)), (3, (1, 3)), (4, (4, 3))])
def test_two_clients_are_matched_as_well_as_can_be(seed, sizes, gamma):
    clients, prior = drawn(seed, sizes), prior_of(gamma=gamma)
    found = match(clients, prior, sweeps=0, stream=stream()).assignments
    first = max(range(2), key=lambda j: (sizes[j], -j))  # the widest comes first: all its units are new
    last = 1 - first
    best = -math.inf
    for choice in all_labels(sizes[last], range(sizes[first])):
        labels = [None, None]
        labels[first], labels[last] = list(range(sizes[first])), choice
        best = max(best, gain(clients, labels, last, prior))
    assert gain(clients, found, last, prior) == pytest.approx(best, abs=1e-10)


@pytest.mark.parametrize("seed", range(8))
def test_the_objective_never_falls_when_a_client_is_assigned_anew(seed, monkeypatch):
    """Given the others, the new assignment of a client is at least as good as the one it had before."""
    from fl_lightning.contrib import unit_matching

    clients, prior = drawn(seed, (4, 3, 4, 2)), prior_of(gamma=0.7)
    kept = {}
    falls = []

    def watched(client, groups, names, prior, number):
        (j,) = (j for j, other in enumerate(clients) if other is client)
        found = best_labels(client, groups, names, prior, number)
        known = [kept.get(i, torch.zeros(0, dtype=torch.long)) for i in range(len(clients))]
        if j in kept:
            old = gain(clients, known, j, prior)
            falls.append(old - gain(clients, [found if i == j else label for i, label in enumerate(known)], j, prior))
        kept[j] = found
        return found

    monkeypatch.setattr(unit_matching, "best_labels", watched)
    match(clients, prior, sweeps=4, stream=stream())
    assert len(falls) == 16
    assert max(falls) < 1e-10


@pytest.mark.parametrize("seed", range(3))
def test_the_factor_of_the_logarithm_matters(seed):
    """With 1 instead of 2 before ln(n / (J - n)), as in the published code, the objective is not maximised."""
    clients, prior = drawn(seed, (2, 2, 2, 2, 2)), prior_of(gamma=1.0)
    scores = match_scores_by_hand(clients, prior)
    assert torch.allclose(scores[0], scores[1], atol=1e-12)


def match_scores_by_hand(clients, prior):
    from fl_lightning.contrib.unit_matching import _groups, match_scores

    others = [torch.arange(2)] * 4
    groups = _groups(clients[:4], others, prior, 2)
    found = match_scores(clients[4], groups, 5)
    expected = torch.zeros(2, 2, dtype=torch.float64)
    base = fit(clients[:4], others, prior)
    for row in range(2):
        for unit in range(2):
            one = Units(clients[4].vectors[row : row + 1], clients[4].precision)
            total = fit([*clients[:4], one], [*others, torch.tensor([unit])], prior)
            expected[row, unit] = total - base + 2 * math.log(4 / (5 - 4))
    return found, expected


def test_one_client_is_pulled_to_the_prior_only():
    (client,), prior = drawn(0, (4,)), prior_of(variance=2.0)
    found = match([client], prior, 3, stream())
    assert found.assignments[0].tolist() == [0, 1, 2, 3]
    expected = (prior.mean / 2 + client.precision * client.vectors) / (1 / 2 + client.precision)
    assert torch.allclose(found.means, expected, atol=1e-14)


def test_a_permuted_client_is_recognised():
    (client,) = drawn(0, (6,))
    order = torch.randperm(6, generator=stream())
    found = match([client, Units(client.vectors[order], client.precision)], prior_of(variance=1e6), 3, stream())
    assert len(found.means) == 6
    assert torch.equal(found.assignments[0][order], found.assignments[1])
    assert torch.allclose(found.means[found.assignments[0]], client.vectors, atol=1e-5)


@pytest.mark.parametrize("sizes", [(3, 5, 4), (5, 2, 5)])
def test_gamma_forces_or_forbids_matches(sizes):
    clients = drawn(0, sizes)
    assert len(match(clients, prior_of(gamma=1e-300), 3, stream()).means) == max(sizes)
    assert len(match(clients, prior_of(gamma=1e300), 3, stream()).means) == sum(sizes)


def test_the_order_of_a_clients_units_does_not_matter():
    clients = drawn(0, (5, 5, 4))
    order = torch.randperm(5, generator=stream())
    found = match(clients, prior_of(), 3, stream())
    moved = match(
        [clients[0], Units(clients[1].vectors[order], clients[1].precision), clients[2]], prior_of(), 3, stream()
    )
    mine, theirs = (sorted(map(tuple, m.means.mul(1e9).round().tolist())) for m in (found, moved))
    assert mine == theirs


def test_fixed_clients_stay_together_and_popular_units_come_first():
    one, two, three = drawn(0, (3, 3, 3))
    fixed = [
        Units(one.vectors, one.precision, torch.tensor([7, 2, 9])),
        Units(two.vectors, two.precision, torch.tensor([2, 9, 4])),
    ]
    found = match([*fixed, three], prior_of(), 2, stream())
    a, b, _ = (label.tolist() for label in found.assignments)
    assert a[1] == b[0]
    assert a[2] == b[1]
    assert len({*a, *b}) == 4
    popularity = torch.bincount(torch.cat(found.assignments))
    assert (popularity[1:] <= popularity[:-1]).all()
    assert int(popularity.sum()) == 9


def test_shares_of_the_classes():
    shares = class_shares([torch.tensor([2.0, 0.0, 0.0]), torch.tensor([6.0, 5.0, 0.0])])
    assert shares.tolist() == [[0.25, 0.0, 0.5], [0.75, 1.0, 0.5]]
    mean = by_class(shares, [torch.ones(3, 2), 3 * torch.ones(3, 2)])
    assert mean.tolist() == [[2.5, 2.5], [3.0, 3.0], [2.0, 2.0]]
