"""What the runs of a cell have shown, and which cell of a contest is the best."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fl_lightning.config import RunConfig
from fl_lightning.errors import unknown
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.folder import Result
from tune.comparison import rounds_to
from tune.edges import edges, space_of
from tune.grid import Cell
from tune.study import Stop, Study

# The column of settings that are best at an end of what was tried: a better one may lie beyond.
EDGE = "at the edge"


class CellOutcome(NamedTuple):
    """A cell and its runs.

    Attributes:
        cell: The setting.
        metric: The study's metric.
        runs: Those that have ended, with how.
    """

    cell: Cell
    metric: str
    runs: list[tuple[RunConfig, Result]]

    @property
    def good(self) -> list[Result]:
        """How the runs ended that did not diverge."""
        return [result for _, result in self.runs if result.status != "diverged" and result.history]

    @property
    def values(self) -> list[float]:
        """The metric after the last round of each of them."""
        return [measured(result.final, self.metric) for result in self.good]

    @property
    def mean(self) -> float:
        """Over seeds; a setting that diverged for some seed is worth nothing."""
        complete = len(self.values) == len(self.cell.seeds)
        return fmean(self.values) if complete else float("-inf")


def outcome_of(cell: Cell, out: Path, study: Study) -> CellOutcome:
    """Read what the runs of a cell have left."""
    found = [(config, ended(config, out, study.stop)) for config in cell.configs]
    return CellOutcome(cell, study.metric, [(config, result) for config, result in found if result])


def ended(config: RunConfig, out: Path, stop: Stop | None) -> Result | None:
    """How a run ended, by itself or by the study's rule; None if a part of it is missing.

    What a scheduler has stopped is no result. What another study has computed beyond this one's rule does not count.
    """
    result = run_folder.latest(config, out)
    if result is not None and stop is not None:
        enough = stop.enough([measured(measurement.metrics, stop.metric) for measurement in result.history])
        if enough is not None:
            return replace(result, history=result.history[:enough])
    return None if result is None or result.status == "stopped" else result


def measured(metrics: Mapping[str, float], metric: str) -> float:
    """The value of a metric, or an error that names the nearest one."""
    if metric not in metrics:
        raise unknown("metric", metric, metrics)
    return metrics[metric]


def best_of(outcomes: Iterable[CellOutcome]) -> list[CellOutcome]:
    """The best cell of every contest, by the mean over seeds; the earlier one where two are equal."""
    best: dict[Any, CellOutcome] = {}
    for outcome in outcomes:
        group = (*outcome.cell.group, outcome.cell.config.federation.rounds)
        if outcome.values and (group not in best or outcome.mean > best[group].mean):
            best[group] = outcome
    return list(best.values())


def rows(outcomes: Sequence[CellOutcome], study: Study) -> list[dict[str, str]]:
    """The table of a sweep: the best setting of every case in every environment."""
    table = []
    varied = {key for outcome in outcomes for key in outcome.cell.environment}
    tuned = list(dict.fromkeys(key for outcome in outcomes for key in outcome.cell.point))
    lengths = {outcome.cell.config.federation.rounds for outcome in outcomes}
    measured_in = [set(result.final) for outcome in outcomes for result in outcome.good]
    probed = [metric for metric in ("AE", "LF") if measured_in and all(metric in names for names in measured_in)]
    for outcome in best_of(outcomes):
        cell = outcome.cell
        row = {key: _short(cell.environment.get(key, "")) for key in sorted(varied)}
        row["case"] = cell.case
        if len(lengths) > 1:
            row["rounds"] = str(cell.config.federation.rounds)
        row |= {key: _short(cell.point.get(key, "")) for key in tuned}
        if tuned:
            at_edge = edges(cell.point, space_of(study, cell.case))
            row[EDGE] = ", ".join(f"{key} ({side})" for key, side in at_edge.items())
        ended, everything = outcome.good, [result for _, result in outcome.runs]
        for metric in dict.fromkeys((study.metric, "GA", "LA", *probed)):
            percent = metric in ("GA", "LA")
            values = [result.final[metric] * (100 if percent else 1) for result in ended]
            row[f"{metric} (%)" if percent else metric] = _spread(values, ".2f" if percent else ".3g")
        for threshold in study.thresholds:
            reached = [rounds_to(result.history, threshold) for result in everything]
            arrived = [number for number in reached if number is not None]
            share = f" ({len(arrived)}/{len(reached)})" if 0 < len(arrived) < len(reached) else ""
            row[f"rounds to {threshold:.0%}"] = (_spread(arrived) if arrived else "never") + share
        missing = f" of {len(cell.seeds)}" if len(everything) < len(cell.seeds) else ""
        diverged = len(everything) - len(ended)
        row["runs"] = f"{len(everything)}{missing}" + (f", {diverged} diverged" if diverged else "")
        table.append(row)
    if not any(row.get(EDGE) for row in table):
        return [{key: cell for key, cell in row.items() if key != EDGE} for row in table]
    return table


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _spread(values: Sequence[float], digits: str = ".2f") -> str:
    if not values:
        return "-"
    return f"{fmean(values):{digits}}" + (f" ± {stdev(values):{digits}}" if len(values) > 1 else "")
