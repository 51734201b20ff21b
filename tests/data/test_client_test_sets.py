"""Test sets of the clients' own: exact numbers, the client's mixture of classes, and nobody trains on them."""

import pytest
import torch

from fl_lightning.data.partition import Split, counted, divide
from fl_lightning.data.shares import Shares, client_test_sets
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of

LABELS = torch.arange(500) % 7


def split_off(share, seed=0, clients=9, alpha=0.3):
    split = Split(clients=clients, alpha=alpha, client_test=share)
    whole = divide(LABELS, split, seed)
    return whole, *client_test_sets(LABELS, whole, split.client_test, seed)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.99])
def test_the_numbers_are_exact_and_nothing_is_lost(share):
    whole, train, test = split_off(share)
    assert len(whole) == len(train) == len(test) == 9
    for everything, kept, tested in zip(whole, train, test, strict=True):
        assert torch.equal(torch.cat([kept, tested]).sort().values, everything)
        expected = int(share * len(everything) + 0.5)
        assert len(tested) == min(expected, max(len(everything) - 1, 0))  # one stays to train on
        assert torch.equal(kept, kept.sort().values)
        assert torch.equal(tested, tested.sort().values)


def test_each_class_has_its_share_up_to_one_sample():
    whole, _, test = split_off(0.3)
    for everything, tested in zip(whole, test, strict=True):
        have, given = (LABELS[part].bincount(minlength=7) for part in (everything, tested))
        assert ((given - have * len(tested) / max(1, len(everything))).abs() < 1).all()


def test_it_is_drawn_by_the_seed_and_every_sample_has_its_turn():
    assert torch.equal(split_off(0.2)[2].places, split_off(0.2)[2].places)
    one = Shares(torch.arange(20), [20])
    drawn = [client_test_sets(LABELS, one, 0.25, seed)[1][0] for seed in range(400)]
    counts = torch.cat(drawn).bincount(minlength=20)
    assert len({tuple(places.tolist()) for places in drawn}) > 100
    assert ((counts - 100).abs() < 50).all()  # binomial(400, 1/4): five standard deviations are 43


def test_clients_with_one_sample_or_none_have_no_test_set():
    shares = Shares(torch.arange(12), [1, 0, 11])
    train, test = client_test_sets(LABELS, shares, 0.5, 0)
    assert (tuple(train.sizes), tuple(test.sizes)) == ((1, 0, 5), (0, 0, 6))


def test_refusals():
    with pytest.raises(UserError, match=r"client_test 0.01 leaves no client a test sample: the largest client has 20"):
        client_test_sets(LABELS, Shares(torch.arange(20), [20]), 0.01, 0)
    for share in (-0.1, 1.0):
        with pytest.raises(UserError, match=r"data.client_test must be >= 0 and < 1"):
            Split(client_test=share)


def test_a_run_trains_on_the_rest():
    settings = {"data": "digits", "data.subset": 0.2, "data.clients": 4, "model": "softmax"}
    plain = problem_of(configure(settings))
    problem = problem_of(configure({**settings, "data.client_test": 0.25}))
    tests = problem.dataset.client_tests
    assert sum(map(len, tests)) > 40
    for n, whole in enumerate(plain.clients):
        assert torch.equal(torch.cat([problem.clients[n], tests[n]]).sort().values, whole)
    assert plain.dataset.client_tests is None


def test_the_inputs_of_a_clients_test_set_are_skewed_as_its_others_are():
    settings = {"data": "digits", "data.clients": 3, "data.feature_skew": "rotation", "data.skew_strength": 90}
    plain = problem_of(configure(settings)).dataset
    tested = problem_of(configure({**settings, "data.client_test": 0.25})).dataset
    assert torch.equal(plain.train_x, tested.train_x)


def test_natural_partitions_count_their_owners():
    owners = torch.arange(500) % 13
    assert len(divide(LABELS, Split(partition="natural"), 0, owners)) == 13
    assert counted(Split(partition="iid"), owners).clients == 10
    assert counted(Split(partition="natural", clients=12), owners).clients == 12
    with pytest.raises(UserError, match="must be the number of owners in the data, 13"):
        divide(LABELS, Split(partition="natural", clients=12), 0, owners)
