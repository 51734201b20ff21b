"""What evaluation costs: LA is the accuracy of every client's model on the whole test set, in every round."""

import time
from dataclasses import replace
from statistics import median

import torch

from benchmarks.contest import interleave, paired_ratio
from benchmarks.table import Row
from benchmarks.works import Work, as_bytes
from fl_lightning.engines.functional import Functional
from fl_lightning.federate import RoundRecord
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.probes import score
from fl_lightning.task import Task, Weights

LAYERS = ((784, 500), (500, 300), (300, 10))
TURNS = 4


def measure_evaluation(work: Work) -> list[Row]:
    """LA alone, without GA, against a round of training with the same clients; and data as bytes."""
    work = replace(work, rounds=TURNS)
    task = Task(work.model)
    shares = []
    for record in work.run(FedAvg(), Functional()):
        start = time.process_time()
        score(task, client_models(record), work.dataset)
        evaluation = time.process_time() - start
        if record.round > 1:
            shares.append(100 * evaluation / (record.seconds_local + record.seconds_server))
    stored = as_bytes(work)
    pair = {"floats": work.run(FedAvg(), Functional()), "bytes": stored.run(FedAvg(), Functional())}
    seconds = interleave(pair, TURNS)
    note = (
        f"same flop rate: {100 * arithmetic_share():.0f} %; test blocks at the peak rate: {fastest_share(work):.0f} %"
    )
    return [
        Row(work.name, "evaluation of LA / round", median(shares), "%", 15, note),
        Row(work.name, "data as bytes / as floats", paired_ratio(seconds, "bytes", "floats"), "x"),
    ]


def client_models(record: RoundRecord) -> list[Weights]:
    return [Weights(result.local.params, result.local.buffers) for result in record.clients]


def arithmetic_share() -> float:
    """Products of LA (10 clients x 10,000 samples forward) over those of training (60,000 forward and backward)."""
    forward = sum(inputs * outputs for inputs, outputs in LAYERS)
    to_inputs = sum(inputs * outputs for inputs, outputs in LAYERS[1:])  # no gradient of the data
    return 10 * 10_000 * forward / (60_000 * (2 * forward + to_inputs))


def fastest_share(work: Work) -> float:
    """LA in % of a round if its products ran at the rate of a large square matrix product."""
    size, seconds = 1024, []
    a, b = torch.randn(size, size), torch.randn(size, size)
    for _ in range(10):
        start = time.process_time()
        torch.mm(a, b)
        seconds.append(time.process_time() - start)
    rate = size**3 / min(seconds)
    products = len(work.clients) * 10_000 * sum(inputs * outputs for inputs, outputs in LAYERS)
    rounds = interleave({"round": work.run(FedAvg(), Functional())}, TURNS)["round"]
    return 100 * products / rate / median(rounds)
