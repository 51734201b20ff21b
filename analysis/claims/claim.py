"""A claim, how it is checked, and what came out."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import pandas as pd

from analysis.parts import Part

Verdict = Literal["confirmed", "partly confirmed", "not confirmed", "cannot be told"]
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


class Mean(NamedTuple):
    """A mean over the seeds of a case that ended.

    Attributes:
        value: NaN if none has.
        ended: Seeds.
        diverged: Seeds that are not in the mean because they diverged.
    """

    value: float = math.nan
    ended: int = 0
    diverged: int = 0

    @property
    def seeds(self) -> int:
        """How many seeds have an outcome, a good one or a bad one."""
        return self.ended + self.diverged

    def __format__(self, spec: str) -> str:
        """The number, and what it leaves out.

        >>> f"{Mean(81.23, 2, 1):.1f} %, {Mean():.1f} %"
        '81.2 (1 of 3 seeds diverged) %, – %'
        """
        number = written(self.value, spec)
        return f"{number} ({self.diverged} of {self.seeds} seeds diverged)" if self.diverged else number


class Statement(NamedTuple):
    """One part of a claim.

    Attributes:
        text: In words, with its numbers.
        true: Whether it holds; None if that cannot be told.
        seeds: The fewest seeds that any of its numbers is a mean of.
    """

    text: str
    true: bool | None
    seeds: int

    @property
    def answer(self) -> str:
        """Yes, no, or neither."""
        return {True: "yes", False: "no", None: "cannot be told"}[self.true]


def unknown(text: str, why: str, seeds: int = 0) -> Statement:
    """A part that cannot be told."""
    return Statement(f"{text}: {why}", None, seeds)


def compared(text: str, one: Mean, other: Mean, test: Callable[[float, float], bool]) -> Statement:
    """A comparison of two means over seeds.

    A mean without the seeds that diverged would be too good. So a case of which a seed diverged stands behind one of
    which none has; if it is so with both, nothing can be told.

    Args:
        text: In words, with both numbers.
        one: Of the case that the claim speaks for.
        other: Of its rival.
        test: What must be true of the two values.
    """
    seeds = min(one.seeds, other.seeds)
    if not seeds:
        return unknown(text, "there is no number for one of them")
    if one.seeds != other.seeds:
        return unknown(text, f"{one.seeds} seeds against {other.seeds}", seeds)
    if one.diverged and other.diverged:
        return unknown(text, "both diverged", seeds)
    if one.diverged or other.diverged:
        return Statement(text, not one.diverged, seeds)
    return Statement(text, bool(test(one.value, other.value)), seeds)


def joined(text: str, parts: Sequence[Statement]) -> Statement:
    """A part that is true if all of some comparisons are; one that cannot be told leaves it open."""
    open_ones = [one for one in parts if one.true is None]
    if open_ones or not parts:
        return unknown(text, open_ones[0].text.removeprefix(": ") if open_ones else "there is nothing to compare")
    return Statement(text, all(one.true for one in parts), min(one.seeds for one in parts))


def alike(text: str, pairs: Sequence[tuple[Mean, Mean]]) -> Statement:
    """Whether two cases are the same at several places: less than `SAME` points apart, on average of all places.

    Args:
        text: In words, with "{gap}" where the average distance belongs.
        pairs: Both means at every place.
    """
    gap = sum(abs(one.value - other.value) for one, other in pairs) / max(len(pairs), 1)
    found = joined(
        text.format(gap=f"{written(gap, '.1f')} points"), [compared("", *pair, lambda *_: gap < SAME) for pair in pairs]
    )
    lost = any(side.diverged for pair in pairs for side in pair)
    return found._replace(true=False) if lost and found.true is not None else found


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
    def told(self) -> list[Statement]:
        """The parts that are true or false."""
        return [one for one in self.held if one.true is not None]

    @property
    def verdict(self) -> Verdict:
        """Confirmed if all parts hold; a part that cannot be told confirms nothing."""
        true = sum(bool(one.true) for one in self.told)
        if not self.told:
            return "cannot be told"
        if true == len(self.held):
            return "confirmed"
        return "partly confirmed" if true else "not confirmed"

    @property
    def seeds(self) -> int:
        """The fewest seeds that any part which could be told rests on; 0 if none could."""
        return min((one.seeds for one in self.told), default=0)

    def asking(self, seeds: int) -> "Finding":
        """The same, but a part with fewer seeds cannot be told."""
        held = [
            unknown(one.text, f"{one.seeds} of the {seeds} seeds that the rule needs", one.seeds)
            if one.true is not None and one.seeds < seeds
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
        rule: When each part of it is true.
        changed: How the rule was changed after a result had been seen, and what it had said before.
        seeds: How many seeds every part needs. Where the seed draws the partition, one seed is one problem, and one
            problem shows nothing about methods.
    """

    key: str
    title: str
    paper: str
    study: str
    figure: str
    check: Callable[[Part], Finding]
    rule: str
    changed: str = ""
    seeds: int = 2


class Checked(NamedTuple):
    """A claim and what became of it."""

    claim: Claim
    part: Part
    finding: Finding

    @property
    def verdict(self) -> str:
        """With the warning that it rests on a single seed, if it does."""
        return f"{self.finding.verdict}{' (one seed)' if self.finding.seeds == 1 else ''}"
