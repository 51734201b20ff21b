"""One run in two workers: against one process, and against two bare processes that share the clients by hand.

Wall time, since several processes are compared: on a quiet machine with two cores only. Contestants take turns round by
round, and ratios are medians over the turns. A round is training, LA of all clients, and aggregation.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.table import Row
from benchmarks.works import NUM_CLASSES, Aims, Work, as_bytes, seeded, synthetic
from fl_lightning.data.partition import Split, partition
from fl_lightning.engines.base import Engine
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.parallel.engine import Parallel
from fl_lightning.engines.parallel.executor import Executor, Workers, pool_of
from fl_lightning.loop import Problem, federate
from fl_lightning.method import Method
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.metrics.metric import Measurement
from fl_lightning.metrics.round_metrics import ClientEvaluator, measure
from fl_lightning.models.networks.cnn import Cnn
from fl_lightning.models.networks.mlp import Mlp
from fl_lightning.models.task import Task
from fl_lightning.training import Federation, Training

CLIENTS, TURNS = 20, 5
LOOP = Functional(chunk=1)


def measure_workers(scale: float) -> list[Row]:
    """The works of the table."""
    cnn, mlp = (lambda: Cnn((3, 32, 32), NUM_CLASSES)), (lambda: Mlp((784,), NUM_CLASSES))
    works: list[tuple[Work, Method, float]] = [
        (_work("cnn", cnn, (3, 32, 32), 50_000, None, scale), FedAvg(), 1.8),
        (_work("mlp, fola", mlp, (784,), 60_000, None, scale), Fola(), 1.8),
        (_work("mlp, alpha 0.01", mlp, (784,), 60_000, 0.01, scale), FedAvg(), 1.6),
    ]
    with pool_of(Workers(2)) as pool:
        return [row for work, method, aim in works for row in _compare(work, method, aim, pool)]


def _compare(work: Work, method: Method, aim: float, pool: Any) -> list[Row]:
    with ExitStack() as stack:
        found: list[Measurement] = []
        contestants: Mapping[str, Iterator[Any]] = {
            "one": rounds(work, method, LOOP),
            "two": _kept(rounds(work, method, Parallel(LOOP, pool)), found),
            "bare": stack.enter_context(_bare(work, method)),
        }
        seconds = _turns(contestants, TURNS)
    idle = 100 * median(one["workers_idle"] for one in found[1:])
    bare = f"medians of {TURNS} turns; {median(seconds['one']):.1f} s in one process"
    return [
        Row(work.name, "two workers / one process", _ratio(seconds, "two", "one"), "x", round(1 / aim, 3), bare),
        Row(work.name, "two workers / two bare processes", _ratio(seconds, "two", "bare"), "x", round(1 / 0.9, 3)),
        Row(work.name, "two bare processes / one process", _ratio(seconds, "bare", "one"), "x"),
        Row(work.name, "idle share of the workers", idle, "%"),
    ]


def rounds(work: Work, method: Method, engine: Engine, executor: Executor = 1) -> Iterator[Measurement]:
    """The rounds of a work, measured: by the workers, if there are any."""
    task = Task(deepcopy(work.model))
    evaluator = ClientEvaluator(task) if isinstance(engine, Parallel) else None
    federation = Federation(rounds=work.rounds + 1, cohort=work.cohort)
    problem = Problem(task, work.dataset, work.clients, seed=work.seed, evaluate_clients=evaluator)
    records = federate(method, problem, work.training, federation, engine, workers=executor)
    return (measure(method, task, work.dataset, record) for record in records)


@contextmanager
def _bare(work: Work, method: Method) -> Iterator[Iterator[None]]:
    """Two processes with half of the clients' samples each, longest first; neither knows of the other."""
    halves: tuple[list[Tensor], list[Tensor]] = ([], [])
    for indices in sorted(work.clients, key=len, reverse=True):
        min(halves, key=lambda half: sum(map(len, half))).append(indices)
    context = torch.multiprocessing.get_context("spawn")
    ends, processes = [], []
    for half in halves:
        mine, theirs = context.Pipe()
        share = replace(work, clients=tuple(half), cohort=len(half))
        processes.append(context.Process(target=_half, args=(theirs, share, method)))
        processes[-1].start()
        ends.append(mine)

    def turns() -> Iterator[None]:
        while True:
            for end in ends:
                end.send(True)
            for end in ends:
                end.recv()
            yield

    try:
        yield turns()
    finally:
        for end in ends:
            end.send(False)
        for process in processes:
            process.join()


def _half(end: Connection, work: Work, method: Method) -> None:
    torch.set_num_threads(1)
    mine = rounds(work, method, LOOP)
    while end.recv():
        next(mine)
        end.send(True)


def _turns(contestants: Mapping[str, Iterator[Any]], turns: int) -> dict[str, list[float]]:
    """One untimed turn, then timed ones, in a rotating order."""
    names = list(contestants)
    for name in names:
        next(contestants[name])
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            next(contestants[name])
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> float:
    return median(one / other for one, other in zip(seconds[name], seconds[base], strict=True))


def _kept(measured: Iterator[Measurement], found: list[Measurement]) -> Iterator[None]:
    for one in measured:
        found.append(one)
        yield


def _work(
    name: str, model: Callable[[], nn.Module], shape: tuple[int, ...], samples: int, alpha: float | None, scale: float
) -> Work:
    """N = 20, E = 1, B = 32; the scale leaves out training and test samples."""
    dataset = synthetic(shape, round(samples * scale))
    tested = round(len(dataset.test_y) * scale)
    dataset = replace(dataset, test_x=dataset.test_x[:tested], test_y=dataset.test_y[:tested])
    split = Split(clients=CLIENTS, partition="iid" if alpha is None else "dirichlet", alpha=alpha or 1.0)
    clients = tuple(part for part in partition(dataset.train_y, split, 0) if len(part))
    share = f"{scale:.0%} of all samples"
    number, aims = len(clients), Aims(1, None)
    return as_bytes(Work(f"workers {name}", seeded(model), dataset, clients, Training(), number, TURNS, aims, share))
