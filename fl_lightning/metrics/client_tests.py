"""Clients on their own test sets (`data.client_test`): the server's model before local training, their own after it.

    PA_before = 1/n sum_n (accuracy of theta_S on client n's test set), theta_S as the round begins
    PA_after  = 1/n sum_n (accuracy of theta_n on client n's test set), theta_n after local training

Over the members of the cohort that have a test set, all counting the same. `_worst` is the mean of the worst tenth of
them, at least one (Li et al., *Fair Resource Allocation in Federated Learning*, ICLR 2020), `_std` their standard
deviation (of the population, 0 for one client).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fl_lightning.data.dataset import Dataset
from fl_lightning.models.task import Score, Task, Weights
from fl_lightning.record import RoundRecord

# Accuracy and NLL of a model on some training samples.
ScoreAt = Callable[[Task, Weights, Dataset, Any], Score]
WORST = 0.1


def client_score(task: Task, model: Weights, dataset: Dataset, client: int, score_at: ScoreAt) -> Score | None:
    """A model on the test set of a client; None if it has none."""
    places = dataset.client_tests[client] if dataset.client_tests is not None else ()
    return score_at(task, model, dataset, places) if len(places) else None


def measure(
    task: Task, dataset: Dataset, record: RoundRecord, score_at: ScoreAt
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """The numbers of a round, and those of each member of its cohort, NaN without a test set; nothing without tests."""
    if dataset.client_tests is None:
        return {}, {}
    start = Weights(record.before.state.params, record.before.buffers)
    before = [client_score(task, start, dataset, n, score_at) for n in record.cohort.members]
    after = [
        result.own or client_score(task, Weights(result.local.params, result.local.buffers), dataset, n, score_at)
        for n, result in zip(record.cohort.members, record.clients, strict=True)
    ]
    numbers: dict[str, float] = {}
    clients: dict[str, list[Any]] = {"test_samples": [len(dataset.client_tests[n]) for n in record.cohort.members]}
    for name, scores in (("before", before), ("after", after)):
        known = [score.accuracy for score in scores if score is not None]
        numbers |= {f"PA_{name}{ending}": value for ending, value in summary(known).items()}
        clients[f"accuracy_{name}"] = [math.nan if score is None else score.accuracy for score in scores]
    return numbers, clients


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, worst tenth and spread over clients, by the ending of their names; empty without clients.

    >>> summary([0.5, 1.0])
    {'': 0.75, '_worst': 0.5, '_std': 0.25}
    """
    if not values:
        return {}
    known = torch.tensor(values, dtype=torch.float64).sort().values
    worst = known[: math.ceil(WORST * len(known))]
    return {"": float(known.mean()), "_worst": float(worst.mean()), "_std": float(known.std(correction=0))}
