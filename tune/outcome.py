"""What the runs of a cell have shown, and which cell of a contest is the best."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fl_lightning.config import RunConfig
from fl_lightning.direction import sign
from fl_lightning.errors import unknown
from fl_lightning.runs.folder import Result, ended
from fl_lightning.stopping import ALWAYS
from tune import best
from tune.averages import arrival, mean_and_deviation
from tune.edges import edges, space_of
from tune.grid import Cell
from tune.study import Study

# Accuracies are shown in percent.
PERCENT = frozenset({"GA", "LA", best.VALIDATION})
# The column of settings that are best at an end of what was tried: a better one may lie beyond.
EDGE = "at the edge"
UNKNOWN = "-"


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
    def tried(self) -> best.Tried:
        """What the rule for the best looks at."""
        diverged = sum(result.status == "diverged" for _, result in self.runs)
        return best.Tried(self.values, diverged, sign(self.metric))


def outcome_of(cell: Cell, out: Path, study: Study) -> CellOutcome:
    """Read what the runs of a cell have left."""
    found = [(config, ended(config, out, study.stop)) for config in cell.configs]
    return CellOutcome(cell, study.metric, [(config, result) for config, result in found if result])


def measured(metrics: Mapping[str, float], metric: str) -> float:
    """The value of a metric, NaN in a round that was not measured, or an error that names the nearest one."""
    if metric not in metrics and ALWAYS in metrics:
        raise unknown("metric", metric, metrics)
    return metrics.get(metric, math.nan)


def best_of(outcomes: Iterable[CellOutcome]) -> list[CellOutcome]:
    """The best cell of every contest; see `tune.best`.

    Fresh seeds choose nothing; where none but they have so many rounds, they are of the setting that was chosen before.
    """
    contests: dict[Any, list[CellOutcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.cell.confirms):
        mine = contests.setdefault(outcome.cell.contest, [])
        if not (outcome.cell.confirms and mine):
            mine.append(outcome)
    found = [(mine, best.best([one.tried for one in mine])) for mine in contests.values()]
    return [mine[number] for mine, number in found if number is not None]


def rows(outcomes: Sequence[CellOutcome], study: Study) -> list[dict[str, str]]:
    """The table of a sweep: the best setting of every case in every environment, also on fresh seeds if it has some."""
    table = []
    varied = {key for outcome in outcomes for key in outcome.cell.environment}
    tuned = list(dict.fromkeys(key for outcome in outcomes for key in outcome.cell.point))
    lengths = {outcome.cell.config.federation.rounds for outcome in outcomes}
    measured_in = [set(result.final) for outcome in outcomes for result in outcome.good]
    probed = [metric for metric in ("AE", "LF") if measured_in and all(metric in names for names in measured_in)]
    confirming = {outcome.cell.contest: outcome for outcome in outcomes if outcome.cell.confirms}
    for outcome in best_of(outcomes):
        cell = outcome.cell
        shown = confirming.get(cell.contest, outcome)  # everything but the choice itself is of the fresh seeds
        chose = [] if cell.confirms else outcome.good
        row = {key: _short(cell.environment.get(key, "")) for key in sorted(varied)}
        row["case"] = cell.case
        if len(lengths) > 1 and best.ROUNDS not in tuned:
            row["rounds"] = str(cell.config.federation.rounds)
        row |= {key: _short(cell.point.get(key, "")) for key in tuned}
        if tuned:
            at_edge = edges(cell.point, space_of(study, cell.case))
            row[EDGE] = ", ".join(f"{key} ({side})" for key, side in at_edge.items())
        for metric in dict.fromkeys((study.metric, "GA", "LA", *probed)):
            if confirming and metric == _reported(study.metric):
                row |= _confirmed(metric, chose, confirming.get(cell.contest))
            else:
                row[_title(metric)] = _mean(chose if metric == study.metric else shown.good, metric)
        histories = [result.history for _, result in shown.runs]
        for threshold in study.thresholds:
            row[f"rounds to {threshold:.0%}"] = arrival(histories, threshold, ".2f")
        row["runs"] = "" if cell.confirms else _counted(outcome)
        if confirming:
            row["confirming"] = _counted(confirming[cell.contest]) if cell.contest in confirming else ""
        table.append(row)
    # Columns that would say nothing: of a study that goes on with fresh seeds alone, no length has both kinds of seeds.
    columns = (EDGE, best.OPTIMISM_POINTS, best.OPTIMISM)
    silent = [key for key in columns if all(row.get(key, UNKNOWN) in ("", UNKNOWN) for row in table)]
    return [{key: cell for key, cell in row.items() if key not in silent} for row in table]


def protocol_of(outcomes: Sequence[CellOutcome], study: Study) -> str:
    """How the numbers of the table came about; empty if there was nothing to choose from."""
    contests = [outcome.cell.contest for outcome in outcomes if not outcome.cell.confirms]
    if len(set(contests)) == len(contests) and study.confirm is None:
        return ""
    fewer = any(case.confirming for case in study.cases)
    return best.protocol(study.metric, study.seeds, study.confirm.seeds if study.confirm else (), fewer)


def _confirmed(metric: str, chose: Sequence[Result], confirming: CellOutcome | None) -> dict[str, str]:
    """The same setting on seeds that had no part in choosing it, and how much too good the choice looked."""
    fresh = confirming.good if confirming is not None else []
    means = [fmean(result.final[metric] for result in results) for results in (chose, fresh) if results]
    percent = metric in PERCENT
    optimism = means[0] - means[1] if len(means) == 2 else None
    name = best.OPTIMISM_POINTS if percent else best.OPTIMISM
    return {
        f"chosen {_title(metric)}": _mean(chose, metric),
        f"confirmed {_title(metric)}": _mean(fresh, metric),
        name: UNKNOWN if optimism is None else f"{100 * optimism:+.2f}" if percent else f"{optimism:+.3g}",
    }


def _reported(metric: str) -> str:
    """What is shown of fresh seeds: never the validation data, which only serve to choose."""
    return "GA" if metric == best.VALIDATION else metric


def _title(metric: str) -> str:
    return f"{metric} (%)" if metric in PERCENT else metric


def _mean(results: Sequence[Result], metric: str) -> str:
    percent = metric in PERCENT
    values = [result.final[metric] * (100 if percent else 1) for result in results if metric in result.final]
    return mean_and_deviation(values, ".2f" if percent else ".3g")


def _counted(outcome: CellOutcome) -> str:
    ended, seeds = len(outcome.runs), len(outcome.cell.seeds)
    diverged = ended - len(outcome.good)
    missing = f" of {seeds}" if ended < seeds else ""
    return f"{ended}{missing}" + (f", {diverged} diverged" if diverged else "")


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
