"""Print the rules of all claims as the page docs/claims.md."""

import textwrap
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader

from analysis.claims import CLAIMS, SHARED_CHANGES, VERDICTS
from analysis.claims.claim import SAME
from fl_lightning.system.text import render

# Written by `python -m benchmarks.claims`.
RATES = Path(__file__).with_name("error_rates.csv")


def page() -> str:
    """The page with all rules."""
    templates = FileSystemLoader(Path(__file__).parents[1] / "templates")
    environment = Environment(loader=templates, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"fill": _fill, "bullet": lambda text: _fill(text, "- ", "  ")}
    rates = pd.read_csv(RATES, index_col="claim")
    (stores,), (opposite,) = rates["stores"].unique(), rates["stores, false"].unique()
    return environment.get_template("claims.md").render(
        claims=CLAIMS,
        shared_changes=SHARED_CHANGES,
        verdicts=VERDICTS,
        same=f"{SAME:g}",
        stores=stores,
        opposite=opposite,
        errors=_errors(rates),
    )


def _fill(text: str, first: str = "", later: str = "") -> str:
    return textwrap.fill(text, 120, initial_indent=first, subsequent_indent=later)


def _errors(rates: pd.DataFrame) -> str:
    """How often each rule confirms what is not there."""
    rows = [
        {
            "claim": f"`{key}`",
            "nothing differs: confirmed": str(one["confirmed"]),
            "tends to": str(one["tends to"]),
            "the claim is false: confirmed": str(one["confirmed, false"]),
        }
        for key, one in rates.iterrows()
    ]
    return render(rows, markdown=True)


if __name__ == "__main__":
    print(page(), end="")
