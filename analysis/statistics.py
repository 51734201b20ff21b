"""Statements about few seeds that hold up: intervals, paired comparisons, correlations, fair choices from grids.

Whatever is too little for a number gives a remark instead. All resampling is keyed: equal data, equal interval.

- Interval of a mean over seeds: bootstrap percentiles, widened for small n as Hesterberg (*What Teachers Should Know
  About the Bootstrap*, The American Statistician 2015) derives: plain percentiles are too narrow by about
  sqrt((n - 1) / n) and use the normal where Student's t belongs. So the percentile taken is
  Phi(-sqrt(n / (n - 1)) t_(n-1)) instead of 2.5 %.
- Paired comparison on equal seeds: Wilcoxon's signed-rank test, exact for n <= 14, and the matched-pairs rank-biserial
  correlation (W+ - W-) / (W+ + W-) (Kerby 2014) as effect size: 1 if every difference is positive, -1 if every is
  negative.
- Interval of a lead over paired seeds, by which claims are tested: Student's t, mean +- t_(n-1) s / sqrt(n). It has its
  level for as few as two pairs, where the bootstrap has no interval, if differences are normal; half its width is the
  smallest difference that so many seeds can show.
- Correlations: Pearson's r and Spearman's rho with bootstrap percentiles over points, or over whole clusters of them,
  such as the seeds of one setting. Those of Pearson's r are widened for few clusters as those of a mean are. Ranks are
  taken anew in every resample; the ties in it widen the interval of rho by themselves.
- Best of a grid on an equal budget: a method with more settings finds a better one by chance. The expected best of k
  settings drawn without replacement from the K that were tried (Dodge et al., *Show Your Work*, EMNLP 2019) compares
  all methods at the k that each of them has. Settings that are equal in what chooses count with their mean.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from fl_lightning.streams import numpy_generator

LEVEL = 0.95
RESAMPLES = 10_000
# Fewer seeds say too little about their own spread.
MIN_FOR_INTERVAL = 5
# With fewer pairs even the clearest outcome has p > 0.05 in a two-sided signed-rank test.
MIN_FOR_TEST = 6
# Differences that agree to so many digits are equal but for rounding.
DIGITS = 9
# Below this a correlation is an anecdote.
MIN_FOR_CORRELATION = 8
# All 2^n signs are tried up to here.
EXACT_UP_TO = 14

Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean and its interval.

    Attributes:
        mean: Of the values; NaN if there are none.
        low: Lower end; the smallest value if there are too few for an interval.
        high: Upper end, likewise.
        n: How many values.
        remark: Why low and high do not form a confidence interval; empty if they do.
    """

    mean: float
    low: float
    high: float
    n: int
    remark: str = ""


class Band(NamedTuple):
    """Intervals of several means side by side, such as of all rounds; attributes as of `Interval`, as arrays."""

    mean: Array
    low: Array
    high: Array
    n: int
    remark: str = ""


class Paired(NamedTuple):
    """How one method compares with another on equal seeds.

    Attributes:
        n: Pairs.
        ahead: Pairs in which the first is ahead.
        ties: Pairs in which both are equal.
        difference: Mean of first minus second.
        p: Of the two-sided signed-rank test; None if there are too few pairs.
        effect: Rank-biserial correlation; None without a difference.
        remark: What a reader must know; empty if nothing.
    """

    n: int
    ahead: int
    ties: int
    difference: Interval
    p: float | None
    effect: float | None
    remark: str = ""


class Correlation(NamedTuple):
    """Pearson's r and Spearman's rho.

    Attributes:
        n: Points.
        clusters: How many of them are independent of each other.
        pearson: With the ends of its interval, NaN if there are too few clusters; None where a remark stands instead.
        spearman: Likewise.
        remark: Why the number or its interval is missing; empty if both are given.
    """

    n: int
    clusters: int
    pearson: Interval | None
    spearman: Interval | None
    remark: str = ""


