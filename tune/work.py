"""What one trial computes: runs one after the other, or the seeds of one setting side by side.

Whatever an earlier process has finished is only read, and an interrupted run goes on after its last round: the files
of the runs are the truth, not what Ray remembers.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fl_lightning import experiment
from fl_lightning.config import RunConfig
from fl_lightning.errors import UserError
from fl_lightning.experiment import Keeping, Progress
from fl_lightning.first_round import share_first_round
from fl_lightning.probes import Measurement
from tune.study import Stop


class Order(NamedTuple):
    """What to do with the runs of a trial.

    Attributes:
        out: Folder of all runs.
        keeping: What stays of each run.
        cases: What a run is called in tables and figures, by its identity.
        stop: When a run need not go on.
        metric: What is good if large.
        fresh: Forget what earlier processes have computed.
    """

    out: Path
    keeping: Keeping
    cases: Mapping[str, str] = MappingProxyType({})
    stop: Stop | None = None
    metric: str = "GA"
    fresh: bool = False

    def keeping_of(self, config: RunConfig) -> Keeping:
        """What stays of this run; its MLflow run says which case it is."""
        case = self.cases.get(config.identity)
        return self.keeping._replace(tags={**self.keeping.tags, **({"case": case} if case else {})})


class News(NamedTuple):
    """What has happened in a trial so far.

    Attributes:
        finished: Runs that have ended.
        rounds: Rounds that are known.
        value: The metric of the latest round.
        best: The largest value of the metric at the end of a run.
        failures: Runs that could not be computed, with the reason.
    """

    finished: int = 0
    rounds: int = 0
    value: float = float("-inf")
    best: float = float("-inf")
    failures: Mapping[str, str] = {}


def one_after_the_other(units: Sequence[Sequence[RunConfig]], order: Order) -> Generator[News, None, None]:
    """Compute runs; those of a unit share their first round. A run that fails does not take others with it."""
    news = News()
    for unit in units:
        for config, progress in _runs(unit, order):
            try:
                for measurement in _until(order.stop, progress):
                    value = measurement.metrics.get(order.metric, float("-inf"))
                    news = news._replace(rounds=news.rounds + 1, value=value)
                    yield news
                news = news._replace(finished=news.finished + 1, best=max(news.best, news.value))
            except UserError as error:
                news = _with_failure(news, config, str(error))
            except Exception as error:  # a bug of a plugin, say: it is told at the end, and tried again next time
                news = _with_failure(news, config, f"{type(error).__name__}: {error}")
            yield news


def side_by_side(configs: Sequence[RunConfig], order: Order) -> Generator[News, None, None]:
    """Compute the seeds of one setting in step, so that a scheduler can judge the mean after every round."""
    news = News()
    runs = [_until(order.stop, _run(config, order)) for config in configs]
    latest: list[float] = []
    while runs:
        going = []
        for run in runs:
            measurement = next(run, None)
            if measurement is None:
                news = news._replace(finished=news.finished + 1)
                continue
            going.append((run, measurement.metrics[order.metric]))
            news = news._replace(rounds=news.rounds + 1)
        runs = [run for run, _ in going]
        latest = [value for _, value in going] or latest
        if going:
            mean = sum(latest) / len(latest)
            news = news._replace(value=mean)
            yield news
    yield news._replace(best=news.value)


def _runs(unit: Sequence[RunConfig], order: Order) -> Iterator[tuple[RunConfig, Progress]]:
    if len(unit) > 1:
        yield from share_first_round(unit, order.out, order.fresh, order.keeping_of)
    else:
        for config in unit:
            yield config, _run(config, order)


def _run(config: RunConfig, order: Order) -> Progress:
    return experiment.rounds(config, order.out, order.fresh, order.keeping_of(config))


def _until(stop: Stop | None, progress: Progress) -> Iterator[Measurement]:
    """The rounds of a run, until the study has seen enough of it."""
    seen: list[float] = []
    for _, measurement in progress:
        yield measurement
        if stop is not None:
            seen.append(measurement.metrics[stop.metric])
            if stop.reached(seen):
                progress.close()
                return


def _with_failure(news: News, config: RunConfig, reason: str) -> News:
    flat: dict[str, Any] = config.flat()
    name = f"{flat['method']} seed {flat['seed']} ({config.identity})"
    return news._replace(finished=news.finished + 1, failures={**news.failures, name: reason})
