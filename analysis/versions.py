"""Runs made by different versions of the code: which of them count, and what a reader must know about it."""

import json
from typing import Any

import pandas as pd

from fl_lightning.runs.provenance import SETTINGS_TAG, VERSIONS_TAG

# Which column names the part whose version it is; the others have no name.
NAMED = ("method", "data", "model", "engine")


def superseded(table: pd.DataFrame) -> "pd.Series[bool]":
    """Runs whose settings another version of the code has computed later: those of the newest version count."""
    if SETTINGS_TAG not in table or table[SETTINGS_TAG].isna().all():
        return pd.Series(False, index=table.index)
    setting = [table[SETTINGS_TAG], table["federation.rounds"]]
    newest = table.sort_values(["ended", "start"]).groupby(setting, sort=False)[VERSIONS_TAG].transform("last")
    return table[SETTINGS_TAG].notna() & table[VERSIONS_TAG].ne(newest.reindex(table.index))


def mixed(table: pd.DataFrame) -> list[str]:
    """Which parts the runs of a table have in several versions, in words: such numbers should not be compared."""
    if VERSIONS_TAG not in table:
        return []
    versions = table[VERSIONS_TAG].map(_parsed)
    remarks = []
    for part in dict.fromkeys(part for one in versions for part in one):
        found = versions.map(lambda one, part=part: one.get(part))
        groups = table.groupby(part, sort=False).groups.items() if part in NAMED else [("", table.index)]
        for name, index in groups:
            counts = found.loc[index].dropna().value_counts().sort_index()
            if len(counts) > 1:
                each = ", ".join(f"{version} ({number} runs)" for version, number in counts.items())
                what = f"{part} {name}".strip()
                remarks.append(f"runs of several versions of the code are mixed: {what} version {each}; sweep again")
    return remarks


def _parsed(text: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text) if isinstance(text, str) else {}
    return content
