"""A run in MLflow: its name and tags, its rounds as they become known, and how it ended."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from fl_lightning.config import RunConfig
from fl_lightning.data.partition import content_hash
from fl_lightning.record import Measurement
from fl_lightning.runs import provenance
from fl_lightning.runs.folder import ATTEMPT, Result, attempt_of, write_result
from fl_lightning.runs.identity import identity, trajectory
from fl_lightning.runs.track import Tracker, store_uri

# A batch of metrics costs MLflow about the same for one round as for many.
SEND_EVERY_SECONDS = 1.0


class Recording:
    """The MLflow run of a run.

    Args:
        tracker: Writes to it.
        history: The numbers of all rounds, which whoever computes them extends; those that are there already are sent
            at once, because a killed process may have left some unsent.
    """

    def __init__(self, tracker: Tracker, history: Sequence[Measurement]) -> None:
        self.tracker, self._history = tracker, history
        self._sent, self._sent_at = 0, time.monotonic()
        self.send()

    def send(self) -> None:
        """Write the rounds that MLflow does not know yet."""
        known = enumerate(self._history, start=1)
        self.tracker.log_rounds((i, measurement.metrics) for i, measurement in known if i > self._sent)
        self._sent, self._sent_at = len(self._history), time.monotonic()

    def send_now_and_then(self) -> None:
        """Write them if the last time is long enough ago."""
        if time.monotonic() - self._sent_at > SEND_EVERY_SECONDS:
            self.send()

    def result(self, status: str, message: str, folder: Path) -> Result:
        """How the run ended, as its folder and MLflow know it."""
        tracker = self.tracker
        return Result(status, message, tracker.run_id, folder, list(self._history), False, tracker.tags, tracker.uri)


def open_recording(
    config: RunConfig,
    out: Path,
    folder: Path,
    clients: Sequence[Tensor],
    history: Sequence[Measurement],
    further: Mapping[str, str],
) -> Recording:
    """The MLflow run of a configuration: a new one, or the one that an earlier process has begun.

    Args:
        config: The run.
        out: Folder of all runs.
        folder: Of this run.
        clients: Who holds which samples.
        history: The numbers of the rounds, see `Recording`.
        further: Further tags.
    """
    names = config.names
    tags = {
        "method": names["method"],
        "data": names["data"],
        "model": names["model"],
        "partition": content_hash(clients),
        "seed": str(config.seed),
        "identity": identity(config),
        "trajectory": trajectory(config),
        **provenance.tags(config),
        **further,
    }
    is_new = not (folder / ATTEMPT).exists()
    return Recording(Tracker(out, attempt_of(folder), _run_name(config, tags), config.flat(), tags, is_new), history)


def adopt(config: RunConfig, out: Path, result: Result, tags: Mapping[str, str]) -> None:
    """Give a finished run further tags; if another store has it, tell the present one what is known of it."""
    same = result.store == store_uri(out)
    if same and tags.keys() <= result.tags.keys():
        return
    # In its own store it stays a child of the sweep that has computed it; another store does not know that one.
    tags = {**tags, **result.tags} if same else {**result.tags, **tags}
    tracker = Tracker(out, attempt_of(result.folder), _run_name(config, tags), config.flat(), tags)
    if tracker.run_id != result.run_id:
        Recording(tracker, result.history)
        tracker.tag("status", result.status)
    tracker.finish("FINISHED" if result.status != "stopped" else "KILLED")
    write_result(replace(result, run_id=tracker.run_id, tags=tags, store=store_uri(out)))


def _run_name(config: RunConfig, tags: Mapping[str, str]) -> str:
    """What the UI shows; the seed comes early, because long names are cut off."""
    names = config.names
    return f"{tags.get('case', names['method'])} seed={config.seed} {names['data']} alpha={config.split.alpha:g}"
