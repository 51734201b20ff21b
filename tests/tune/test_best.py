"""The rule for the best setting by itself, and how honest the numbers are that it leaves."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tune.best import Keys, Tried, best, complete, keys_of, protocol

scores = st.lists(st.sampled_from([0.1, 0.2, 0.3]), max_size=3)
settings = st.sampled_from([1, -1]).flatmap(
    lambda sign: st.lists(st.builds(Tried, scores, st.integers(0, 2), st.just(sign)), max_size=6)
)


@given(settings)
def test_nothing_beats_the_best(tried):
    place = best(tried)
    if place is None:
        assert not any(one.scores for one in tried)
        return
    found = tried[place]
    for number, one in enumerate(tried):
        assert len(one.scores) <= len(found.scores)
        if len(one.scores) == len(found.scores):
            assert one.diverged >= found.diverged
            if one.diverged == found.diverged:
                assert (one.sign * one.mean, -number) <= (found.sign * found.mean, -place)  # the earlier one of equals


@given(settings)
def test_what_is_complete_wins_against_what_is_not(tried):
    if any(whole := complete(tried)):
        assert whole[best(tried)]


def test_a_missing_or_diverged_seed_loses_and_is_better_than_nothing():
    assert best([Tried([0.9, 0.9], 1), Tried([0.1, 0.1, 0.1])]) == 1
    assert best([Tried([0.9, 0.9]), Tried([0.1, 0.1, 0.1])]) == 1
    assert best([Tried([0.9, 0.9], 1), Tried([0.1, 0.1])]) == 1  # missing may still come, diverged will not
    assert best([Tried([], 3), Tried([0.1], 2)]) == 1
    assert best([Tried([], 3), Tried([])]) is None
    assert best([]) is None
    assert math.isnan(Tried([]).mean)


def test_the_study_says_what_is_a_condition():
    content = {
        "environments": {"data.alpha": {}},
        "space": {"model": {}, "data.clients": {}},
        "cases": [{"settings": {"method": "fola", "federation.rounds": 1}, "space": {"method.strength": {}}}],
    }
    keys = keys_of(content)
    assert keys.tuned == {"model", "data.clients", "method.strength"}
    assert keys.is_condition("data.alpha")
    assert keys.is_condition("data.partition")  # it does not say anything else
    assert keys.is_condition("federation.rounds")  # a study may go on to more
    assert not keys.is_condition("data.clients")
    assert not keys.is_condition("model.hidden")  # belongs to what is tuned
    assert not Keys(tuned=frozenset({"federation.rounds"})).is_condition("federation.rounds")
    assert keys_of({}) == Keys()


def test_the_papers_protocol_is_called_by_its_name():
    assert "same seeds and the test set, as in the paper" in protocol("GA", [0, 1])
    assert "same seeds and the test set, as in the paper" in protocol("LA", [0])
    assert "as in the paper" not in protocol("GA_validation", [0, 1])
    assert "on the test set, on seeds 0 and 1" in protocol("GA", [0, 1], [2])


@pytest.mark.parametrize(("number", "seeds"), [(5, 1), (5, 3), (25, 3)])
def test_the_chosen_seeds_are_optimistic_and_fresh_ones_are_not(number, seeds):
    """No training: settings with known means, seeds with known noise."""
    rng = np.random.default_rng(0)
    chosen, confirmed = [], []
    for _ in range(3000):
        truth = 0.7 + 0.01 * rng.standard_normal(number)
        seen = truth[:, None] + 0.03 * rng.standard_normal((number, seeds))
        place = best([Tried(row.tolist()) for row in seen])
        chosen.append(seen[place].mean() - truth[place])
        confirmed.append((truth[place] + 0.03 * rng.standard_normal(5)).mean() - truth[place])
    error = np.std(confirmed) / math.sqrt(len(confirmed))
    assert abs(np.mean(confirmed)) < 4 * error
    assert np.mean(chosen) > 20 * error
    # As theory has it: the expected maximum of so many draws, shrunk to the share of the noise in what is seen.
    noise = 0.03**2 / seeds
    largest = rng.standard_normal((20_000, number)).max(1).mean()
    assert np.mean(chosen) == pytest.approx(largest * noise / math.sqrt(noise + 0.01**2), rel=0.1)
