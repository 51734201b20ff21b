"""A claim, how it is checked, and what came out."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import pandas as pd

from analysis.statistics import Interval, lead
from analysis.study import Study

# What becomes of a part, from the weakest to the strongest, and of the claim whose weakest part it is.
Answer = Literal["no", "undecided", "tends to", "yes"]
VERDICT_OF: dict[Answer, str] = {
    "no": "not confirmed",
    "undecided": "undecided",
    "tends to": "tends to",
    "yes": "confirmed",
}
# What counts as the same GA, in points.
SAME = 1.0
# The paper speaks of curves that vary "after a few rounds".
A_FEW = 3


class CannotTell(Exception):  # noqa: N818 - reads as what it says
    """What a rule needs and the runs do not have."""


def need(condition: object, why: str) -> None:
    """Raise `CannotTell` unless the condition holds."""
    if not condition:
        raise CannotTell(why)


def written(value: float, spec: str) -> str:
    """A number, or a dash where there is none."""
    return "–" if math.isnan(value) else format(value, spec)


class Outcomes(NamedTuple):
    """What came out for every seed of a case.

    Attributes:
        by_seed: NaN where the seed diverged.
    """

    by_seed: Mapping[int, float] = {}

    @property
    def good(self) -> list[float]:
        """Of the seeds that did not diverge."""
        return [value for value in self.by_seed.values() if not math.isnan(value)]

    @property
    def mean(self) -> float:
        """Over the seeds that did not diverge; NaN if there is none."""
        return fmean(self.good) if self.good else math.nan

    @property
    def seeds(self) -> int:
        """How many seeds have an outcome, a good one or a bad one."""
        return len(self.by_seed)

    @property
    def diverged(self) -> int:
        """How many seeds diverged."""
        return self.seeds - len(self.good)

    def on(self, seeds: Iterable[int]) -> "Outcomes":
        """These seeds alone."""
        return Outcomes({seed: self.by_seed[seed] for seed in sorted(seeds)})

    def minus(self, amount: float) -> "Outcomes":
        """The same, lowered."""
        return Outcomes({seed: value - amount for seed, value in self.by_seed.items()})

    def __format__(self, spec: str) -> str:
        """The mean, and what it leaves out.

        >>> f"{Outcomes({1: 80.23, 2: 82.23, 3: math.nan}):.1f} %, {Outcomes():.1f} %"
        '81.2 (1 of 3 seeds diverged) %, – %'
        """
        number = written(self.mean, spec)
        return f"{number} ({self.diverged} of {self.seeds} seeds diverged)" if self.diverged else number


class Statement(NamedTuple):
    """One part of a claim.

    Attributes:
        text: In words, with its numbers.
        answer: What the runs say.
        seeds: How many seeds it rests on.
        margin: By how much it holds, on average over seeds.
    """

    text: str
    answer: Answer
    seeds: int
    margin: float = math.inf


def unknown(text: str, why: str, seeds: int = 0) -> Statement:
    """An undecided part."""
    return Statement(f"{text}: {why}", "undecided", seeds)


def answered(text: str, found: Interval, seeds: int, low: float = 0.0, high: float = math.inf) -> Statement:
    """Yes if the whole interval lies between two bounds, "tends to" if the mean alone does, or no.

    Args:
        text: In words, with its numbers.
        found: Mean and interval.
        seeds: How many it rests on.
        low: The lower bound.
        high: The upper bound.
    """
    answer: Answer = "yes" if low < found.low and found.high < high else "tends to" if low < found.mean < high else "no"
    return Statement(text, answer, seeds, min(found.mean - low, high - found.mean))


def compared(text: str, one: Outcomes, other: Outcomes | float, less: bool = False) -> Statement:
    """Whether a case is above its rival, or below it, by the differences over the seeds that both have.

    A mean without the seeds that diverged would be too good. So a case with a diverged seed ranks below one without
    divergence, and chance may be the reason; if both have one, the answer is open.

    Args:
        text: In words.
        one: Of the case that the claim speaks for.
        other: Of its rival; or a number that is to be passed.
        less: Whether small is good.
    """
    return _paired(text, one, other, *((-math.inf, 0.0) if less else (0.0, math.inf)))


def alike(text: str, one: Outcomes, other: Outcomes) -> Statement:
    """Whether two cases are the same: the interval of their difference lies within `SAME` points of zero."""
    return _paired(text, one, other, -SAME, SAME)


def _paired(text: str, one: Outcomes, other: Outcomes | float, low: float, high: float) -> Statement:
    rival = other if isinstance(other, Outcomes) else Outcomes(dict.fromkeys(one.by_seed, other))
    common = one.by_seed.keys() & rival.by_seed.keys()
    one, rival = one.on(common), rival.on(common)
    if not common:
        return unknown(text, "there is no number for one of them")
    if one.diverged and rival.diverged:
        return unknown(text, "both diverged", len(common))
    if one.diverged or rival.diverged:
        behind = one.diverged or math.isfinite(low) == math.isfinite(high)
        words = f"{text}; {one.diverged or rival.diverged} of {len(common)} seeds diverged"
        return Statement(words, "no" if behind else "tends to", len(common))
    found = lead([one.by_seed[seed] - rival.by_seed[seed] for seed in one.by_seed])
    return answered(f"{text}; {difference_words(found)}", found, len(common), low, high)


def difference_words(found: Interval) -> str:
    """A mean difference, its interval, and the smallest one that so many seeds can show.

    >>> difference_words(lead([1.0, 2.0, 3.0])), difference_words(lead([1.0]))
    ('+2, paired t -0.484 to +4.48 (n = 3, shows 2.48 or more)', '+1 (n = 1, no interval)')
    """
    if found.remark:
        return f"{found.mean:+.3g} (n = {found.n}, no interval)"
    ends = f"{found.low:+.3g} to {found.high:+.3g}"
    return f"{found.mean:+.3g}, paired t {ends} (n = {found.n}, shows {found.high - found.mean:.3g} or more)"


def weakest(parts: Sequence[Statement]) -> Statement:
    """Of several parts that must all hold, the one that holds least."""
    return min(parts, key=lambda one: (list(VERDICT_OF).index(one.answer), one.margin))


def against_the_best(text: str, one: Outcomes, rivals: Mapping[str, Outcomes]) -> Statement:
    """A case against the rival that is hardest to beat, each on the seeds that both have.

    Args:
        text: What is compared, and where.
        one: Of the case that the claim speaks for.
        rivals: Of every other one.
    """
    found = [
        compared(f"{text}, above every other, least surely {rival}", one, other)
        for rival, other in rivals.items()
        if one.by_seed.keys() & other.by_seed.keys()
    ]
    if not found:
        return unknown(text, "no other method has ended on the same seeds")
    return weakest([one for one in found if one.seeds > 1] or found)  # one seed tells nothing where others have more


class Finding(NamedTuple):
    """What came out.

    Attributes:
        table: The numbers.
        held: The parts of the claim; empty if nothing can be said.
        why: Why nothing can be said.
        failed: Whether that is a mistake in the rule, not a lack of runs.
    """

    table: pd.DataFrame
    held: Sequence[Statement]
    why: str = ""
    failed: bool = False

    @property
    def known(self) -> list[Statement]:
        """The parts with an answer."""
        return [one for one in self.held if one.answer != "undecided"]

    @property
    def verdict(self) -> str:
        """That of the weakest part: a claim is all of its parts, so each of them can only take away."""
        return VERDICT_OF[weakest(self.held).answer if self.held else "undecided"]

    @property
    def seeds(self) -> int:
        """The fewest seeds that any part with an answer rests on; 0 without one."""
        return min((one.seeds for one in self.known), default=0)

    def asking(self, seeds: int) -> "Finding":
        """The same, but a part with fewer seeds is undecided."""
        held = [
            unknown(one.text, f"{one.seeds} of the {seeds} seeds that the rule needs", one.seeds)
            if one.answer != "undecided" and one.seeds < seeds
            else one
            for one in self.held
        ]
        return self._replace(held=held)


class Claim(NamedTuple):
    """One statement of the paper.

    Attributes:
        key: Short name.
        title: The claim.
        paper: What the paper reports for it.
        study: The study that tests it.
        figure: Key of the report's figure that shows it.
        check: From the study's runs to the finding; `CannotTell` if they lack what the rule needs.
        rule: When each part of it holds.
        changed: How the rule was changed after a result had been seen, and what it had said before.
        seeds: How many seeds every part needs. Where the seed draws the partition, one seed is one problem, and one
            problem shows nothing about methods.
    """

    key: str
    title: str
    paper: str
    study: str
    figure: str
    check: Callable[[Study], Finding]
    rule: str
    changed: str = ""
    seeds: int = 2


class Checked(NamedTuple):
    """A claim and what became of it."""

    claim: Claim
    part: Study
    finding: Finding

    @property
    def verdict(self) -> str:
        """With the warning that it rests on a single seed, if it does."""
        return f"{self.finding.verdict}{' (one seed)' if self.finding.seeds == 1 else ''}"
