"""Intervals that cover, tests that agree with their definitions, remarks instead of numbers that mislead."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.statistics import (
    MIN_FOR_CORRELATION,
    RESAMPLES,
    _resample,
    correlation,
    expected_best,
    lead,
    mean_band,
    mean_interval,
    paired,
)

values = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=1, max_size=12)


def test_the_interval_covers_the_mean_as_often_as_it_says():
    """Of 5 normal values, plain percentiles would cover in about 83 %."""
    rng = np.random.default_rng(0)
    for n, least in ((5, 0.92), (10, 0.92), (30, 0.92)):
        draws = rng.standard_normal((n, 600))
        band = mean_band(draws)
        covered = ((band.low <= 0) & (band.high >= 0)).mean()
        assert least < covered < 0.99


def test_the_interval_is_near_students_for_normal_values():
    draws = np.random.default_rng(1).standard_normal(40)
    found = mean_interval(draws)
    low, high = stats.t.interval(0.95, 39, draws.mean(), stats.sem(draws))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.05)
    assert found.remark == ""


def test_few_values_give_their_range_and_a_remark():
    found = mean_interval([1.0, 2.0, 6.0])
    assert (found.mean, found.low, found.high, found.n) == (3.0, 1.0, 6.0, 3)
    assert "too few" in found.remark
    assert mean_interval([4.0]).remark == "a single run"
    nothing = mean_interval([])
    assert math.isnan(nothing.mean)
    assert nothing.n == 0


@given(values)
@settings(max_examples=40, deadline=None)
def test_the_interval_holds_the_mean_and_is_the_same_every_time(sample):
    found = mean_interval(sample)
    assert found.low - 1e-9 <= found.mean <= found.high + 1e-9
    assert found == mean_interval(sample)


def by_definition(differences):
    """The signed-rank test by trying all signs."""
    ranks = stats.rankdata(np.abs(differences))
    seen = abs((ranks * np.sign(differences)).sum())
    signs = itertools.product((-1, 1), repeat=len(ranks))
    return np.mean([abs((ranks * np.array(s)).sum()) >= seen - 1e-9 for s in signs])


@pytest.mark.parametrize(
    "differences",
    [[1, 2, 3, 4, 5, 6], [1, -2, 3, 4, 5, 6, 7], [1, 1, -1, 2, 2, 3, 3, -4], [0, 0, 1, 2, -3, 4, 5, 6, 7]],
)
def test_the_paired_test_is_the_signed_rank_test(differences):
    differences = np.array(differences, dtype=float)
    found = paired(differences, np.zeros(len(differences)))
    nonzero = differences[differences != 0]
    assert found.p == pytest.approx(by_definition(nonzero))
    ranks = stats.rankdata(np.abs(nonzero))
    assert found.effect == pytest.approx((ranks[nonzero > 0].sum() - ranks[nonzero < 0].sum()) / ranks.sum())
    assert found.ties == (differences == 0).sum()


def test_many_pairs_use_the_normal_approximation():
    rng = np.random.default_rng(2)
    first, second = rng.normal(0.3, 1, 60), rng.normal(0, 1, 60)
    found = paired(first, second)
    assert found.p == pytest.approx(stats.wilcoxon(first - second, method="asymptotic").pvalue)


def test_too_few_or_equal_pairs_have_no_p():
    found = paired([0.8, 0.9, 0.7], [0.7, 0.8, 0.6])
    assert found.p is None
    assert found.effect == 1.0
    assert found.ahead == 3
    assert found.remark == "n = 3 is too few for a test"
    assert paired([1.0] * 8, [1.0] * 8).remark == "all pairs are equal"
    assert paired([], []).remark == "no pairs"
    assert "2 unequal pairs" in paired([1.0, 2, 3, 3, 3, 3, 3], [0.0, 0, 3, 3, 3, 3, 3]).remark


def test_correlations_are_scipys_with_intervals_around_them():
    rng = np.random.default_rng(3)
    x = rng.standard_normal(200)
    y = np.exp(x) + 0.2 * rng.standard_normal(200)
    found = correlation(x, y)
    assert found.pearson.mean == pytest.approx(stats.pearsonr(x, y).statistic)
    assert found.spearman.mean == pytest.approx(stats.spearmanr(x, y).statistic)
    for one in (found.pearson, found.spearman):
        assert one.low < one.mean < one.high
        assert one.high - one.low < 0.3
    reference = stats.bootstrap(
        (x, y),
        lambda a, b: stats.pearsonr(a, b).statistic,
        paired=True,
        vectorized=False,
        n_resamples=1500,
        method="percentile",
        rng=0,
    ).confidence_interval
    assert (found.pearson.low, found.pearson.high) == pytest.approx(tuple(reference), abs=0.03)


def test_clusters_widen_the_interval():
    """Ten copies of every point are no more information than one."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal(12)
    y = x + rng.standard_normal(12)
    copies, labels = 10, np.repeat(np.arange(12), 10)
    alone = correlation(x, y).pearson
    naive = correlation(np.repeat(x, copies), np.repeat(y, copies)).pearson
    honest = correlation(np.repeat(x, copies), np.repeat(y, copies), clusters=labels).pearson
    assert naive.high - naive.low < 0.7 * (alone.high - alone.low)
    assert honest.high - honest.low == pytest.approx(alone.high - alone.low, rel=0.1)
    few = correlation(x, y, clusters=[0, 1] * 6)
    assert "too few for an interval" in few.remark
    assert math.isnan(few.pearson.low)


