"""What is measured after every round: GA, LA and their spread, calibration, losses, traffic, time.

GA is the test accuracy of the aggregated model. LA = sum_n p_n (accuracy of client n's model on the global test set),
after local training and before aggregation; with all clients taking part, p_n = pi_n. NLL, Brier and ECE say how far
the aggregated model's probabilities can be trusted (`fl_lightning.uncertainty.metrics`). GA_validation is the accuracy
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
from fl_lightning.method import Method, task_of
from fl_lightning.probes.reference import Reference
from fl_lightning.record import ClientResult, Measurement, RoundRecord
from fl_lightning.system import activity
from fl_lightning.task import Score, Task, Weights
from fl_lightning.uncertainty.metrics import Calibration

# Test samples per forward pass: larger blocks leave the cache of a CPU and are slower.
BLOCK = 1000


def score(task: Task, models: Sequence[Weights], dataset: Dataset, calibrated: int = 0) -> list[Score]:
    """Accuracy and NLL of several models on the test set; of the first `calibrated` ones, Brier score and ECE too."""
    return score_on(task, models, dataset, dataset.test_x, dataset.test_y, calibrated)


def score_on(
    task: Task, models: Sequence[Weights], dataset: Dataset, inputs: Tensor, labels: Tensor, calibrated: int = 0
) -> list[Score]:
    """The same on any data: every block of them is prepared once and shown to all models."""
    inputs, labels = inputs.to(task.device), labels.to(task.device)
    correct = torch.zeros(len(models), dtype=torch.float64, device=task.device)
    nll = torch.zeros_like(correct)
    sums: dict[int, Calibration] = {}
    activity.say(f"measuring {len(models)} model{'s' * (len(models) > 1)}")
    with task.evaluating():
        for raw, y in zip(torch.split(inputs, BLOCK), torch.split(labels, BLOCK), strict=True):
            x = dataset.inputs(raw, task.dtype)
            for index, weights in enumerate(models):
                logits = task.logits(weights, x)
                correct[index] += (logits.argmax(1) == y).sum()
                nll[index] += task.likelihood(logits, y, reduction="sum")
                if index < calibrated:
                    found = Calibration.of(logits, y)
                    sums[index] = sums[index].plus(found) if index in sums else found
    scores = [Score(float(c) / len(labels), float(n) / len(labels)) for c, n in zip(correct, nll, strict=True)]
    numbers = {index: found.metrics() for index, found in sums.items()}
    return [
        one._replace(brier=numbers[i]["Brier"], ece=numbers[i]["ECE"]) if i in numbers else one
        for i, one in enumerate(scores)
    ]


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
        "NLL": scores[0].nll,
        "Brier": scores[0].brier or 0.0,
        "ECE": scores[0].ece or 0.0,
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
        "accuracy": [s.accuracy for s in scores[1:]],
        "train_loss": [result.train_loss for result in record.clients],
        "prior_loss": [result.prior_loss for result in record.clients],
    }
    metrics |= chosen_by
    for name, number in _own_metrics(task, server, dataset).items():
        metrics[f"own_{name}" if name in metrics else name] = number
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


def _distances(reference: Reference, server: Weights, record: RoundRecord) -> list[float]:
    """Of the server's model, then of the clients'; those that are known are not measured again."""
    known = [result.distance for result in record.clients if result.distance is not None]
    if len(known) == len(record.clients):
        return [*reference.distances([server.params]), *known]
    return reference.distances([server.params, *(result.local.params for result in record.clients)])


def _own_metrics(task: Task, server: Weights, dataset: Dataset) -> dict[str, float]:
    """What the evaluation of a LightningModule logs of the server's model."""
    if task.step is None:
        return {}
    places = torch.split(torch.arange(len(dataset.test_y), device=dataset.test_y.device), BLOCK)
    batches = (
        (dataset.inputs(dataset.test_x[i].to(task.device), task.dtype), dataset.test_y[i].to(task.device))
        for i in places
    )
    with task.evaluating():
        return task.step.metrics({**server.params, **server.buffers}, batches)


def _validation(task: Task, server: Weights, dataset: Dataset) -> dict[str, float]:
    """Of the server's model alone: nobody chooses by the clients'."""
    if dataset.validation is None:
        return {}
    places = dataset.validation.to(dataset.train_x.device)
    (found,) = score_on(task, [server], dataset, dataset.train_x[places], dataset.train_y[places])
    return {"GA_validation": found.accuracy}


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))
