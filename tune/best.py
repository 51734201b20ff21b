"""The one rule for "best", for sweeps and reports alike, and the optimism of its numbers.

Of several settings the best is the one

1. with the most seeds that ended: one that lacks seeds which others have may just have been lucky;
2. among these, with the fewest seeds that diverged;
3. among these, with the best mean over its seeds: the largest, or the smallest of a metric that is good if small;
4. among these, that was tried first. The order of trying knows nothing of any other metric, so that its value of the
   first is on average the mean over all that are equal: as `analysis.statistics.expected_best` counts them.

So a setting that diverged or is incomplete never beats one that is complete, and if none is complete, the nearest to it
stands for its case.
"""

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fl_lightning.metrics.metric import VALIDATION

# How much too good the seeds that chose look: in points of an accuracy, or of any other metric.
OPTIMISM_POINTS, OPTIMISM = "optimism (points)", "optimism"
# Runs of other lengths are a comparison of their own, unless the length is tuned: a study may go on to more rounds, and
# then both lengths have a best.
ROUNDS = "federation.rounds"


class Tried(NamedTuple):
    """What is known of one setting.

    Attributes:
        scores: The metric after the last round of every seed that ended.
        diverged: How many seeds diverged.
        sign: 1 if the metric is good if large, -1 if it is good if small (`fl_lightning.direction`).
    """

    scores: Sequence[float]
    diverged: int = 0
    sign: int = 1

    @property
    def mean(self) -> float:
        """Over the seeds that ended; NaN if there is none."""
        return fmean(self.scores) if self.scores else float("nan")


def best(settings: Sequence[Tried]) -> int | None:
    """Which of the settings is the best; None if no seed of any has ended.

    >>> best([Tried([0.9]), Tried([0.5, 0.7]), Tried([0.8, 0.8]), Tried([0.9, 0.9], diverged=1)])
    2
    >>> best([Tried([0.9], sign=-1), Tried([0.5], sign=-1)])
    1
    """
    known = [number for number, one in enumerate(settings) if one.scores]
    return max(known, key=lambda number: (*_rank(settings[number]), -number), default=None)


def complete(settings: Sequence[Tried]) -> list[bool]:
    """For each setting, whether none of its seeds diverged and it has as many as any other.

    >>> complete([Tried([0.9]), Tried([0.5, 0.7]), Tried([0.9], diverged=1)])
    [False, True, False]
    """
    most = max((len(one.scores) + one.diverged for one in settings), default=0)
    return [one.diverged == 0 and len(one.scores) == most > 0 for one in settings]


def _rank(one: Tried) -> tuple[int, int, float]:
    return len(one.scores), -one.diverged, one.sign * one.mean


class Keys(NamedTuple):
    """Which settings a study varies, and as what.

    Attributes:
        environments: Conditions: a comparison of its own in every combination.
        tuned: What is tried for a case.
        cases: What makes a case.
        given: What follows from the conditions.
    """

    environments: frozenset[str] = frozenset()
    tuned: frozenset[str] = frozenset()
    cases: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()

    def follows(self, key: str) -> bool:
        """Whether the study sets it according to the conditions; so do options of a part that it sets, as `model`."""
        return key in self.given or key.partition(".")[0] in self.given

    def is_condition(self, key: str) -> bool:
        """Whether runs that differ in this setting do not compete, as far as the study says something about it."""
        if key in self.environments:
            return True
        claimed = self.tuned if key == ROUNDS else self.tuned | self.cases
        # The options of a part that is varied, such as `model`, vary with it.
        return key not in claimed and key.partition(".")[0] not in claimed


def keys_of(content: Mapping[str, Any]) -> Keys:
    """From a study's content, as it is stored with a sweep."""
    cases = content.get("cases") or ()
    return Keys(
        frozenset(content.get("environments") or ()),
        frozenset([*(content.get("space") or ()), *(key for case in cases for key in case.get("space") or ())]),
        frozenset(key for case in cases for key in case.get("settings") or ()),
        frozenset(key for one in content.get("given") or () for key in one.get("settings") or ()),
    )


def protocol(metric: str, seeds: Collection[int], confirming: Collection[int] = (), fewer: bool = False) -> str:
    """How the best settings were chosen, with the optimism that readers must know.

    Args:
        metric: What decides.
        seeds: That chose.
        confirming: That did not.
        fewer: Whether some cases have only the first of these.

    >>> protocol("LA", range(3))
    'chosen and reported on the same seeds and the test set, as in the paper: a little too good for every case alike'
    >>> protocol("GA_validation", range(3), [3, 4])
    'chosen by GA_validation on seeds 0 to 2; confirmed: the test set on seeds 3 and 4, which had no part in the choice'
    """
    if not confirming and metric != VALIDATION:
        same = "chosen and reported on the same seeds and the test set, as in the paper"
        return f"{same}: a little too good for every case alike"
    if not confirming:
        return f"chosen by {metric} and reported on the test set, both on {named(seeds)}"
    where = "" if metric == VALIDATION else " on the test set,"
    return (
        f"chosen by {metric}{where} on {named(seeds)}; confirmed: the test set on {named(confirming)}"
        f"{' (some cases on the first of them)' if fewer else ''}, which had no part in the choice"
    )


def named(seeds: Collection[int]) -> str:
    """Seeds in words, and what they are.

    >>> named([0]), named([3, 4])
    ('seed 0', 'seeds 3 and 4')
    """
    return f"seed{'s' if len(seeds) != 1 else ''} {listed(seeds)}"


def listed(seeds: Collection[int]) -> str:
    """Seeds in words.

    >>> listed([0, 1, 2]), listed([3, 4]), listed([5, 9, 2])
    ('0 to 2', '3 and 4', '2, 5 and 9')
    """
    known = sorted(seeds)
    if len(known) > 2 and known == list(range(known[0], known[-1] + 1)):
        return f"{known[0]} to {known[-1]}"
    *most, last = map(str, known)
    return f"{', '.join(most)} and {last}" if most else last
