"""A claim, how it is checked, and what came out."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import pandas as pd

from analysis.parts import Part

Verdict = Literal["confirmed", "partly confirmed", "not confirmed"]
# What counts as the same GA, in points.
SAME = 1.0
# The paper speaks of curves that vary "after a few rounds".
A_FEW = 3


def falls(rounds: pd.DataFrame, after: int = 0) -> "pd.Series[float]":
    """How far GA falls from round to round, added up over each run, in points; only after some rounds."""
    ordered = rounds.loc[rounds["round"] >= after].sort_values(["run_id", "round"])
    return ordered.groupby("run_id")["GA"].apply(lambda ga: 100 * (-ga.diff()).clip(lower=0).sum())


class Finding(NamedTuple):
    """What came out.

    Attributes:
        table: The numbers.
        held: For every part of the claim, in words with its numbers, whether it held; empty if nothing can be said.
    """

    table: pd.DataFrame
    held: Sequence[tuple[str, bool]]

    @property
    def verdict(self) -> Verdict:
        """Confirmed if all parts held."""
        if all(true for _, true in self.held):
            return "confirmed"
        return "partly confirmed" if any(true for _, true in self.held) else "not confirmed"


class Claim(NamedTuple):
    """One statement of the paper.

    Attributes:
        key: Short name.
        title: The claim.
        paper: What the paper reports for it.
        study: The study that tests it.
        figure: Key of the report's figure that shows it.
        check: From the study's runs to the finding.
    """

    key: str
    title: str
    paper: str
    study: str
    figure: str
    check: Callable[[Part], Finding]


class Checked(NamedTuple):
    """A claim and what became of it."""

    claim: Claim
    part: Part
    finding: Finding
