"""How long runs will take and what they will weigh, from one small measured round of each kind of run."""

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fl_lightning.data.shares import class_counts, sizes_of
from fl_lightning.discovery import PLUGINS
from fl_lightning.engines.parallel.ray_cluster import Resources
from fl_lightning.errors import UserError
from fl_lightning.loop import federate
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.runs import checkpoint, files, rounds_file
from fl_lightning.runs.config.run_config import RunConfig, build
from fl_lightning.runs.identity import identity
from fl_lightning.runs.problem import problem_of
from fl_lightning.runs.resume import known_rounds

# The measured round sees about this many training samples; time is taken as proportional to them.
SAMPLES = 2_000
# And at most this many clients: each of them costs something beside its samples.
CLIENTS = 200
# And models are measured on about this many test samples.
TEST_SAMPLES = 500
# Of the files beside the checkpoint, MLflow keeps a copy, and its database rows weigh about as much again.
COPIES = 3


class Cost(NamedTuple):
    """What a kind of run costs.

    Attributes:
        train: Seconds of training per sample and epoch.
        evaluate: Seconds to evaluate one model on the test set.
        samples: Training samples of all clients.
        server: Seconds of the server in a round.
        fixed: Seconds to load data and build the model.
        state: Bytes of a checkpoint.
        tables: Bytes of everything else after one round.
    """

    train: float
    evaluate: float
    samples: int
    server: float
    fixed: float
    state: int
    tables: int


class Estimate:
    """Measures kinds of runs as they are asked for; one kind is one method, model, dataset and batch size.

    Args:
        measure: Measures a kind by one of its runs; without it, this process does.
    """

    def __init__(self, measure: Callable[[RunConfig], Cost | None] | None = None) -> None:
        self._known: dict[str, Cost | None] = {}
        self._measure = measure or measure_here

    @property
    def kinds(self) -> int:
        """Kinds of runs that were asked for."""
        return len(self._known)

    def seconds(self, config: RunConfig, done: int = 0) -> float:
        """About how long a run takes alone, so many of whose rounds are there; infinite if that is unknown."""
        cost, split, federation, evaluation = self._cost(config), config.split, config.federation, config.evaluation
        if cost is None:
            return math.inf
        cohort = federation.cohort or split.clients * federation.fraction
        training = cost.samples * cohort / split.clients * config.training.epochs * cost.train
        measured = 1 + (cohort * evaluation.local_share if evaluation.local else 0)
        left = range(done + 1, federation.rounds + 1)
        due = sum(evaluation.is_due(round, federation.rounds) for round in left)
        return cost.fixed + len(left) * (training + cost.server) + due * measured * cost.evaluate

    def bytes(self, config: RunConfig, keep_checkpoint: bool) -> float:
        """About how much a run leaves on disk."""
        cost = self.cost(config)
        states = min(2, config.federation.rounds) if keep_checkpoint else 0
        return COPIES * cost.tables * (1 + 0.1 * config.federation.rounds) + states * cost.state

    def cost(self, config: RunConfig) -> Cost:
        """What a run costs that can be measured."""
        cost = self._cost(config)
        assert cost is not None
        return cost

    def _cost(self, config: RunConfig) -> Cost | None:
        flat = config.flat()
        decisive = ("method", "model", "data", "engine", "training.batch_size", "data.subset")
        variant = {k: v for k, v in flat.items() if k.startswith("method.") and isinstance(v, str | bool)}
        shape = {k: v for k, v in flat.items() if k in decisive or k.startswith(("model.", "data.augment"))}
        kind = str(variant | shape)
        if kind not in self._known:
            self._known[kind] = self._measure(config)
        return self._known[kind]


