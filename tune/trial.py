"""The Ray Tune trial: a pack of runs, or the seeds of one setting that a searcher has proposed."""

import os
import pickle
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import fl_lightning  # noqa: F401 - its remedies come before anything that imports torchvision
from fl_lightning.engines.parallel.executor import Workers
from fl_lightning.engines.parallel.pool import Pool
from fl_lightning.engines.parallel.ray_session import enrol
from fl_lightning.runs.config.run_config import build
from fl_lightning.runs.identity import identity
from tune.work import (
    Compact,
    Instructions,
    Status,
    TrialStatus,
    Watch,
    expand,
    one_after_the_other,
    side_by_side,
)

import ray.tune  # isort: skip
from ray.exceptions import RayTaskError  # isort: skip

# A report costs about 3 ms.
REPORT_EVERY_SECONDS = 1.0

Settings = Mapping[str, Any]


class Trial(ray.tune.Trainable):
    """Computes its runs step by step. It keeps no state: after a failure it reads what the runs have left.

    So Ray saves no checkpoint of it.
    """

    _status: TrialStatus
    _work: Generator[TrialStatus, None, None] | None = None
    _by_round: bool
    _pool: Pool | None = None

    def setup(
        self, config: dict[str, Any], packs: Sequence[Compact] = (), instructions: Instructions | None = None
    ) -> None:
        """Ray starts a process here; `reset_config` gives it its next work."""
        enrol(os.getpid())
        assert instructions is not None
        workers = instructions.options.workers
        if isinstance(workers, Workers) and isinstance(workers.number, int) and workers.number > 1:
            self._pool = Pool(workers.number, workers.resources)  # in the placement group of this trial
            instructions = instructions.with_workers(self._pool)
        self._packs, self._instructions = packs, instructions
        self._start(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._start(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Go on for about a second, or for one round if a scheduler compares after every round."""
        start = time.monotonic()
        ended = True
        for status in self._work or ():
            self._status = status
            if self._by_round or time.monotonic() - start > REPORT_EVERY_SECONDS:
                ended = False
                break
        return {**self._status._asdict(), "failures": dict(self._status.failures), "done": ended}

    def cleanup(self) -> None:
        """Ray has ended the trial: its unfinished runs are recorded as stopped."""
        self._close()
        if self._pool is not None:
            self._pool.close()

    def _start(self, config: dict[str, Any]) -> None:
        self._close()
        self._status, self._by_round = TrialStatus(), "settings" in config
        if self._by_round:
            configs = [build(settings) for settings in config["settings"]]
            instructions = self._instructions._replace(
                tags={identity(one): {"case": config["case"]} for one in configs}
            )
            self._work = side_by_side(configs, instructions)
        else:
            self._work = one_after_the_other(expand(self._packs[config["pack"]]), self._instructions)

    def _close(self) -> None:
        if self._work is not None:
            self._work.close()


class Crash(NamedTuple):
    """A trial whose process has died.

    Attributes:
        trial: What it was given.
        reason: Why, in words.
    """

    trial: dict[str, Any]
    reason: str


class Reporter(ray.tune.Callback, ray.tune.Stopper):
    """Tells how far the trials are, and ends them all when a disk is full.

    Args:
        watch: Is shown how far they are.
        count: Of the runs that trials have finished, how many that makes, and of how many.
        failures: Takes the runs that could not be computed, with the reason.

    Attributes:
        crashes: Trials whose process has died.
        full: What could not be saved for want of room; empty as long as there is some.
    """

    def __init__(self, watch: Watch, count: Callable[[int], tuple[int, int]], failures: dict[str, str]) -> None:
        self._watch, self._count, self._failures = watch, count, failures
        self._finished: dict[str, int] = {}
        self._rounds: dict[str, int] = {}
        self._best = float("-inf")
        self._status = Status(*count(0), self._best)
        self.crashes: list[Crash] = []
        self.full = ""

    def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
        self._watch(self._status)  # nothing new, but the clock goes on

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any) -> None:
        # A trial that starts again after a failure counts its finished runs again.
        self._finished[trial.trial_id] = max(self._finished.get(trial.trial_id, 0), result["finished"])
        self._rounds[trial.trial_id] = max(self._rounds.get(trial.trial_id, 0), result["rounds"])
        self._best = max(self._best, result["best"])
        self._failures.update(result["failures"])
        self.full = self.full or result["full"]
        finished, total = self._count(sum(self._finished.values()))
        self._status = Status(finished, total, self._best, sum(self._rounds.values()))
        self._watch(self._status)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether one trial is to end before its work has."""
        return False

    def stop_all(self) -> bool:
        """Whether all are to end."""
        return bool(self.full)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.crashes.append(Crash(trial.config, _why(trial)))

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray saves it with the experiment; a progress line cannot be saved


def _why(trial: Any) -> str:
    """Why a trial has ended, from the file that Ray has just written; its text is many lines."""
    error = None
    with suppress(OSError, EOFError, TypeError):  # a full disk, or no file at all
        error = pickle.loads(Path(trial.pickled_error_file).read_bytes())
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    return (
        f"its process died {trial.num_failures} times (a segmentation fault of a plug-in, want of memory, a lost "
        "node); the same command tries it again"
    )
