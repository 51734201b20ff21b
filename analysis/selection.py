"""All runs of a place, taken apart: every study at every scale, and the runs without a study."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from analysis.columns import narrow
from analysis.runs import NoRuns, Place, Runs, Study

WITHOUT = "runs without a study"


def parts(
    place: Place | Runs = None,
    study: str | None = None,
    scale: str | None = None,
    where: Mapping[str, Any] | None = None,
) -> Iterator[Study]:
    """The studies of a place.

    Args:
        place: Folder of runs or MLflow URI, or `Runs`.
        study: Only this one; without runs of it, one empty study says so.
        scale: Only this one.
        where: Only runs with these values of columns; a study without any is empty and says so.

    Raises:
        UserError: If there is no such place, no run in it, or no such study or column.
    """
    runs = place if isinstance(place, Runs) else Runs(place)
    if study is None:
        if not len(runs.table):
            raise NoRuns(f"{runs.source.place} holds no runs yet; make some with `fl-lightning demo`")
        if where:
            runs.load(where=where)  # or every study would say for itself that it has no such runs, or no such column
        for name in runs.studies:
            yield from _of_study(runs, name, None, where)
        yield from _without_study(runs, where)
    elif study in runs.studies:
        yield from _of_study(runs, study, scale, where)
    else:
        yield runs.load(study, where, absent="empty")


def _of_study(runs: Runs, study: str, scale: str | None, where: Mapping[str, Any] | None) -> Iterator[Study]:
    for size in runs.studies[study] if scale is None else [scale]:
        yield runs.load(study, where, scale=size, absent="empty")


def _without_study(runs: Runs, where: Mapping[str, Any] | None) -> Iterator[Study]:
    alone = runs.table.loc[runs.table["study"].isna()]
    for name, value in (where or {}).items():
        alone = narrow(alone, name, value)
    # Accuracies on different data, or of different models, do not belong into one picture.
    problems = list(alone[["data", "model"]].drop_duplicates().itertuples(index=False))
    for data, model in problems:
        title = f"{WITHOUT}: {data}, {model}" if len(problems) > 1 else WITHOUT
        mine = {**(where or {}), "study": None, "data": data, "model": model}
        yield replace(runs.load(where=mine), title=title)
