"""What Ray reports of trials: how far they are, which runs have failed, and which trials have crashed."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray.tune
from ray.exceptions import RayTaskError

from tune.status import Crash, Status, Watch


class Reporter(ray.tune.Callback):
    """Shows how far the trials are.

    Args:
        watch: Is shown how far they are.
        count: Of the runs that trials have finished, how many that makes, and of how many.
        failures: Takes the runs that could not be computed, with the reason.
    """

    def __init__(self, watch: Watch, count: Callable[[int], tuple[int, int]], failures: dict[str, str]) -> None:
        self._watch, self._count, self._failures = watch, count, failures
        self._finished: dict[str, int] = {}
        self._rounds: dict[str, int] = {}
        self._best = float("-inf")
        self._status = Status(*count(0), self._best)
        self.crashes: list[Crash] = []

    def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
        self._watch(self._status)  # nothing new, but the clock goes on

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        # A trial that starts again after a failure counts its finished runs again.
        self._finished[trial.trial_id] = max(self._finished.get(trial.trial_id, 0), result["finished"])
        self._rounds[trial.trial_id] = max(self._rounds.get(trial.trial_id, 0), result["rounds"])
        self._best = max(self._best, result["best"])
        self._failures.update(result["failures"])
        finished, total = self._count(sum(self._finished.values()))
        self._status = Status(finished, total, self._best, sum(self._rounds.values()))
        self._watch(self._status)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.crashes.append(Crash(trial.config, _why(trial)))

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray saves it with the experiment; a progress line cannot be saved


def _why(trial: Any) -> str:
    """Why a trial has ended, from the file that Ray has just written; its text is many lines."""
    error = None
    with suppress(OSError, TypeError):  # a full disk, or no file at all
        error = pickle.loads(Path(trial.pickled_error_file).read_bytes())
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    return (
        f"its process died {trial.num_failures} times (a segmentation fault of a plug-in, lack of memory, a lost "
        "node); the same command tries it again"
    )
