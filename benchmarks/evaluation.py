"""What evaluation costs: LA is the accuracy of every client's model on the whole test set, in every round."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import torch

from benchmarks.contest import interleave, paired_ratio
from benchmarks.table import Row
from benchmarks.works import Work, as_bytes
from fl_lightning.engines.functional import Functional
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.metrics.scores import score
from fl_lightning.models.task import Task, Weights
from fl_lightning.record import RoundRecord

LAYERS = ((784, 500), (500, 300), (300, 10))
TURNS = 6
SIZE, REPEATS = 1024, 10


def measure_evaluation(work: Work) -> list[Row]:
    """LA alone, without GA, against a round of training with the same clients; and data as bytes.

    Round, evaluation and a bare matrix product take turns and are timed by one clock: `RoundRecord.seconds_*` are wall
    time and would not do beside CPU time on a busy machine.
    """
    work = replace(work, rounds=TURNS)
    task, latest = Task(deepcopy(work.model)), []
    pieces = {
        "round": rounds(work, latest),
        "evaluation": evaluations(work, task, latest),
        "peak": large_products(),
    }
    seconds = interleave(pieces, TURNS, rotate=False)
    share = 100 * paired_ratio(seconds, "evaluation", "round")
    products = len(work.clients) * 10_000 * sum(inputs * outputs for inputs, outputs in LAYERS)
    floor = 100 * paired_ratio(seconds, "peak", "round") * products / (REPEATS * SIZE**3)
    note = f"arithmetic: {100 * arithmetic_share():.0f} % at equal flop rates, {floor:.0f} % at the rate of mm({SIZE})"
    stored = as_bytes(work)
    pair = {"floats": work.run(FedAvg(), Functional()), "bytes": stored.run(FedAvg(), Functional())}
    storage = interleave(pair, TURNS)
    return [
        Row(work.name, "evaluation of LA / round", share, "%", 15, note),
        Row(work.name, "data as bytes / as floats", paired_ratio(storage, "bytes", "floats"), "x"),
    ]


def rounds(work: Work, latest: list[RoundRecord]) -> Iterator[None]:
    for record in work.run(FedAvg(), Functional()):
        latest[:] = [record]
        yield


def evaluations(work: Work, task: Task, latest: list[RoundRecord]) -> Iterator[None]:
    while True:
        score(task, client_models(latest[0]), work.dataset)
        yield


def large_products() -> Iterator[None]:
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    while True:
        for _ in range(REPEATS):
            torch.mm(a, b)
        yield


def client_models(record: RoundRecord) -> list[Weights]:
    return [Weights(result.local.params, result.local.buffers) for result in record.clients]


def arithmetic_share() -> float:
    """Products of LA (10 clients x 10,000 samples forward) over those of training (60,000 forward and backward)."""
    forward = sum(inputs * outputs for inputs, outputs in LAYERS)
    to_inputs = sum(inputs * outputs for inputs, outputs in LAYERS[1:])  # no gradient of the data
    return 10 * 10_000 * forward / (60_000 * (2 * forward + to_inputs))
