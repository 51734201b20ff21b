"""The full curvature matrix of a client's loss, at its final model or averaged over its local path.

Softmax regression has its exact Hessian by blocks (`softmax_curvature`); other networks, if they are small, the
Gauss-Newton matrix (`gauss_newton`), because a product of Gaussians needs precisions without negative directions.
Both are taken in evaluation mode on samples as they are stored, without augmentation.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.curvature import gauss_newton, softmax
from fl_lightning.data.plan import ClientData
from fl_lightning.task import Task, Weights


class PathStep(NamedTuple):
    """One step of local training, as curvature sees it.

    Attributes:
        weights: The model before the step.
        places: Which training samples the batch held.
        share: Weight of the batch's mean curvature in the result.
    """

    weights: Weights
    places: Tensor
    share: float


def at(task: Task, weights: Weights, data: ClientData) -> Tensor:
    """The mean curvature of all the client's samples at one model."""
    size = len(data)
    places = torch.split(data.indices, softmax.BLOCK)
    return along(task, data, (PathStep(weights, block, len(block) / size) for block in places))


def along(task: Task, data: ClientData, steps: Iterable[PathStep]) -> Tensor:
    """sum_t share_t C(theta_t; batch_t), with C the mean curvature of a batch.

    For softmax regression, the outputs of all steps are collected by sample, and the matrix products are formed once.
    """
    if not is_exact(task, data):
        return _gauss_newton(task, data, steps)
    row_of = torch.zeros(len(data.dataset.train_y), dtype=torch.long, device=data.indices.device)
    row_of[data.indices] = torch.arange(len(data), device=row_of.device)
    weights: Tensor | None = None
    for step in steps:
        found = softmax.inputs_and_logits(task, step.weights, data.fetch(step.places)[0])
        assert found is not None
        pairs = softmax.pair_weights(found[1]).mul_(step.share / len(step.places))
        if weights is None:
            weights = pairs.new_zeros(len(data), pairs.shape[1])
        weights.index_add_(0, row_of[step.places], pairs)
    assert weights is not None
    return softmax.hessian(_samples(task, data, weights), task.initial.params)


def is_exact(task: Task, data: ClientData) -> bool:
    """Whether the task is softmax regression, whose Hessian is known by blocks."""
    first = torch.zeros(1, dtype=torch.long, device=task.device)
    return softmax.inputs_and_logits(task, task.initial, data.fetch(first)[0]) is not None


def work(task: Task, data: ClientData, samples: int) -> float:
    """Multiplications that the matrix of so many samples takes."""
    factor = 0.5 if is_exact(task, data) else _outputs(task, data)
    return samples * factor * task.num_params**2


def _outputs(task: Task, data: ClientData) -> int:
    """How many outputs there are for a sample."""
    first = torch.zeros(1, dtype=torch.long, device=task.device)
    with task.evaluating():
        return task.logits(task.initial, data.fetch(first)[0]).numel()


def _samples(task: Task, data: ClientData, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = softmax.BLOCK
    for places, shares in zip(torch.split(data.indices, size), torch.split(weights, size), strict=True):
        found = softmax.inputs_and_logits(task, task.initial, data.fetch(places)[0])
        assert found is not None
        yield found[0], shares


def _gauss_newton(task: Task, data: ClientData, steps: Iterable[PathStep]) -> Tensor:
    total = torch.zeros(task.num_params, task.num_params, dtype=task.dtype, device=task.device)
    for step in steps:
        total.add_(gauss_newton.matrix(task, step.weights, *data.fetch(step.places)), alpha=step.share)
    return total
