"""A run in MLflow: its name and tags, its rounds as they become known, and how it ended."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.config import PARTS, RunConfig
from fl_lightning.data.shares import content_hash
from fl_lightning.record import Measurement
from fl_lightning.runs import provenance
from fl_lightning.runs.folder import Result, artifacts_of, attempt_of, write_result
from fl_lightning.runs.identity import identity, trajectory
from fl_lightning.runs.outbox import UnreachableError
from fl_lightning.runs.store import store_uri
from fl_lightning.runs.track import Place, Tracker, recall_attempt
from fl_lightning.system import activity

# A batch of metrics costs MLflow about the same for one round as for many.
SEND_EVERY_SECONDS = 1.0
# By it and the identity an MLflow run is found whose key has got lost.
FOLDER_TAG = "fl_lightning.folder"
# Of a run that its own rule has stopped: after which round, and why.
STOPPED_TAG = "stopped"
# A name longer than this says nothing more.
LONGEST_NAME = 200
SYMBOLS = {"training.epochs": "E", "training.batch_size": "B", "data.clients": "N", "federation.fraction": "C"}
# What the program itself says about a run.
OWN_TAGS = frozenset(
    {
        *("method", "data", "model", "partition", "seed", "identity", "trajectory", "status", "diverged", "case"),
        *(STOPPED_TAG, "study", "kind", "package", "torch", "device", provenance.SETTINGS_TAG, provenance.VERSIONS_TAG),
    }
)
OWN_PREFIXES = ("mlflow.", "fl_lightning.", "study.")


class Recording:
    """The MLflow run of a run.

    Args:
        tracker: Writes to it.
        history: The numbers of all rounds, which whoever computes them extends; those that are there already are sent
            at once, because a killed process may have left some unsent.

    Attributes:
        saved: How many rounds are on disk. Others are not told: computed again after a kill they would have other
            seconds, and MLflow would have both.
    """

    def __init__(self, tracker: Tracker, history: Sequence[Measurement]) -> None:
        self.tracker, self._history = tracker, history
        self.saved = len(history)
        self._sent, self._sent_at = 0, time.monotonic()
        self.send()

    def send(self) -> None:
        """Write the rounds that MLflow does not know yet."""
        known = enumerate(self._history[: self.saved], start=1)
        self.tracker.log_rounds((i, measurement.metrics) for i, measurement in known if i > self._sent)
        self._sent, self._sent_at = self.saved, time.monotonic()

    def send_now_and_then(self) -> None:
        """Write them if the last time is long enough ago."""
        if time.monotonic() - self._sent_at > SEND_EVERY_SECONDS:
            self.send()

    def result(self, status: str, message: str, folder: Path) -> Result:
        """How the run ended, as its folder and MLflow know it."""
        tracker = self.tracker
        return Result(
            status=status,
            message=message,
            run_id=tracker.run_id,
            folder=folder,
            history=list(self._history),
            tags=dict(tracker.tags),
            store=tracker.uri,
            identity=tracker.tags["identity"],
            name=tracker.name,
            params=tracker.params,
        )

    def conclude(self, result: Result) -> Result:
        """Save how the run ended, then tell MLflow: whatever happens between the two, nothing is computed again."""
        write_result(replace(result, unsent=True))
        self.saved = len(self._history)
        self.send()
        return _end(self.tracker, result)


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
    marks = {"identity": tags["identity"], FOLDER_TAG: str(folder.resolve())}
    attempt = attempt_of(folder, tags["identity"], lambda: recall_attempt(out, marks))
    settings = config.flat()
    if config.split.partition == "natural":  # as many as the data have owners
        settings["data.clients"] = len(clients)
    tracker = Tracker(out, attempt.key, _run_name(config, tags), settings, {**tags, **marks}, attempt.is_new)
    return Recording(tracker, history)


def adopt(out: Path, result: Result, tags: Mapping[str, str]) -> Result:
    """Give a run that has ended further tags; tell the present store what it lacks of it."""
    same = result.store == store_uri(out)
    if same and tags.keys() <= result.tags.keys() and not result.unsent:
        return result
    # In its own store it stays a child of the sweep that has computed it; another store does not know that one.
    try:
        return tell(out, result, {**tags, **result.tags} if same else {**result.tags, **tags})
    except UnreachableError:
        if result.unsent:  # it waits, and that was said
            return result
        raise


def tell(out: Path, result: Result, tags: Mapping[str, str], place: Place | None = None) -> Result:
    """Tell a store of a run that has ended; again, if it may know only part of it.

    Args:
        out: Folder of all runs.
        result: The run.
        tags: Of its MLflow run.
        place: Where to write, if not to the store of the folder.

    Returns:
        The run with what the store says of it; it is saved.
    """
    marks = {"identity": result.identity, FOLDER_TAG: str(result.folder.resolve())}
    attempt = attempt_of(result.folder, result.identity, lambda: None if place else recall_attempt(out, marks))
    tracker = Tracker(out, attempt.key, result.name, result.params, {**tags, **marks}, place=place)
    if tracker.run_id != result.run_id or result.unsent:
        Recording(tracker, result.history)
        result = replace(result, unsent=True)
    return _end(tracker, replace(result, run_id=tracker.run_id, tags=dict(tracker.tags), store=tracker.uri))


def send_rest(out: Path, result: Result) -> Result:
    """Tell the store what it lacks of a run that has ended, if it answers now."""
    try:
        return tell(out, result, result.tags)
    except UnreachableError:
        _warn_of_rest(result)
        return result


def _end(tracker: Tracker, result: Result) -> Result:
    if result.unsent or not result.reused:
        tracker.artifacts(artifacts_of(result.folder))
        tracker.tag("status", result.status)
    # Who was stopped by a rule of its own has a reason, and has left all that a finished run leaves.
    tracker.finish("KILLED" if result.status == "stopped" and not result.message else "FINISHED")
    result = replace(result, unsent=not tracker.flush())
    write_result(result)
    if result.unsent:
        _warn_of_rest(result)
    return result


def _warn_of_rest(result: Result) -> None:
    activity.warn(
        f"the MLflow server at {result.store} does not answer, and lacks some of this run; all of it is saved in "
        f"{result.folder}, and the same command sends the rest"
    )


def retag(config: RunConfig, out: Path, result: Result, tags: Mapping[str, str]) -> Result:
    """Give a finished run the tags that a user asks for, in place of those it has."""
    merged = {**result.tags, **tags}
    if merged == result.tags:
        return result
    return tell(out, replace(result, name=_run_name(config, merged)), merged)


def _run_name(config: RunConfig, tags: Mapping[str, str]) -> str:
    """What the UI shows: the method and what was chosen for it first, because long names are cut off.

    Every setting that is not at its default is in it, so that runs which differ have names that differ.
    """
    names, chosen = config.names, config.varied()
    shown = {"method", "data", "data.alpha", "data.root", "federation.rounds", "seed"}
    own = {key: value for key, value in chosen.items() if key.startswith("method.")}
    usual = {part for part, (_, default, _) in PARTS.items() if names[part] == default}
    rest = {key: value for key, value in chosen.items() if key not in shown | own.keys() | usual}
    start = [tags.get("case", names["method"]), *_in_short(own), f"R={config.federation.rounds}", f"seed={config.seed}"]
    return " ".join([*start, names["data"], f"alpha={config.split.alpha:g}", *_in_short(rest)])[:LONGEST_NAME]


def _in_short(settings: Mapping[str, Any]) -> list[str]:
    """As papers write them.

    >>> _in_short({"training.epochs": 5, "method.strength": 10.0, "model": "cnn", "model.hidden": [8, 8]})
    ['E=5', 'strength=10', 'model=cnn', 'hidden=[8,8]']
    """
    return [
        f"{SYMBOLS.get(key, key.rpartition('.')[2])}={f'{value:g}' if isinstance(value, float) else value}".replace(
            ", ", ","
        )
        for key, value in settings.items()
    ]
