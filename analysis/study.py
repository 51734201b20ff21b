"""Runs that belong together, as two tables: everything that is shown of runs is a function of a `Study`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from analysis.study_records import NO_SPEC, Spec, Sweep
from fl_lightning.metrics.metric import kinds_in


@dataclass(frozen=True, eq=False)
class Study:
    """Runs that belong together; everything that is shown of runs is a function of one.

    Attributes:
        runs: One row per run; empty if there are none, then the remarks say why.
        measured: One row per run and round, with metrics alone.
        spec: What the study says about them.
        remarks: What a reader must know: runs that were left out, diverged, or still run.
        title: What to call them.
        name: Name of the study; empty without one.
        scale: Of the study.
        references: Runs that others are measured against; they take no part in comparisons.
        sweep: The sweep that made them.
        file: Finds what a run has left, by its id and the name of the file.
    """

    runs: pd.DataFrame
    measured: pd.DataFrame
    spec: Spec = NO_SPEC
    remarks: tuple[str, ...] = ()
    title: str = ""
    name: str = ""
    scale: str = ""
    references: pd.DataFrame | None = None
    sweep: Sweep | None = None
    file: Callable[[str, str], Path | None] = lambda *_: None

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per run and round, with all settings."""
        further = [name for name in self.runs if name not in self.measured and name not in ("rounds", "best_GA")]
        measured = self.measured
        if "rounds" in self.runs:  # a study's rule may have had enough of a run that another study takes further
            last = self.runs.set_index("run_id")["rounds"]
            measured = measured.loc[measured["round"].le(measured["run_id"].map(last).astype(float))]
        return self.runs[["run_id", *further]].merge(measured, on="run_id", how="inner", validate="one_to_many")

    @property
    def settings(self) -> pd.DataFrame:
        """The columns of the runs that were not measured: settings, tags, names."""
        return self.runs[[name for name in self.runs if name == "run_id" or name not in self.measured]]

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Levels of GA that the reader or the study asks about, or as `compare` does."""
        return self.spec.thresholds or (0.8,)

    def asked(self, levels: Sequence[float]) -> "Study":
        """With other levels of GA."""
        return replace(self, spec=replace(self.spec, thresholds=tuple(levels)))

    def of(self, runs: pd.DataFrame) -> "Study":
        """The same study with some of its runs, perhaps with further columns."""
        return replace(self, runs=runs)

    def only(self, *cases: str) -> "Study":
        """These cases alone."""
        return self.of(self.runs.loc[self.runs["case"].isin(cases)].reset_index(drop=True))

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

    @property
    def has_final_rounds(self) -> bool:
        """Whether a run has ended in a posterior."""
        return any(self.measures(f"{kind}/NLL") for kind in kinds_in(map(str, self.runs)))
