"""The full curvature matrix of a client's loss, at its final model or averaged over its local path.

Softmax regression has its exact Hessian by blocks (`softmax_hessian`); other networks, if they are small, the
Gauss-Newton matrix (`gauss_newton`), because a product of Gaussians needs precisions without negative directions.
Both are taken in evaluation mode on samples as they are stored, without augmentation.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.curvature import gauss_newton, softmax_hessian
from fl_lightning.data.batches import ClientData
from fl_lightning.method import Local
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, unflatten
from fl_lightning.system import activity

# Which eigenvalue goes to which parameter; see `as_diagonal`.
EigenOrder = Literal["ascending", "rank_matched"]


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


def at_end(local: Local) -> Tensor:
    """The mean curvature of a client's samples at the end of its local training."""
    return at(local.task, Weights(local.params, local.buffers), local.data)


def along_path(local: Local, start: Params, equal_steps: bool = False) -> Tensor:
    """sum_t (b_t / m_n) C(theta_t; batch_t) along a client's path, whose statistics are the models after every step.

    Args:
        local: The client.
        start: The model before its first step.
        equal_steps: Whether every batch counts 1, instead of its share of the data.
    """
    before = chain([start], (unflatten(vector, start) for vector in local.path_statistics[:-1]))
    return along(
        local.task,
        local.data,
        (
            PathStep(Weights(params, local.buffers), places, 1.0 if equal_steps else len(places) / len(local.data))
            for params, places in zip(before, local.plan.all_batches(), strict=True)
        ),
    )


def at(task: Task, weights: Weights, data: ClientData) -> Tensor:
    """The mean curvature of all the client's samples at one model."""
    size = len(data)
    places = torch.split(data.indices, softmax_hessian.BLOCK)
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
        found = softmax_hessian.inputs_and_logits(task, step.weights, data.fetch(step.places)[0])
        assert found is not None
        pairs = softmax_hessian.pair_weights(found[1]).mul_(step.share / len(step.places))
        if weights is None:
            weights = pairs.new_zeros(len(data), pairs.shape[1])
        weights.index_add_(0, row_of[step.places], pairs)
    assert weights is not None
    return softmax_hessian.hessian(_samples(task, data, weights), task.initial.params)


def is_exact(task: Task, data: ClientData) -> bool:
    """Whether the task is softmax regression, whose Hessian is known by blocks."""
    first = torch.zeros(1, dtype=torch.long, device=task.device)
    return softmax_hessian.inputs_and_logits(task, task.initial, data.fetch(first)[0]) is not None


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
    size = softmax_hessian.BLOCK
    for places, shares in zip(torch.split(data.indices, size), torch.split(weights, size), strict=True):
        found = softmax_hessian.inputs_and_logits(task, task.initial, data.fetch(places)[0])
        assert found is not None
        yield found[0], shares


def _gauss_newton(task: Task, data: ClientData, steps: Iterable[PathStep]) -> Tensor:
    total = torch.zeros(task.num_params, task.num_params, dtype=task.dtype, device=task.device)
    for step in steps:
        total.add_(gauss_newton.matrix(task, step.weights, *data.fetch(step.places)), alpha=step.share)
    return total


def as_diagonal(matrix: Tensor, like: Params, order: EigenOrder) -> Params:
    """The paper's e-full approximation: the eigenvalues as the diagonal of a precision, one for each parameter.

    An eigenvalue belongs to a direction in the space of all parameters, not to a single one, so that the result depends
    on which eigenvalue is given to which parameter; it also changes with the basis.

    ascending: the j-th smallest goes to the j-th parameter, as eigensolvers sort them: all clients' precisions look
    alike, whatever their data. rank_matched: the k-th largest goes to the parameter with the k-th largest diagonal
    entry, the reading that keeps which parameters matter.

    Args:
        matrix: Symmetric, positive semi-definite.
        like: The parameters, for names and shapes.
        order: Which eigenvalue goes where.
    """
    activity.say(f"eigenvalues of {len(matrix):,} parameters")
    values = torch.linalg.eigvalsh(matrix).clamp_(min=0)  # rounding leaves small negative ones
    if order == "rank_matched":
        ranked = torch.empty_like(values)
        ranked[matrix.diagonal().argsort(stable=True)] = values
        values = ranked
    return unflatten(values, like)
