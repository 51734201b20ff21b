"""Best settings at the edge of what was tried, in tables and sentences: a better one may lie beyond."""

from collections.abc import Mapping, Sequence

import pandas as pd

from analysis import contests
from tune.edges import Side, edges
from tune.study import Range


def at_edges(best: pd.DataFrame, runs: pd.DataFrame) -> list[dict[str, Side]]:
    """For every row of `contests.best_of_grid`: which settings lie at which end.

    Args:
        best: The best settings.
        runs: What they were chosen from; its study says what was tried, or else the runs themselves do.
    """
    declared = runs.attrs.get("spaces", {})
    tuned = contests.tuned(runs)
    found = []
    for _, row in best.iterrows():
        mine = runs.loc[runs["case"].eq(row["case"])]
        seen = {key: Range("grid", tuple(mine[key].dropna().unique())) for key in tuned}
        space = declared.get(row["case"], seen)
        chosen = {key: row[key] for key in space if key in row}
        found.append(edges(chosen, {key: space[key] for key in chosen}))
    return found


def in_cells(found: Sequence[Mapping[str, str]]) -> list[str]:
    """One cell for each row.

    >>> in_cells([{"training.lr": "largest", "training.epochs": "smallest"}, {}])
    ['lr (largest), E (smallest)', '']
    """
    return [", ".join(f"{contests.symbol(key)} ({side})" for key, side in one.items()) for one in found]


def remarks(best: pd.DataFrame, found: Sequence[Mapping[str, str]]) -> list[str]:
    """One sentence for every case and setting that is best at an end."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for (_, row), one in zip(best.iterrows(), found, strict=True):
        for key, side in one.items():
            seen.setdefault((row["case"], key, side), []).append(contests.shown(row[key]))
    conditions = best.groupby("case", sort=False).size()
    sentences = []
    for (case, key, side), values in seen.items():
        often = f" under {len(values)} of {conditions[case]} conditions" if conditions[case] > 1 else ""
        value = ", ".join(dict.fromkeys(values))
        sentences.append(
            f"the best {contests.symbol(key)} of {case} is the {side} that was tried ({value}){often}: "
            "a better one may lie beyond"
        )
    return sentences