def mean_interval(values: ArrayLike, level: float = LEVEL) -> Interval:
    """Mean over seeds with its interval.

    >>> mean_interval([0.5, 0.7]).remark
    'range of 2 runs: too few for an interval'
    """
    band = mean_band(np.asarray(values, dtype=float)[:, None], level)
    return Interval(float(band.mean[0]), float(band.low[0]), float(band.high[0]), band.n, band.remark)


def mean_band(values: Array, level: float = LEVEL) -> Band:
    """Means over the rows, with intervals, for every column; rows are resampled as wholes.

    Args:
        values: One row per run, one column per round.
        level: Of confidence.
    """
    n = len(values)
    if n == 0:
        nothing = np.full(values.shape[1], np.nan)
        return Band(nothing, nothing, nothing, 0, "no runs")
    mean = values.mean(0)
    if n < MIN_FOR_INTERVAL:
        words = "a single run" if n == 1 else f"range of {n} runs: too few for an interval"
        return Band(mean, values.min(0), values.max(0), n, words)
    tail = _tail(n, level)
    means = _resample(n) @ values / n
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return Band(mean, low, high, n)


def paired(first: ArrayLike, second: ArrayLike, level: float = LEVEL) -> Paired:
    """Compare two methods on pairs of runs with equal seed and partition.

    >>> paired([0.8, 0.9, 0.7], [0.7, 0.8, 0.6]).remark
    'n = 3 is too few for a test'
    """
    # Accuracies are fractions of a test set: differences that are equal in samples must have equal ranks.
    differences = np.round(np.asarray(first, dtype=float) - np.asarray(second, dtype=float), DIGITS)
    n = len(differences)
    ahead, ties = int((differences > 0).sum()), int((differences == 0).sum())
    difference = mean_interval(differences, level)
    different = differences[differences != 0]
    if not len(different):
        return Paired(n, ahead, ties, difference, None, None, "no pairs" if n == 0 else "all pairs are equal")
    ranks = stats.rankdata(np.abs(different))
    effect = float((ranks * np.sign(different)).sum() / ranks.sum())
    if len(different) < MIN_FOR_TEST:
        words = f"n = {n} is too few for a test" if not ties else f"{len(different)} unequal pairs are too few to test"
        return Paired(n, ahead, ties, difference, None, effect, words)
    exact = len(different) <= EXACT_UP_TO
    how: Any = stats.PermutationMethod(n_resamples=2**EXACT_UP_TO) if exact else "asymptotic"
    p = float(stats.wilcoxon(different, method=how).pvalue)
    return Paired(n, ahead, ties, difference, p, effect)


