"""Claims as text: what came out of one, all verdicts in one table, and the rules of all of them."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import tables
from analysis.claims.catalogue import CLAIMS, SHARED_CHANGES
from analysis.claims.claim import SAME, Checked, Claim
from analysis.runs import Study
from fl_lightning.system.text import render

VERDICTS = (
    "A claim has several parts, and the weakest decides its verdict. A part is confirmed if its whole 95 % interval "
    "over paired seeds lies on the claim's side. It tends to hold if the mean alone does; otherwise it is not "
    "confirmed. It is undecided with too few runs, rounds or seeds, or without the conditions of the claim."
)
_SIMULATION = (
    "Every rule was asked about made-up stores with three seeds, in which the truth is known. Either nothing differs "
    "but for the noise of seeds, runs and rounds, or the opposite of the claim holds. `python -m analysis.claims "
    "--simulate 200` repeats it; analysis/claims/simulation.py says how the stores are made."
)
RATES = Path(__file__).with_name("error_rates.csv")
_INTRODUCTION = f"""# By which rules is a claim confirmed?

By those below, one for each claim; [results.md](results.md) has the verdicts. The page is made from `analysis/claims/`
by `python -m analysis.claims > docs/claims.md`; a test compares the two.

{textwrap.fill(VERDICTS, 120)}

For all claims:

- A comparison is of differences over the seeds that both sides have: mean ± t s / √n, Student's t with n - 1 degrees of
  freedom. Half of the interval is the smallest difference that so many seeds show; each part states it. In standard
  deviations of the difference it is 9.0 for two seeds, 2.5 for three, 1.2 for five and 0.7 for ten.
- Where the seed draws the partition, a part needs two seeds at least: one seed is one problem. Where the partition is
  fixed (`laplace`), one seed can show what tends to hold; the verdict then says "one seed".
- A case of which a seed diverged stands behind one of which none has; if seeds of both have, the part is undecided. A
  mean of the seeds that are left is never compared.
- "Alike" is an interval of the difference within {SAME:g} point of GA.
- Intervals of correlations come from resampled settings, not runs: the seeds of one setting are one observation. Five
  settings are the least. What a seed does to all settings alike is subtracted before.
"""


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
    heading = "Changed for all of them after results had been seen:"
    return f"{_INTRODUCTION}\n{heading}\n\n{changes}\n\n{_errors()}" + "".join(map(_rule, CLAIMS))


def _errors() -> str:
    """The section on what the rules say of stores that are made up."""
    rows = [
        {
            "claim": f"`{key}`",
            "nothing differs: confirmed": f"{one['confirmed']} of {one['stores']}",
            "tends to": f"{one['tends to']} of {one['stores']}",
            "the claim is false: confirmed": f"{one['confirmed, false']} of {one['stores, false']}",
        }
        for key, one in pd.read_csv(RATES, index_col="claim").iterrows()
    ]
    return f"## How often the rules err\n\n{textwrap.fill(_SIMULATION, 120)}\n\n{render(rows, markdown=True)}\n"


def _rule(claim: Claim) -> str:
    needs = f"Study: `{claim.study}`. Seeds: {claim.seeds} or more."
    changed = [textwrap.fill(f"*Changed after a result was seen:* {claim.changed}", 120), ""] if claim.changed else []
    return "\n".join(["", f"## {claim.title}", "", textwrap.fill(claim.rule, 120), "", *changed, needs, ""])


def _bullet(text: str) -> str:
    return textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ")


def _counted(one: Checked) -> str:
    answers = [part.answer for part in one.finding.held]
    counts = [f"{answers.count(word)} {word}" for word in ("yes", "tends to", "no", "undecided") if word in answers]
    return ", ".join(counts) or one.finding.why
