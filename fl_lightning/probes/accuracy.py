"""What is measured after every round: GA, LA and their spread, calibration, losses, traffic, time.

GA is the test accuracy of the aggregated model. LA = sum_n p_n (accuracy of client n's model on the global test set),
after local training and before aggregation; with all clients taking part, p_n = pi_n. Of tasks other than
classification, the metric of the likelihood stands for accuracy, such as R2, and others (RMSE, F1) go by their names.
NLL, Brier and ECE say how far the aggregated model's probabilities can be trusted
(`fl_lightning.uncertainty.metrics`); without classes there are no Brier and ECE. GA_validation is the accuracy
of the aggregated model on training samples that belong to nobody (`data.validation`), if there are any. AE and LF are
the distances from a reference posterior for which GA and LA stand; see `fl_lightning.probes.reference`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.data.dataset import Dataset
from fl_lightning.inputs import Inputs, each, part, split
from fl_lightning.method import Method, task_of
from fl_lightning.probes.reference import Reference
from fl_lightning.record import ClientResult, Measurement, RoundRecord
from fl_lightning.system import activity
from fl_lightning.task import Score, Task, Weights
from fl_lightning.uncertainty.metrics import Calibration

# Test samples per forward pass: larger blocks leave the cache of a CPU and are slower.
BLOCK = 1000


def score(task: Task, models: Sequence[Weights], dataset: Dataset, calibrated: int = 0) -> list[Score]:
    """Metric and NLL of several models on the test set; of the first `calibrated` ones, Brier score and ECE too."""
    return score_on(task, models, dataset, dataset.test_x, dataset.test_y, calibrated)


def score_on(
    task: Task, models: Sequence[Weights], dataset: Dataset, inputs: Inputs, labels: Tensor, calibrated: int = 0
) -> list[Score]:
    """The same on any data: every block of them is prepared once and shown to all models."""
    inputs, labels = each(lambda x: x.to(task.device), inputs), labels.to(task.device)
    likelihood = task.likelihood
    tallies: list[Tensor | None] = [None] * len(models)
    nll = torch.zeros(len(models), dtype=torch.float64, device=task.device)
    sums: dict[int, Calibration] = {}
    activity.say(f"measuring {len(models)} model{'s' * (len(models) > 1)}")
    with task.evaluating():
        for raw, stored in zip(split(inputs, BLOCK), torch.split(labels, BLOCK), strict=True):
            x, y = dataset.inputs(raw, task.dtype), dataset.targets(stored, task.dtype)
            for index, weights in enumerate(models):
                logits = task.logits(weights, x)
                found, before = likelihood.tally(logits, y), tallies[index]
                tallies[index] = found if before is None else before + found
                nll[index] += likelihood(logits, y, reduction="sum")
                if index < calibrated and (classes := likelihood.as_classes(logits, y)) is not None:
                    block = Calibration.of(*classes)
                    sums[index] = sums[index].plus(block) if index in sums else block
    scores = [_scored(task, tally, labels, float(n)) for tally, n in zip(tallies, nll, strict=True)]
    numbers = {index: found.metrics() for index, found in sums.items()}
    return [
        one._replace(brier=numbers[i]["Brier"], ece=numbers[i]["ECE"]) if i in numbers else one
        for i, one in enumerate(scores)
    ]


def _scored(task: Task, tally: Tensor | None, labels: Tensor, nll: float) -> Score:
    assert tally is not None, "nothing to measure on"
    found = dict(task.likelihood.metrics(tally, labels))
    return Score(found.pop(task.likelihood.metric), nll / len(labels), others=found or None)


@dataclass(frozen=True)
class ClientJudge:
    """LA and LF of clients, measured where they were trained.

    Attributes:
        task: Model and likelihood.
        reference: The posterior from which models are a distance apart, if there is one.
    """

    task: Task
    reference: Reference | None = None

    def __call__(self, clients: Sequence[ClientResult]) -> list[ClientResult]:
        models = [Weights(client.local.params, client.local.buffers) for client in clients]
        scores = score(self.task, models, clients[0].local.data.dataset)
        distances: Sequence[float | None] = [None] * len(clients)
        if self.reference is not None:
            distances = self.reference.distances([model.params for model in models])
        return [
            client._replace(score=found, distance=distance)
            for client, found, distance in zip(clients, scores, distances, strict=True)
        ]


def measure(
    method: Method, task: Task, dataset: Dataset, record: RoundRecord, reference: Reference | None = None
) -> Measurement:
    """All numbers of a round; AE and LF against a reference posterior, if there is one."""
    start, task = time.perf_counter(), task_of(method, task)
    server = Weights(record.after.state.params, record.after.buffers)
    known = [result.score for result in record.clients if result.score is not None]
    unknown = [Weights(r.local.params, r.local.buffers) for r in record.clients if len(known) < len(record.clients)]
    scores = score(task, [server, *unknown], dataset, calibrated=1) + ([] if unknown else known)
    chosen_by = _validation(task, server, dataset)
    distances = _distances(reference, server, record) if reference is not None else []
    seconds_evaluation = time.perf_counter() - start
    weights = record.cohort.weights
    accuracies = torch.tensor([s.accuracy for s in scores[1:]], dtype=torch.float64)
    low, first, middle, third, high = accuracies.quantile(torch.linspace(0, 1, 5, dtype=torch.float64)).tolist()
    diagnosis = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    metrics = {
        "GA": scores[0].accuracy,
        "LA": _mean([s.accuracy for s in scores[1:]], weights),
        "LA_min": low,
        "LA_q25": first,
        "LA_median": middle,
        "LA_q75": third,
        "LA_max": high,
        **_trust(scores[0]),
        "train_loss": _mean([result.train_loss for result in record.clients], weights),
        "prior_loss": _mean([result.prior_loss for result in record.clients], weights),
        "bytes_down": float(record.bytes_down),
        "bytes_up": float(record.bytes_up),
        "gradient_evaluations": float(record.gradient_evaluations),
        "seconds_local": record.seconds_local,
        "seconds_server": record.seconds_server,
        "seconds_evaluation": seconds_evaluation,
        "seconds": record.seconds_local + record.seconds_server + seconds_evaluation,
    }
    clients: dict[str, list[Any]] = {
        "client": list(record.cohort.members),
        "samples": [len(result.local.data) for result in record.clients],
        "steps": [result.local.num_steps for result in record.clients],
        task.likelihood.metric: [s.accuracy for s in scores[1:]],
        "train_loss": [result.train_loss for result in record.clients],
        "prior_loss": [result.prior_loss for result in record.clients],
    }
    metrics |= chosen_by
    if record.workers_idle is not None:
        metrics["workers_idle"] = record.workers_idle
    if distances:
        metrics |= {"AE": distances[0], "LF": _mean(distances[1:], weights)}
        clients["distance"] = distances[1:]
    for name, value in diagnosis.items():
        if isinstance(value, list):
            clients[name] = value
        else:
            metrics[name] = value
    return Measurement(metrics, clients)


def _trust(server: Score) -> dict[str, float]:
    """What else is measured of the server's model."""
    calibration = {} if server.brier is None or server.ece is None else {"Brier": server.brier, "ECE": server.ece}
    return {"NLL": server.nll, **calibration, **(server.others or {})}


def _distances(reference: Reference, server: Weights, record: RoundRecord) -> list[float]:
    """Of the server's model, then of the clients'; those that are known are not measured again."""
    known = [result.distance for result in record.clients if result.distance is not None]
    if len(known) == len(record.clients):
        return [*reference.distances([server.params]), *known]
    return reference.distances([server.params, *(result.local.params for result in record.clients)])


def _validation(task: Task, server: Weights, dataset: Dataset) -> dict[str, float]:
    """Of the server's model alone: nobody chooses by the clients'."""
    if dataset.validation is None:
        return {}
    places = dataset.validation.to(dataset.train_y.device)
    (found,) = score_on(task, [server], dataset, part(dataset.train_x, places), dataset.train_y[places])
    return {"GA_validation": found.accuracy}


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))