def clustered(rng, groups, copies, rho, shared=0.85):
    """Points with correlation rho, whose clusters (settings with several seeds) share most of both coordinates."""
    mix = np.array([[1, 0], [rho, math.sqrt(1 - rho**2)]]).T
    common, own = (rng.standard_normal(size) @ mix for size in ((groups, 1, 2), (groups, copies, 2)))
    points = (math.sqrt(shared) * common + math.sqrt(1 - shared) * own).reshape(-1, 2)
    return points[:, 0], points[:, 1], np.repeat(np.arange(groups), copies)


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "copies"), [(9, 1), (9, 3), (15, 3), (30, 1)])
@pytest.mark.parametrize("rho", [0, 0.8])
def test_intervals_of_correlations_cover_as_often_as_they_say(groups, copies, rho):
    """Normal values, for which Spearman's rho is 6 / pi arcsin(rho / 2)."""
    rng = np.random.default_rng([groups, copies, int(10 * rho)])
    truth = (rho, 6 / math.pi * math.asin(rho / 2))
    draws, covered, false = 150, np.zeros(2), 0
    for _ in range(draws):
        x, y, labels = clustered(rng, groups, copies, rho)
        found = correlation(x, y, labels)
        covered += [one.low <= value <= one.high for one, value in zip(found[2:4], truth, strict=True)]
        false += found.spearman.low > 0
    assert (covered / draws > 0.89).all()  # 0.95, and three standard errors of so few draws
    if rho == 0:
        assert false / draws < 0.07


@pytest.mark.slow
def test_seeds_taken_for_settings_would_find_correlations_that_are_not_there():
    rng = np.random.default_rng(11)
    draws, found = 100, np.zeros(2)
    for _ in range(draws):
        x, y, labels = clustered(rng, 9, 3, 0)
        both = (correlation(x, y).spearman, correlation(x, y, labels).spearman)
        found += [one.low > 0 or one.high < 0 for one in both]
    naive, honest = found / draws
    assert naive > 0.15
    assert honest < 0.1


def test_ranks_are_taken_anew_in_every_resample():
    """By brute force: scipy's Spearman of the very points that each resample has drawn."""
    rng = np.random.default_rng(6)
    x = rng.integers(0, 6, 12).astype(float)  # with ties
    y = x + rng.standard_normal(12)
    counts = _resample(12, RESAMPLES // 5).astype(int)
    drawn = [np.repeat(np.arange(12), row) for row in counts]
    values = [stats.spearmanr(x[index], y[index]).statistic for index in drawn]
    found = correlation(x, y).spearman
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))


def test_no_correlation_without_enough_or_varying_points():
    few = MIN_FOR_CORRELATION - 1
    assert "too few" in correlation(range(few), range(few)).remark
    assert "does not vary" in correlation([1.0] * 9, range(9)).remark
    with_gaps = correlation([*range(9), float("nan")], [*range(9), 1.0])
    assert with_gaps.n == 9


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_expected_best_is_the_mean_over_all_choices(tried, budget):
    budget = min(budget, len(tried))
    expected = np.mean([max(choice) for choice in itertools.combinations(tried, budget)])
    assert expected_best(tried, budget) == pytest.approx(expected)


def test_settings_that_are_equal_in_what_chooses_count_with_their_mean():
    """Three settings, two of them best by validation: which one is taken must not depend on what is shown."""
    shown, scores = [0.3, 0.9, 0.5], [1.0, 2.0, 2.0]
    assert expected_best(shown, 3, scores) == pytest.approx(0.7)
    choices = [(0.9 + 0.5) / 2, 0.9, 0.5]  # of both, of the first and the second, of the first and the third
    assert expected_best(shown, 2, scores) == pytest.approx(np.mean(choices))
    assert expected_best(shown[::-1], 3, scores[::-1]) == pytest.approx(0.7)


def test_the_t_interval_has_its_level_for_three_pairs():
    rng = np.random.default_rng(0)
    found = [lead(rng.standard_normal(3)) for _ in range(4000)]
    assert np.mean([one.low < 0 < one.high for one in found]) == pytest.approx(0.95, abs=0.01)
    known = stats.ttest_1samp([1.0, 2.0, 4.0], 0).confidence_interval(0.95)
    assert lead([1.0, 2.0, 4.0])[1:3] == pytest.approx(tuple(known))


def test_differences_that_are_equal_in_samples_have_equal_ranks():
    """Two test images more, two less, none: in floating point the first two differ in the last digit."""
    first, second = ([100 * (right / 359) for right in several] for several in ((300, 301, 340), (298, 303, 340)))
    assert abs(first[0] - second[0]) != abs(first[1] - second[1])
    found = paired(first, second)
    assert (found.ahead, found.ties) == (1, 1)
    assert found.effect == 0
    assert found.difference.mean == 0
