"""Runs that this process has seen end, as the tables of `analysis.runs`: nothing is read from a store."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from analysis.columns import hashable
from fl_lightning.config import RunConfig
from fl_lightning.runs.folder import Result
from fl_lightning.runs.palette import DISPLAY


def rounds(runs: Iterable[tuple[str, RunConfig, Result]]) -> pd.DataFrame:
    """One row per run and round, with all settings.

    Args:
        runs: What each is called, its settings, and how it ended.
    """
    rows: list[dict[str, Any]] = []
    for case, config, result in runs:
        settings = {key: hashable(value) for key, value in config.flat().items()}
        ending = {"status": result.status, "ended": result.status != "diverged"}
        known = {**settings, "case": DISPLAY.get(case, case), "run_id": result.run_id, **ending}
        rows += [{**known, "round": i, **m.metrics} for i, m in enumerate(result.history, start=1)]
    return pd.DataFrame(rows)
