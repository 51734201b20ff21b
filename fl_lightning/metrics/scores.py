"""Scores of models: metric and NLL on the test set, on training samples, on a client's own test set."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_lightning.data.dataset import Dataset
from fl_lightning.data.partition import subset_indices
from fl_lightning.metrics.settings import Evaluation
from fl_lightning.metrics.uncertainty.calibration import Calibration
from fl_lightning.models.inputs import Inputs, each, part, split
from fl_lightning.models.task import Score, Task, Weights
from fl_lightning.system import activity

# Test samples per forward pass: larger blocks leave the cache of a CPU and are slower.
BLOCK = 1000
# What convolutions make of these would do so too: they see a quarter at a time, to the same bits.
CONVOLVED = 250


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
    at_once = CONVOLVED if task.device.type == "cpu" and _convolves(task) else BLOCK
    with task.evaluating():
        for raw, stored in zip(split(inputs, BLOCK), torch.split(labels, BLOCK), strict=True):
            x, y = dataset.inputs(raw, task.dtype), dataset.targets(stored, task.dtype)
            for index, weights in enumerate(models):
                logits = torch.cat([task.logits(weights, few) for few in split(x, at_once)])
                found, before = likelihood.tally(logits, y), tallies[index]
                tallies[index] = found if before is None else before + found
                nll[index] += likelihood(logits, y, reduction="sum")
                if index < calibrated and (classes := likelihood.as_classes(logits, y)) is not None:
                    block = Calibration.of(*classes)
                    sums[index] = sums[index].plus(block) if index in sums else block
    scores = _scored(task, tallies, nll, labels)
    numbers = {index: found.metrics() for index, found in sums.items()}
    return [
        one._replace(brier=numbers[i]["Brier"], ece=numbers[i]["ECE"]) if i in numbers else one
        for i, one in enumerate(scores)
    ]


def _convolves(task: Task) -> bool:
    return any(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in task.model.modules())


def _scored(task: Task, tallies: Sequence[Tensor | None], nll: Tensor, labels: Tensor) -> list[Score]:
    """The scores of several models, whose sums the device gives at once."""
    assert all(tally is not None for tally in tallies), "nothing to measure on"
    sums = torch.column_stack([torch.stack([tally for tally in tallies if tally is not None]), nll]).cpu()
    labels, metric, scores = labels.cpu(), task.likelihood.metric, []
    for row in sums:
        found = dict(task.likelihood.metrics(row[:-1], labels))
        scores.append(Score(found.pop(metric), float(row[-1]) / len(labels), others=found or None))
    return scores


def score_at(task: Task, model: Weights, dataset: Dataset, places: Tensor) -> Score:
    """One model on some samples of the training set."""
    places = places.to(dataset.train_y.device)
    (found,) = score_on(task, [model], dataset, part(dataset.train_x, places), dataset.train_y[places])
    return found


def score_local(task: Task, models: Sequence[Weights], dataset: Dataset, evaluation: Evaluation) -> list[Score]:
    """The clients' models on the test set, or on the share of it that is theirs."""
    if evaluation.local_share == 1:
        return score(task, models, dataset)
    places = subset_indices(dataset.test_strata, evaluation.local_share).to(dataset.test_y.device)
    return score_on(task, models, dataset, part(dataset.test_x, places), dataset.test_y[places])


def client_score(task: Task, model: Weights, dataset: Dataset, client: int) -> Score | None:
    """A model on the test set of a client; None if it has none."""
    if dataset.client_tests is None or not len(places := dataset.client_tests[client]):
        return None
    return score_at(task, model, dataset, places)
