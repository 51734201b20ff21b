"""The store in parts that can be looked at by themselves: every study at every scale, and the runs without a study."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from analysis import arrays
from analysis.columns import narrow
from analysis.runs import REFERENCE, NoRuns, Place, Runs
from analysis.sweeps import Sweep
from fl_lightning.uncertainty.kinds import kinds_in

WITHOUT = "runs without a study"


@dataclass(frozen=True, eq=False)
class Part:
    """Runs that belong together, and what can be read about them; everything is read when it is first asked for.

    Attributes:
        store: Where they are.
        title: What to call them.
        study: Name of their study; empty without one.
        scale: Of the study.
        runs: One row per run; empty if there are none, then its remarks say why.
        references: Runs that others are measured against; they take no part in comparisons.
        levels: Of GA, if others are asked about than the study says.
    """

    store: Runs
    title: str
    study: str
    scale: str
    runs: pd.DataFrame
    references: pd.DataFrame
    levels: tuple[float, ...] = ()

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per run and round."""
        return self.store.rounds(self.runs)

    @cached_property
    def ridges(self) -> pd.DataFrame:
        """Accuracy along the ridge between two clients, where it was probed."""
        return arrays.ridges(self.store, self.runs)

    @cached_property
    def trust(self) -> pd.DataFrame:
        """Curves of calibration, where a run has had a final round."""
        return arrays.trust(self.store, self.runs.loc[self.runs["ended"]])

    @property
    def has_final_rounds(self) -> bool:
        """Whether a run has ended in a posterior."""
        return any(self.measures(f"{kind}/NLL") for kind in kinds_in(map(str, self.runs)))

    @cached_property
    def sweep(self) -> Sweep | None:
        """The sweep that made them."""
        return self.store.sweep(self.study, self.scale) if self.study else None

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Levels of GA that somebody asks about: whoever reads, or the study, or as `compare` does."""
        return self.levels or tuple((self.sweep.content.get("thresholds") if self.sweep else None) or (0.8,))

    def asked(self, levels: tuple[float, ...]) -> "Part":
        """With other levels of GA."""
        return replace(self, levels=levels)

    def only(self, *cases: str) -> "Part":
        """These cases alone."""
        runs = self.runs.loc[self.runs["case"].isin(cases)].reset_index(drop=True)
        runs.attrs.update(self.runs.attrs)
        return replace(self, runs=runs)

    def varies(self, *keys: str) -> bool:
        """Whether all these settings differ between the runs."""
        return all(key in self.runs and self.runs[key].nunique() > 1 for key in keys)

    def measures(self, metric: str) -> bool:
        """Whether a run has this number."""
        return metric in self.runs and bool(self.runs[metric].notna().any())

    @cached_property
    def lasts(self) -> bool:
        """Whether there is more than one round."""
        return bool(len(self.rounds)) and bool(self.rounds["round"].max() > 1)

    @cached_property
    def has_curvatures(self) -> bool:
        """Whether forms of curvature are compared: of the cases, no two have the same one, evaluated alike."""
        if not self.varies("method.curvature_form"):
            return bool(len(self.ridges))
        named = self.runs.dropna(subset="method.curvature_form")  # other methods have none
        forms = [key for key in ("method.curvature_form", "method.curvature") if key in named]
        return bool(named.groupby(forms, dropna=False)["case"].nunique().max() == 1)


def parts(
    store: Place | Runs = None,
    study: str | None = None,
    scale: str | None = None,
    where: Mapping[str, Any] | None = None,
) -> Iterator[Part]:
    """The parts of a store.

    Args:
        store: Folder of runs, database file or MLflow URI, or `Runs`.
        study: Only this one; if the store has no runs of it, one empty part says so.
        scale: Only this one.
        where: Only runs with these values of columns; a part without any is empty and says so.

    Raises:
        UserError: If there is no store, no run in it, or no such study or column.
    """
    runs = store if isinstance(store, Runs) else Runs(store)
    if study is None:
        if not len(runs.table):
            raise NoRuns(f"{runs.store.place} holds no runs yet; make some with `fl-lightning demo`")
        if where:
            runs.load(where=where)  # or every part would say for itself that it has no such runs, or no such column
        for name in runs.studies:
            yield from _of_study(runs, name, None, where)
        yield from _without_study(runs, where)
    elif study in runs.studies:
        yield from _of_study(runs, study, scale, where)
    else:
        yield _part(runs, study, "", "", runs.load(study, where, absent="empty"))


def _of_study(runs: Runs, study: str, scale: str | None, where: Mapping[str, Any] | None) -> Iterator[Part]:
    for size in runs.studies[study] if scale is None else [scale]:
        title = study if size == "all" else f"{study}, scale {size}"
        yield _part(runs, title, study, size, runs.load(study, where, scale=size, absent="empty"))


def _without_study(runs: Runs, where: Mapping[str, Any] | None) -> Iterator[Part]:
    alone = runs.table.loc[runs.table["study"].isna()]
    for name, value in (where or {}).items():
        alone = narrow(alone, name, value)
    # Accuracies on different data, or of different models, do not belong into one picture.
    problems = list(alone[["data", "model"]].drop_duplicates().itertuples(index=False))
    for data, model in problems:
        title = f"{WITHOUT}: {data}, {model}" if len(problems) > 1 else WITHOUT
        mine = {**(where or {}), "study": None, "data": data, "model": model}
        yield _part(runs, title, "", "", runs.load(where=mine))


def _part(store: Runs, title: str, study: str, scale: str, table: pd.DataFrame) -> Part:
    is_reference = table["case"].eq(REFERENCE)
    runs = table.loc[~is_reference].reset_index(drop=True)
    runs.attrs.update(table.attrs)
    if is_reference.any():
        words = f"{is_reference.sum()} more runs are references that others are measured against"
        runs.attrs["remarks"] = [*table.attrs.get("remarks", ()), words]
    return Part(store, title, study, scale, runs, table.loc[is_reference])
