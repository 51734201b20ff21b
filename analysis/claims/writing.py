"""Claims as text: what came out of one, all verdicts in one table, and the rules of all of them."""

import textwrap
from collections.abc import Sequence

import pandas as pd

from analysis import tables
from analysis.claims.catalogue import CLAIMS, SHARED_CHANGES
from analysis.claims.claim import SAME, Checked, Claim
from analysis.parts import Part
from fl_lightning.system.text import render

VERDICTS = (
    "A claim has several parts, each true, false, or not to be told from the runs that there are. Confirmed is a claim "
    "whose parts are all true, partly confirmed one of which some are, not confirmed one of which none is. Cannot be "
    "told is one of which no part can be: too few runs, rounds or seeds, or not the conditions it speaks of."
)
_INTRODUCTION = f"""# The rules behind the verdicts

Made from `analysis/claims/` by `python -m analysis.claims > docs/claims.md`; a test compares the two.

{textwrap.fill(VERDICTS, 120)}

For all claims:

- Comparisons are of means over seeds; how sure the means are is in the tables beside them.
- Where the seed draws the partition, a part needs two seeds at least: one seed is one problem. Where the partition is
  fixed (`laplace`), one seed is enough for a verdict, which then says "one seed".
- Both sides need equally many seeds. A case of which a seed diverged stands behind one of which none has; if seeds of
  both have, the part cannot be told. A mean of the seeds that are left is never compared.
- "Alike" is a difference of less than {SAME:g} point of GA.
- Intervals of correlations come from resampled settings, not runs: the seeds of one setting are one observation. Five
  settings are the least.
"""


def origin(part: Part) -> str:
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
    rows = tables.readable(finding.table).to_dict("records")
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


def rules() -> str:
    """The page with all rules."""
    changes = "\n".join(map(_bullet, SHARED_CHANGES))
    heading = "Changed for all of them after the results in [results.md](results.md) had been seen:"
    return f"{_INTRODUCTION}\n{heading}\n\n{changes}\n" + "".join(map(_rule, CLAIMS))


def _rule(claim: Claim) -> str:
    needs = f"Study: `{claim.study}`. Seeds: {claim.seeds} or more."
    changed = [textwrap.fill(f"*Changed after a result was seen:* {claim.changed}", 120), ""] if claim.changed else []
    return "\n".join(["", f"## {claim.title}", "", textwrap.fill(claim.rule, 120), "", *changed, needs, ""])


def _bullet(text: str) -> str:
    return textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ")


def _counted(one: Checked) -> str:
    answers = [part.answer for part in one.finding.held]
    counts = [f"{answers.count(word)} {word}" for word in ("yes", "no", "cannot be told") if word in answers]
    return ", ".join(counts) or one.finding.why
