"""The paper's claims, one by one, against runs: what it says, what came out, and by which rule that is a yes or a no.

    from analysis import claims
    for checked in claims.check(parts("runs")):
        print(claims.markdown(checked))

A claim is checked where the store has its study. It has several parts, each a comparison over paired seeds: yes, tends
to, no, or undecided. Its verdict is that of the weakest. `python -m analysis.claims` writes down all rules and how
often each of them errs, as they are in docs/claims.md.

A new claim is an entry of claims.yaml and a function in `RULES` of federated.py or laplace.py, under the same key.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
import yaml

from analysis.claims import federated, laplace
from analysis.claims.claim import CannotTell, Checked, Claim, Finding, Outcomes, Statement
from analysis.claims.writing import VERDICTS, markdown, origin, overview
from analysis.study import Study
from fl_lightning.errors import UserError

_TEXTS = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))
_RULES = {**federated.RULES, **laplace.RULES}
SHARED_CHANGES: tuple[str, ...] = tuple(_TEXTS["shared_changes"])
CLAIMS = tuple(Claim(**text, check=_RULES[text["key"]]) for text in _TEXTS["claims"])


def check(parts: Iterable[Study]) -> Iterator[Checked]:
    """Every claim whose study has runs; at several scales of a study, at each of them."""
    known = [part for part in parts if part.name and len(part.runs)]
    for claim in CLAIMS:
        for part in known:
            if part.name == claim.study:
                yield Checked(claim, part, _finding(claim, part))


def _finding(claim: Claim, part: Study) -> Finding:
    if not part.runs["ended"].any():
        return Finding(pd.DataFrame(), [], "no run has ended")
    try:
        return claim.check(part).asking(claim.seeds)
    except (CannotTell, UserError) as reason:
        return Finding(pd.DataFrame(), [], str(reason))
    except Exception as error:  # one claim must not take the page with it
        return Finding(pd.DataFrame(), [], f"the rule failed with {type(error).__name__}: {error}", failed=True)


__all__ = [
    "CLAIMS",
    "VERDICTS",
    "CannotTell",
    "Checked",
    "Claim",
    "Finding",
    "Outcomes",
    "Statement",
    "check",
    "markdown",
    "origin",
    "overview",
]
