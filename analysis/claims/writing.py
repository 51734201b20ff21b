"""Claims as text: what came out of one, and all verdicts in one table."""

import textwrap
from collections.abc import Sequence

import pandas as pd

from analysis import formats
from analysis.claims.claim import Checked
from analysis.study import Study
from fl_lightning.system.text import render

VERDICTS = (
    "A claim has several parts, and the weakest decides its verdict. A part is confirmed if its whole 95 % interval "
    "over paired seeds lies on the claim's side. It tends to hold if the mean alone does; otherwise it is not "
    "confirmed. It is undecided with too few runs, rounds or seeds, or without the conditions of the claim."
)


def origin(part: Study) -> str:
    """Study and scale, the data, which at another scale may be others than the claim's, and how many runs."""
    return f"{part.title}; {', '.join(map(str, part.runs['data'].unique()))}; {len(part.runs)} runs"


def overview(checked: Sequence[Checked]) -> pd.DataFrame:
    """One row per claim."""
    return pd.DataFrame(
        {
            "claim": one.claim.title,
            "runs": origin(one.part),
            "parts": _counted(one),
            "verdict": one.verdict,
        }
        for one in checked
    )


def markdown(one: Checked) -> str:
    """A claim as a section of a document."""
    finding = one.finding
    rows = formats.readable(finding.table).to_dict("records")
    table = [render([{str(k): str(v) for k, v in row.items()} for row in rows], markdown=True), ""] if rows else []
    verdict = f"**{one.verdict[0].upper()}{one.verdict[1:]}** ({origin(one.part)})"
    return "\n".join(
        [
            f"### {one.claim.title}",
            "",
            textwrap.fill(f"The paper: {one.claim.paper}", 120),
            "",
            textwrap.fill(f"The rule: {one.claim.rule}", 120),
            "",
            *table,
            f"{verdict}:" if finding.held else f"{verdict}: {finding.why}.",
            *(["", *(f"- {part.answer}: {part.text}" for part in finding.held)] if finding.held else []),
        ]
    )


def _counted(one: Checked) -> str:
    answers = [part.answer for part in one.finding.held]
    counts = [f"{answers.count(word)} {word}" for word in ("yes", "tends to", "no", "undecided") if word in answers]
    return ", ".join(counts) or one.finding.why
