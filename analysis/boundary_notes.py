"""Best settings at the edge of what was tried, in tables and sentences: a better one may lie beyond."""

from collections.abc import Mapping, Sequence

import pandas as pd

from analysis import comparisons
from analysis.runs import Study
from tune.boundary import Side, edges
from tune.study import Range


def at_edges(best: pd.DataFrame, study: Study) -> list[dict[str, Side]]:
    """For every row of `comparisons.best_of_grid`: which settings lie at which end.

    Args:
        best: The best settings.
        study: What they were chosen from; it says what was tried, or else the runs themselves do.
    """
    tuned = comparisons.tuned(study)
    found = []
    for _, row in best.iterrows():
        mine = study.runs.loc[study.runs["case"].eq(row["case"])]
        seen = {key: Range("grid", tuple(mine[key].dropna().unique())) for key in tuned}
        space = study.spec.spaces.get(row["case"], seen)
        chosen = {key: row[key] for key in space if key in row}
        found.append(edges(chosen, {key: space[key] for key in chosen}))
    return found


def in_cells(found: Sequence[Mapping[str, str]]) -> list[str]:
    """One cell for each row.

    >>> in_cells([{"training.lr": "largest", "training.epochs": "smallest"}, {}])
    ['lr (largest), E (smallest)', '']
    """
    return [", ".join(f"{comparisons.symbol(key)} ({side})" for key, side in one.items()) for one in found]


def remarks(best: pd.DataFrame, found: Sequence[Mapping[str, str]]) -> list[str]:
    """One sentence for every setting that is best at an end, with the cases that it is best for."""
    conditions = best.groupby("case", sort=False).size()
    sentences = []
    for key, side in dict.fromkeys(end for one in found for end in one.items()):
        cases: dict[str, list[str]] = {}
        for (_, row), one in zip(best.iterrows(), found, strict=True):
            if one.get(key) == side:
                cases.setdefault(row["case"], []).append(comparisons.shown(row[key]))
        each = ", ".join(_case(case, values, int(conditions[case])) for case, values in cases.items())
        sentences.append(
            f"the best {comparisons.symbol(key)} is the {side} that was tried for {each}: a better one may lie beyond"
        )
    return sentences


def _case(case: str, values: Sequence[str], conditions: int) -> str:
    """A case with its best values at the end."""
    often = f" under {len(values)} of {conditions} conditions" if conditions > 1 else ""
    return f"{case} ({', '.join(dict.fromkeys(values))}{often})"
