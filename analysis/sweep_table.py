"""The table that a sweep and a comparison print, of the columns of `analysis.tables`.

It needs what the sweep knows beside its runs: seeds that are missing, and what was tried.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.comparisons import shown
from analysis.formats import HIDDEN, aligned
from analysis.tables import arrival_columns, mean_columns
from fl_lightning.metrics.metric import GA, LA, PERCENT, VALIDATION
from fl_lightning.runs.folder import Result
from tune.best import OPTIMISM, OPTIMISM_POINTS, ROUNDS
from tune.boundary import edges, space_of
from tune.outcome import CellOutcome, best_of, protocol_of
from tune.study import Study

# Of percentages and rounds.
DIGITS = 2


def best_settings(outcomes: Sequence[CellOutcome], study: Study) -> str:
    """The table as Markdown, and how its numbers came about; empty without a run."""
    table, protocol = sweep_table(outcomes, study), protocol_of(outcomes, study)
    text = aligned(table, "std", markdown=True, digits=DIGITS) if len(table) else ""
    return f"{text}\n\n{protocol[0].upper()}{protocol[1:]}.\n" if text and protocol else text


def sweep_table(outcomes: Sequence[CellOutcome], study: Study) -> pd.DataFrame:
    """The best setting of every case in every environment, also on fresh seeds if it has some."""
    environment = sorted({key for outcome in outcomes for key in outcome.cell.environment})
    tuned = list(dict.fromkeys(key for outcome in outcomes for key in outcome.cell.point))
    lengths = {outcome.cell.config.federation.rounds for outcome in outcomes}
    finals = [result.final for outcome in outcomes for result in outcome.good]
    probed = [metric for metric in ("AE", "LF") if finals and all(metric in final for final in finals)]
    confirming = {outcome.cell.comparison: outcome for outcome in outcomes if outcome.cell.confirms}
    rows = []
    for outcome in _shown(outcomes):
        cell, fresh = outcome.cell, confirming.get(outcome.cell.comparison)
        reported = fresh or outcome  # everything but the choice itself is of the fresh seeds
        chose = [] if cell.confirms else outcome.good
        row: dict[str, Any] = {key: shown(cell.environment.get(key, "")) for key in environment}
        row["case"] = cell.case
        if len(lengths) > 1 and ROUNDS not in tuned:
            row["rounds"] = str(cell.config.federation.rounds)
        row |= {key: shown(cell.point.get(key, "")) for key in tuned}
        at_edge = edges(cell.point, space_of(study, cell.case))
        row["at the edge"] = ", ".join(f"{key} ({side})" for key, side in at_edge.items())
        for metric in dict.fromkeys((study.metric, GA, LA, *probed)):
            if confirming and metric == _reported(study.metric):
                row |= _confirmed(metric, chose, fresh.good if fresh else [])
            else:
                row |= _spread("", metric, chose if metric == study.metric else reported.good)
        for threshold in study.thresholds:
            row |= _arrival(reported, threshold)
        row["runs"] = "" if cell.confirms else _counted(outcome)
        row["confirming"] = _counted(fresh) if fresh else ""
        rows.append({**row, HIDDEN: len(reported.runs)})
    return pd.DataFrame(rows)


def _shown(outcomes: Sequence[CellOutcome]) -> list[CellOutcome]:
    """The best of every comparison; where there is nothing to choose, also a case all of whose runs diverged."""
    comparisons = {outcome.cell.comparison for outcome in outcomes}
    return best_of(outcomes) if len(comparisons) < len(outcomes) else [one for one in outcomes if one.runs]


def _spread(kind: str, metric: str, results: Sequence[Result]) -> dict[str, float]:
    """Mean and standard deviation over the runs that have measured it."""
    name, scale = (f"{kind}{metric} (%)", 100) if metric in PERCENT else (f"{kind}{metric}", 1)
    values = [scale * result.final[metric] for result in results if metric in result.final]
    return mean_columns(name, pd.Series(values, dtype=float))


def _confirmed(metric: str, chose: Sequence[Result], fresh: Sequence[Result]) -> dict[str, float | None]:
    """The same setting on seeds that had no part in choosing it, and how much too good the choice looked."""
    columns = {**_spread("chosen ", metric, chose), **_spread("confirmed ", metric, fresh)}
    chosen, _, confirmed, _ = columns.values()
    # None where no length has both kinds of seeds: a column of it alone is not shown.
    optimism = chosen - confirmed if chose and fresh else None
    return {**columns, OPTIMISM_POINTS if metric in PERCENT else OPTIMISM: optimism}


def _reported(metric: str) -> str:
    """What is shown of fresh seeds: never the validation data, which only serve to choose."""
    return GA if metric == VALIDATION else metric


def _arrival(outcome: CellOutcome, threshold: float) -> dict[str, float]:
    """In which round runs reach a level of GA, and how many of them do."""
    curves = [[one.metrics.get(GA, 0.0) for one in result.history] for _, result in outcome.runs]
    firsts = [next((i for i, value in enumerate(curve, start=1) if value >= threshold), None) for curve in curves]
    return arrival_columns(threshold, pd.Series([first for first in firsts if first is not None], dtype=float))


def _counted(outcome: CellOutcome) -> str:
    ended, seeds = len(outcome.runs), len(outcome.cell.seeds)
    diverged = ended - len(outcome.good)
    missing = f" of {seeds}" if ended < seeds else ""
    return f"{ended}{missing}" + (f", {diverged} diverged" if diverged else "")