def lead(differences: ArrayLike, level: float = LEVEL) -> Interval:
    """Mean of paired differences with Student's t interval.

    >>> [round(float(end), 2) for end in lead([1.0, 2.0, 3.0])[:3]], lead([1.0]).remark
    ([2.0, -0.48, 4.48], 'a single pair has no interval')
    """
    values = np.round(np.asarray(differences, dtype=float), DIGITS)
    n = len(values)
    mean = float(values.mean()) if n else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, n, "a single pair has no interval" if n else "no pairs")
    half = float(stats.t.ppf((1 + level) / 2, n - 1) * values.std(ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)


def correlation(x: ArrayLike, y: ArrayLike, clusters: ArrayLike | None = None, level: float = LEVEL) -> Correlation:
    """Pearson and Spearman of two columns.

    Args:
        x: The first column; points with a missing value do not count.
        y: The second column.
        clusters: What belongs together, such as the setting of every point, tried with several seeds; whole clusters
            are then resampled.
        level: Of confidence.
    """
    first, second = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    known = np.isfinite(first) & np.isfinite(second)
    first, second = first[known], second[known]
    n = len(first)
    labels = np.arange(n) if clusters is None else np.unique(np.asarray(clusters)[known], return_inverse=True)[1]
    groups = len(np.unique(labels))
    if n < MIN_FOR_CORRELATION:
        return Correlation(n, groups, None, None, f"n = {n} points are too few for a correlation")
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return Correlation(n, groups, None, None, "one of the two does not vary")
    pearson, spearman = _pearson(first, second), _pearson(stats.rankdata(first), stats.rankdata(second))
    if groups < MIN_FOR_INTERVAL:
        words = f"{groups} settings are too few for an interval" if clusters is not None else "too few for an interval"
        return Correlation(n, groups, _bare(pearson, n, words), _bare(spearman, n, words), words)
    weights = _resample(groups, RESAMPLES // 5)[:, labels]
    ends = _ends(_weighted(first, second, weights), _tail(groups, level))
    ends_of_ranks = _ends(_weighted(_ranks(first, weights), _ranks(second, weights), weights), (1 - level) / 2)
    return Correlation(n, groups, Interval(pearson, *ends, n), Interval(spearman, *ends_of_ranks, n))


def expected_best(values: Sequence[float], budget: int, chosen_by: Sequence[float] | None = None) -> float:
    """Expected largest of `budget` values drawn without replacement; or the value of the one with the largest score.

    E max = sum_i v_(i) C(i - 1, k - 1) / C(K, k) over the values in ascending order, of themselves or of their scores.
    Equal scores say nothing about which of their values is taken: each of them counts with the mean of these values.

    >>> expected_best([0.2, 0.6, 0.4], 3), round(expected_best([0.2, 0.6, 0.4], 1), 3)
    (0.6, 0.4)
    >>> expected_best([0.2, 0.6], 2, chosen_by=[1, 1])
    0.4
    """
    tied: dict[float, list[float]] = {}
    for score, value in zip(chosen_by or values, values, strict=True):
        tied.setdefault(score, []).append(value)
    ordered = [fmean(tied[score]) for score in sorted(tied) for _ in tied[score]]
    total = math.comb(len(ordered), budget)
    return sum(value * (math.comb(i, budget - 1) / total) for i, value in enumerate(ordered))


def _resample(n: int, resamples: int = RESAMPLES) -> Array:
    """How often each of n things is drawn in every bootstrap sample."""
    generator = numpy_generator(0, "bootstrap", n, resamples)
    return generator.multinomial(n, np.full(n, 1 / n), size=resamples).astype(float)


def _pearson(x: Array, y: Array) -> float:
    return float(np.corrcoef(x, y)[0, 1])


def _bare(value: float, n: int, remark: str) -> Interval:
    return Interval(value, math.nan, math.nan, n, remark)


def _tail(n: int, level: float) -> float:
    """The percentile that makes up for the narrowness of the bootstrap at small n."""
    return float(stats.norm.cdf(-math.sqrt(n / (n - 1)) * stats.t.ppf((1 + level) / 2, n - 1)))


def _ranks(values: Array, weights: Array) -> Array:
    """The rank of every point within every bootstrap sample, up to a constant; equal values share their mean rank."""
    distinct, place = np.unique(values, return_inverse=True)
    order = np.argsort(place, kind="stable")
    drawn = np.add.reduceat(weights[:, order], np.searchsorted(place[order], np.arange(len(distinct))), axis=1)
    return np.asarray((drawn.cumsum(1) - drawn / 2)[:, place])


def _weighted(x: Array, y: Array, weights: Array) -> Array:
    """Pearson's r of all bootstrap samples at once, each given by how often it has every point.

    Args:
        x: One row for all samples, or one for each.
        y: Likewise.
        weights: One row per sample.
    """
    totals = weights.sum(1, keepdims=True)
    dx, dy = (v - (weights * v).sum(1, keepdims=True) / totals for v in (x, y))
    with np.errstate(invalid="ignore", divide="ignore"):  # a sample of one point alone has no correlation
        found = (weights * dx * dy).sum(1) / np.sqrt((weights * dx**2).sum(1) * (weights * dy**2).sum(1))
    return np.asarray(found)


def _ends(values: Array, tail: float) -> tuple[float, float]:
    values = values[np.isfinite(values)]
    low, high = np.quantile(values, [tail, 1 - tail]) if len(values) else (math.nan, math.nan)
    return float(low), float(high)
