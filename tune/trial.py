"""The Ray Tune trial: a pack of runs, or the seeds of one setting that a searcher has proposed."""

import os
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import fl_lightning  # noqa: F401 - its remedies come before anything that imports torchvision
from fl_lightning.engines.parallel.executor import Workers
from fl_lightning.engines.parallel.pool import Pool
from fl_lightning.engines.parallel.ray_session import enrol
from fl_lightning.runs.config.run_config import build
from fl_lightning.runs.identity import identity
from fl_lightning.system import devices
from tune.packing import Compact, expand
from tune.work import Instructions, TrialStatus, one_after_the_other, side_by_side

import ray.tune  # isort: skip

# A report costs about 3 ms.
REPORT_EVERY_SECONDS = 1.0

Settings = Mapping[str, Any]


class Trial(ray.tune.Trainable):
    """Computes its runs step by step. It keeps no state: after a failure it reads what the runs have left."""

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
        elif isinstance(workers, Workers) and workers.resources.gpu:
            devices.hold_to(workers.resources.gpu)
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

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Nothing: every round is saved already, in the files of its run."""
        return {}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Nothing: the next process reads what the runs have left."""

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
