"""How long runs will take and what they will weigh, from one small measured round of each kind of run."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from fl_lightning import experiment
from fl_lightning.config import RunConfig
from fl_lightning.data.shares import class_counts, sizes_of
from fl_lightning.loop import federate
from fl_lightning.probes.accuracy import measure
from fl_lightning.runs import checkpoint, files
from fl_lightning.runs.identity import identity
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
    """Measures kinds of runs as they are asked for; one kind is one method, model, dataset and batch size."""

    def __init__(self) -> None:
        self._known: dict[str, Cost] = {}

    def seconds(self, config: RunConfig, done: int = 0) -> float:
        """About how long a run takes by itself, so many of whose rounds are there."""
        return self.together([config], done)

    def together(self, unit: Sequence[RunConfig], done: int = 0) -> float:
        """About how long runs take that share their first round: one training, the clients measured once per E."""
        longest = max(unit, key=lambda config: (config.training.epochs, self.cost(config).train))
        cost, split, federation, evaluation = self.cost(longest), longest.split, longest.federation, longest.evaluation
        cohort = federation.cohort or split.clients * federation.fraction
        training = cost.samples * cohort / split.clients * longest.training.epochs * cost.train
        server = sum(self.cost(config).server for config in unit)
        local = cohort * len({config.training.epochs for config in unit}) * evaluation.local_share
        measured = len(unit) + (local if evaluation.local else 0)
        left = range(done + 1, federation.rounds + 1)
        due = sum(evaluation.is_due(round, federation.rounds) for round in left)
        return cost.fixed + len(left) * (training + server) + due * measured * cost.evaluate

    def bytes(self, config: RunConfig, keep_checkpoint: bool) -> float:
        """About how much a run leaves on disk."""
        cost = self.cost(config)
        states = min(2, config.federation.rounds) if keep_checkpoint else 0
        return COPIES * cost.tables * (1 + 0.1 * config.federation.rounds) + states * cost.state

    def cost(self, config: RunConfig) -> Cost:
        flat = config.flat()
        decisive = ("method", "model", "data", "engine", "training.batch_size", "data.subset")
        variant = {k: v for k, v in flat.items() if k.startswith("method.") and isinstance(v, str | bool)}
        shape = {k: v for k, v in flat.items() if k in decisive or k.startswith(("model.", "data.augment"))}
        kind = str(variant | shape)
        if kind not in self._known:
            self._known[kind] = _measure(config)
        return self._known[kind]


def _measure(config: RunConfig) -> Cost:
    start = time.perf_counter()
    problem = experiment.build(config)
    fixed = time.perf_counter() - start
    sizes = sizes_of(problem.clients)
    samples = sizes.total
    share = min(1.0, SAMPLES / samples)
    few = [part[: max(1, round(share * len(part)))] if len(part) else part for part in problem.clients]
    # A small learning rate takes as long as a large one, and does not diverge.
    epochs = min(2, config.training.epochs)  # one is too few for FedPA
    short = replace(config.training, epochs=epochs, lr=min(config.training.lr, 1e-4), clip_norm=None)
    once = replace(config.federation, rounds=1, fraction=1.0, cohort=min(CLIENTS, len(sizes.eligible)))
    rounds = federate(
        config.method, problem.task, problem.dataset, few, short, once, config.engine, config.seed, problem.holdout
    )
    record = next(iter(rounds))
    dataset = problem.dataset.tested_on(torch.arange(min(TEST_SAMPLES, len(problem.dataset.test_y))))
    tested = dataset.test_y
    start = time.perf_counter()
    measured = measure(config.method, problem.task, dataset, record)
    evaluate = (time.perf_counter() - start) / (1 + len(record.clients)) * len(problem.dataset.test_y) / len(tested)
    trained = epochs * sum(len(result.local.data) for result in record.clients)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint.write(folder, identity(config), record.after, [measured])
        state = _size(folder)
        counts = class_counts(problem.dataset.strata, problem.clients, problem.dataset.num_strata)
        files.write(config, counts, [measured], folder, pictures=False)
        tables = _size(folder) - state
    return Cost(record.seconds_local / trained, evaluate, samples, record.seconds_server, fixed, state, tables)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


class Forecast(NamedTuple):
    """What a sweep will cost.

    Attributes:
        seconds: On this machine's cores or the given number of slots.
        alone: Seconds if no runs shared anything.
        bytes: On disk.
    """

    seconds: float
    alone: float
    bytes: float


def forecast(
    units: Sequence[Sequence[RunConfig]], slots: int, keep_checkpoints: bool, out: Path | None = None
) -> Forecast:
    """What computing these units will cost; less, where rounds of their runs are known in a folder of all runs."""
    estimate = Estimate()
    runs = [config for unit in units for config in unit]
    done = {identity(config): known_rounds(config, out) if out is not None else 0 for config in runs}
    # What shares its first round has no other.
    together = sum(estimate.together(unit, done[identity(unit[0])] if len(unit) == 1 else 0) for unit in units)
    alone = sum(estimate.seconds(config, done[identity(config)]) for config in runs)
    weight = sum(estimate.bytes(config, keep_checkpoints) for config in runs)
    return Forecast(together / slots, alone / slots, weight)