def measure_here(config: RunConfig) -> Cost:
    """Measure a run on this machine; a plug-in that fails, or ends its process, is named."""
    try:
        apart = os.environ.get(PLUGINS) and not current_process().daemon  # which may have no children
        return _in_a_process(config) if apart else _measure(config)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        name, what = config.names["method"], f"{type(error).__name__}: {error}"
        raise UserError(
            f"expected one round of {name} to measure its time, got "
            f"{'an end of its process' if isinstance(error, BrokenProcessPool) else what}; a sweep computes the other "
            "cases, and reports this one as failed"
        ) from error


def _in_a_process(config: RunConfig) -> Cost:
    """Measure in another process, which a faulty plug-in may end."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure_settings, config.flat()).result()


def measure_apart(resources: Resources, refused: list[UserError]) -> Callable[[RunConfig], Cost | None]:
    """What measures a run in a process of the cluster, where a faulty plug-in harms nothing: its cost is unknown.

    Args:
        resources: Of that process.
        refused: Takes the errors of runs whose settings cannot work.
    """
    import ray
    from ray.exceptions import RayError

    task = ray.remote(num_cpus=resources.cpu, num_gpus=resources.gpu, max_retries=0)(_measure_settings)

    def measured(config: RunConfig) -> Cost | None:
        try:
            cost: Cost = ray.get(task.remote(config.flat()))
            return cost
        except RayError as error:  # its runs will meet the same fault, and report it
            if isinstance(error, UserError):
                refused.append(UserError(str(error.cause)))  # type: ignore[attr-defined]  # a RayTaskError of both types
            return None

    return measured


def _measure_settings(settings: dict[str, Any]) -> Cost:
    return _measure(build(settings))


def _measure(config: RunConfig) -> Cost:
    start = time.perf_counter()
    problem = problem_of(config)
    fixed = time.perf_counter() - start
    sizes = sizes_of(problem.clients)
    samples = sizes.total
    share = min(1.0, SAMPLES / samples)
    few = [part[: max(1, round(share * len(part)))] if len(part) else part for part in problem.clients]
    # A small learning rate takes as long as a large one, and does not diverge.
    epochs = min(2, config.training.epochs)  # one is too few for FedPA
    short = replace(config.training, epochs=epochs, lr=min(config.training.lr, 1e-4), clip_norm=None)
    once = replace(config.federation, rounds=1, fraction=1.0, cohort=min(CLIENTS, len(sizes.eligible)))
    record = next(federate(config.method, problem._replace(clients=few), short, once, config.engine))
    dataset = problem.dataset.tested_on(torch.arange(min(TEST_SAMPLES, len(problem.dataset.test_y))))
    tested = dataset.test_y
    start = time.perf_counter()
    measured = measure(config.method, problem.task, dataset, record)
    evaluate = (time.perf_counter() - start) / (1 + len(record.clients)) * len(problem.dataset.test_y) / len(tested)
    trained = epochs * sum(len(result.local.data) for result in record.clients)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint.write(folder, identity(config), record.after)
        state = _size(folder)
        counts = class_counts(problem.dataset.strata, problem.clients, problem.dataset.num_strata)
        rounds_file.write(folder, identity(config), [measured])
        files.write(config, counts, [measured], folder, pictures=False)
        tables = _size(folder) - state
    return Cost(record.seconds_local / trained, evaluate, samples, record.seconds_server, fixed, state, tables)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


class Forecast(NamedTuple):
    """What a sweep will cost.

    Attributes:
        seconds: On this machine's cores or the given number of slots.
        bytes: On disk.
    """

    seconds: float
    bytes: float


def forecast(configs: Sequence[RunConfig], slots: int, keep_checkpoints: bool, out: Path | None = None) -> Forecast:
    """What computing these runs will cost; less, where some of their rounds are known in a folder of all runs."""
    estimate = Estimate()
    seconds = sum(estimate.seconds(config, known_rounds(config, out) if out is not None else 0) for config in configs)
    return Forecast(seconds / slots, sum(estimate.bytes(config, keep_checkpoints) for config in configs))
