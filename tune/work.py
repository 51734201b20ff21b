"""What one trial computes: runs one after the other, or the seeds of one setting side by side.

Whatever an earlier process has finished is only read, and an interrupted run goes on after its last round: the files
of the runs are the truth, not what Ray remembers.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fl_lightning import experiment
from fl_lightning.engines.parallel.executor import Executor
from fl_lightning.errors import DiskFull, UserError
from fl_lightning.experiment import Rounds
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.metrics.metric import GA, Measurement, sign
from fl_lightning.runs.config.run_config import RunConfig, build
from fl_lightning.runs.folder import latest
from fl_lightning.runs.identity import identity
from fl_lightning.runs.open_run import RunOptions
from fl_lightning.system.program import in_words
from tune.outcome import measured

# A trial costs Ray 30 to 65 ms; packs of this length make that negligible and still balance well.
PACK_SECONDS = 10.0
# So many packs for every trial that the cluster holds at once, at least, so that none idles at the end.
PACKS_PER_SLOT = 8

Pack = list[RunConfig]
Compact = tuple[dict[str, Any], list[dict[str, Any]]]


class Instructions(NamedTuple):
    """What to do with the runs of a trial.

    Attributes:
        out: Folder of all runs.
        options: How each run is carried out, and what stays of it.
        tags: Of single runs, by their identity: what a run is called in tables and figures, and what it is for.
        stop: When a run need not go on.
        metric: What decides.
    """

    out: Path
    options: RunOptions = RunOptions()
    tags: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    stop: Stop | None = None
    metric: str = GA

    def with_workers(self, workers: Executor) -> "Instructions":
        """The same with another executor; no number depends on it."""
        return self._replace(options=self.options._replace(workers=workers))

    def options_of(self, config: RunConfig) -> RunOptions:
        """How this run is carried out; its MLflow run says which case it is."""
        return self.options._replace(tags={**self.options.tags, **self.tags.get(identity(config), {})})

    def name_of(self, config: RunConfig) -> str:
        """What a run is called where it could not be computed."""
        case = self.tags.get(identity(config), {}).get("case") or config.names["method"]
        return f"{case} seed {config.seed} ({identity(config)})"


class TrialStatus(NamedTuple):
    """What has happened in a trial so far.

    Attributes:
        finished: Runs that have ended.
        rounds: Rounds that are known; of seeds side by side, the latest.
        value: The metric of the latest round, times -1 if it is good if small.
        best: The largest such value at the end of a run.
        failures: Runs that could not be computed, with the reason.
        full: What could not be saved because the disk is full, so that all other runs would fail, too.
    """

    finished: int = 0
    rounds: int = 0
    value: float = float("-inf")
    best: float = float("-inf")
    failures: Mapping[str, str] = {}
    full: str = ""


class Status(NamedTuple):
    """How far a sweep is.

    Attributes:
        finished: Runs that have ended, those of earlier sweeps included.
        total: All runs.
        best: The largest value of the metric at the end of a run.
        rounds: Rounds that are known of the runs of this sweep; they tell of life where runs last for hours.
    """

    finished: int
    total: int
    best: float
    rounds: int = 0


Watch = Callable[[Status], None]


def one_after_the_other(configs: Sequence[RunConfig], instructions: Instructions) -> Generator[TrialStatus, None, None]:
    """Compute runs; one that fails does not take others with it."""
    status, metric = TrialStatus(), instructions.metric
    way = sign(metric)
    for config in configs:
        diverged = False
        try:
            for measurement in _rounds(config, instructions):
                diverged = measurement is None
                if measurement is not None:
                    value = way * measured(measurement.metrics, metric)
                    status = status._replace(rounds=status.rounds + 1, value=_newest(value, status.value))
                    yield status
            best = status.best if diverged else max(status.best, status.value)
            status = status._replace(finished=status.finished + 1, best=best)
        except (Exception, SystemExit) as error:  # of a plugin, say: reported at the end, and tried again next time
            status = _with_failure(status, instructions.name_of(config), error)
        yield status


def side_by_side(configs: Sequence[RunConfig], instructions: Instructions) -> Generator[TrialStatus, None, None]:
    """Compute the seeds of one setting in step, so that a scheduler sees the mean after every round.

    A seed that has ended counts with its last value; one that has diverged makes the setting worth nothing. Until all
    have been measured once, the mean is NaN.
    """
    status, metric = TrialStatus(), instructions.metric
    way = sign(metric)
    runs = {identity(config): _rounds(config, instructions) for config in configs}
    latest: dict[str, float] = {}
    while runs:
        going = False
        for config in [config for config in configs if identity(config) in runs]:
            try:
                for measurement in runs[identity(config)]:
                    key = identity(config)
                    value = -math.inf if measurement is None else way * measured(measurement.metrics, metric)
                    latest[key] = _newest(value, latest.get(key, math.nan))
                    going = True
                    break
                else:
                    del runs[identity(config)]
                    status = status._replace(finished=status.finished + 1)
            except (Exception, SystemExit) as error:
                yield _with_failure(status, instructions.name_of(config), error)
                return
        if going:
            status = status._replace(rounds=status.rounds + 1, value=sum(latest.values()) / len(latest))
            yield status
    yield status._replace(best=status.value)


def _rounds(config: RunConfig, instructions: Instructions) -> Iterator[Measurement | None]:
    """The rounds of a run, until the study has seen enough of it; at the end None if it diverged."""
    progress: Rounds = experiment.rounds(config, instructions.out, instructions.options_of(config))
    stop, seen = instructions.stop, []
    with closing(progress):
        for _, measurement in progress:
            yield measurement
            if stop is not None:
                seen.append(measured(measurement.metrics, stop.metric))
                if stop.reached(seen):
                    return
    result = latest(config, instructions.out)
    if result is not None and result.status == "diverged":
        yield None


def _newest(value: float, before: float) -> float:
    """The value of a round; the one before it, where it was not measured."""
    return before if math.isnan(value) else value


def _with_failure(status: TrialStatus, name: str, error: BaseException) -> TrialStatus:
    known = str(error) if isinstance(error, UserError) else in_words(error)
    reason = known or f"{type(error).__name__}: {error}"
    full = reason if isinstance(error, DiskFull) else status.full
    return status._replace(finished=status.finished + 1, failures={**status.failures, name: reason}, full=full)


def packs(configs: Sequence[RunConfig], slots: int, seconds: Callable[[RunConfig], float]) -> list[Pack]:
    """Runs put together to trials, the longest first.

    Args:
        configs: The runs.
        slots: Trials that run at once.
        seconds: About how long a run takes.
    """
    costs = [seconds(config) for config in configs]
    target = min(PACK_SECONDS, sum(costs) / (PACKS_PER_SLOT * slots))
    packed: list[tuple[float, Pack]] = []
    room = 0.0
    for config, cost in zip(configs, costs, strict=True):
        if not packed or room < cost:
            packed.append((0.0, []))
            room = target
        total, members = packed[-1]
        packed[-1] = (total + cost, [*members, config])
        room -= cost
    return [members for _, members in sorted(packed, key=lambda item: -item[0])]


def compact(pack: Pack) -> Compact:
    """A pack as plain settings, for a trial in another process: what all its runs have in common is said once."""
    runs = [config.flat() for config in pack]
    common = {key: value for key, value in runs[0].items() if all(key in one and one[key] == value for one in runs)}
    return common, [{k: v for k, v in settings.items() if k not in common} for settings in runs]


def expand(packed: Compact) -> Pack:
    """The inverse of `compact`."""
    common, own = packed
    return [build({**common, **settings}) for settings in own]
