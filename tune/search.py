"""A fair search: Optuna and ASHA, each case and environment on its own and all with the same budget."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.system.atomic import write_atomically
from tune.grid import Cell, cell_of, environments
from tune.study import Case, Range, Study

VALUE = "value"


class FairSearch(Searcher):
    """Asks one searcher per case and environment in turn, until each has made its number of proposals.

    Proposals are written down. After a restart they are proposed again first: their runs are only read, and the
    searchers learn what they knew.

    Args:
        study: What is searched.
        memory: The file of the proposals.
        is_new: Whether nothing is known of a run.
    """

    def __init__(self, study: Study, memory: Path, is_new: Callable[[RunConfig], bool]) -> None:
        super().__init__(metric=VALUE, mode="max")
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # or it logs every study it creates
        self._memory, self._samples, self._is_new = memory, study.search.samples or 0, is_new
        self.proposed: list[Cell] = []
        self.new: list[RunConfig] = []
        self._searches = [
            _CaseSearch(study, case, environment, number)
            for number, (environment, case) in enumerate(
                (environment, case) for environment in environments(study) for case in study.cases
            )
        ]
        self.examples = [search.example for search in self._searches]
        self._remembered: dict[str, list[dict[str, Any]]] = (
            json.loads(memory.read_text(encoding="utf-8"))
            if memory.exists()
            else {search.name: [] for search in self._searches}
        )
        for search in self._searches:
            search.begin(self._remembered[search.name])
        self._owner: dict[str, _CaseSearch] = {}

    @property
    def budget(self) -> int:
        """Settings that are tried in all."""
        return self._samples * len(self._searches)

    @property
    def rounds(self) -> int:
        """Rounds of the longest run."""
        return max(config.federation.rounds for config in self.examples)

    def suggest(self, trial_id: str) -> Any:
        open_ones = [search for search in self._searches if len(search.points) < self._samples]
        if not open_ones:
            return str(Searcher.FINISHED)
        search = min(open_ones, key=lambda one: len(one.points))
        cell = search.propose(trial_id)
        self._owner[trial_id] = search
        self.proposed.append(cell)
        self.new += filter(self._is_new, cell.configs)
        points = search.points
        if len(points) > len(self._remembered[search.name]):
            self._remembered[search.name] = list(points)
            write_atomically(self._memory, json.dumps(self._remembered).encode())
        settings = [config.flat() for config in cell.configs]
        described = {"case": cell.case, "point": {**cell.environment, **cell.point}}
        return {"settings": settings, "comparison": search.name, "number": len(points), **described}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if not math.isnan(result[VALUE]):  # not measured yet
            self._owner[trial_id].searcher.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        failed = error or not result or bool(result.get("failures"))
        self._owner[trial_id].searcher.on_trial_complete(trial_id, result=None if failed else result, error=failed)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the proposals are written down already."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: a restarted sweep begins with the proposals that are written down."""


class _CaseSearch:
    """One case in one environment, with a searcher of its own."""

    def __init__(self, study: Study, case: Case, environment: Mapping[str, Any], number: int) -> None:
        self.name = f"{case.label} {json.dumps(dict(environment), sort_keys=True, default=str)}"
        self.points: list[dict[str, Any]] = []
        self._study, self._case, self._environment, self._seed = study, case, environment, number
        self._space = {**study.space, **case.space}
        example = {key: values.values[0] for key, values in self._space.items()}
        self.example = cell_of(study, case, environment, example).config

    def begin(self, remembered: Sequence[dict[str, Any]]) -> None:
        """Start the search, with what was proposed before."""
        # Optuna takes no lists as values of a setting, so it chooses their numbers.
        known = [{key: _coded(self._space[key], value) for key, value in point.items()} for point in remembered]
        space = {key: _distribution(values) for key, values in self._space.items()}
        # What was proposed before draws nothing, so with the same seed the first draws would be made again.
        seed = self._seed + 10_000 * len(known)
        self.searcher = OptunaSearch(space=space, metric=VALUE, mode="max", points_to_evaluate=known, seed=seed)

    def propose(self, trial_id: str) -> Cell:
        """The next setting."""
        coded = self.searcher.suggest(trial_id)
        if not isinstance(coded, dict):
            raise UserError(f"Optuna has no more proposals for {self.name}; lower search.samples")
        self.points.append({key: _decoded(self._space[key], value) for key, value in coded.items()})
        return cell_of(self._study, self._case, self._environment, self.points[-1])


class FairAsha(FIFOScheduler):
    """ASHA that compares settings within the same case and environment alone.

    What it has stopped is written down. ASHA takes settings as they come, which is never quite the same order, so
    after a restart it would have some of them go on.
    """

    def __init__(self, study: Study, rounds: int, memory: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._study, self._rounds, self._memory = study, rounds, memory
        self._schedulers: dict[str, ASHAScheduler] = {}
        self._stops: dict[str, int] = json.loads(memory.read_text(encoding="utf-8")) if memory.exists() else {}

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        self._scheduler_of(trial).on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        ended = result["rounds"] >= trial.config["settings"][0]["federation.rounds"]
        if ended or result.get("done") or result.get("failures") or math.isnan(result[VALUE]):
            return str(TrialScheduler.CONTINUE)  # it would be stopped just before its end, or before it was measured
        name = f"{trial.config['comparison']} {trial.config['number']}"
        if result[VALUE] == float("-inf"):  # diverged: ASHA compares finite numbers
            return str(TrialScheduler.STOP)
        verdict = str(self._scheduler_of(trial).on_trial_result(tune_controller, trial, result))
        if verdict == TrialScheduler.STOP and name not in self._stops:
            self._stops[name] = result["rounds"]
            write_atomically(self._memory, json.dumps(self._stops).encode())
        if name in self._stops:
            return str(TrialScheduler.STOP if result["rounds"] >= self._stops[name] else TrialScheduler.CONTINUE)
        return verdict

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if result[VALUE] > float("-inf"):
            self._scheduler_of(trial).on_trial_complete(tune_controller, trial, result)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        self._scheduler_of(trial).on_trial_remove(tune_controller, trial)

    def _scheduler_of(self, trial: Any) -> ASHAScheduler:
        comparison = trial.config["comparison"]
        if comparison not in self._schedulers:
            self._schedulers[comparison] = ASHAScheduler(
                time_attr="rounds",
                metric=VALUE,
                mode="max",
                max_t=self._rounds,
                grace_period=min(self._study.search.grace, self._rounds),
                reduction_factor=self._study.search.reduction,
                stop_last_trials=False,
            )
        return self._schedulers[comparison]


def _distribution(values: Range) -> BaseDistribution:
    if values.kind in ("uniform", "loguniform"):
        low, high = values.values
        return FloatDistribution(low, high, log=values.kind == "loguniform")
    return CategoricalDistribution(list(range(len(values.values))))


def _coded(values: Range, value: Any) -> Any:
    return value if values.kind in ("uniform", "loguniform") else list(values.values).index(value)


def _decoded(values: Range, value: Any) -> Any:
    return value if values.kind in ("uniform", "loguniform") else values.values[value]
