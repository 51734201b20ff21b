"""The Fisher of a client's likelihood: online, along its path, or at a fixed model."""

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.curvature.per_sample import squared_gradients
from fl_lightning.data.batches import BLOCK, ClientData
from fl_lightning.method import Local, Step
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, zeros, zip_map


def accumulate(fisher: Params, step: Step) -> Params:
    """F + (b/m) g^2: of the minibatch, or of single samples where the step has their squares."""
    if step.squares is None and isinstance(step.fraction, float):  # one client alone: in place
        for name, total in fisher.items():
            total.addcmul_(step.grad[name], step.grad[name], value=step.fraction)
        return fisher
    squares = step.squares if step.squares is not None else zip_map(torch.square, step.grad)
    return zip_map(lambda total, square: total + square * step.fraction, fisher, squares)


FisherKind = Literal["minibatch", "per_sample"]


def diagonal_fisher(task: Task, weights: Weights, data: ClientData, kind: FisherKind, batch_size: int | None) -> Params:
    """Diagonal empirical Fisher of all the client's data at one model, in evaluation mode.

    per_sample: (1/m) sum_i g_i^2; minibatch: sum_B (|B|/m) (mean of g_i over B)^2, over consecutive batches.

    Args:
        task: Model and likelihood.
        weights: Where to evaluate.
        data: The client's samples.
        kind: Which estimator.
        batch_size: Samples per minibatch, null for all at once; the per-sample estimator does not depend on it.
    """
    size = BLOCK if kind == "per_sample" else batch_size or len(data)
    total = zeros(weights.params)
    with task.in_mode(False):
        for x, y in data.blocks(size):
            if kind == "per_sample":
                squares = squared_gradients(task, weights, x, y)
            else:
                squares = zip_map(torch.square, _gradient(task, weights, x, y))
            _accumulate(total, squares, len(y) / len(data))
    return total


def fisher_at_end(local: Local, kind: FisherKind) -> Params:
    """The diagonal Fisher of a client's data at the end of its local training."""
    weights = Weights(local.params, local.buffers)
    return diagonal_fisher(local.task, weights, local.data, kind, local.training.batch_size)


def mean_gradient(task: Task, weights: Weights, data: ClientData) -> Params:
    """Gradient of the mean loss over all the client's data at one model, in evaluation mode, block by block."""
    total = zeros(weights.params)
    with task.in_mode(False):
        for x, y in data.blocks():
            _accumulate(total, _gradient(task, weights, x, y), len(y) / len(data))
    return total


def _gradient(task: Task, weights: Weights, x: Tensor, y: Tensor) -> Params:
    return task.gradient(weights, x, y)


def _accumulate(total: Params, values: Params, share: float) -> None:
    for name, value in values.items():
        total[name].add_(value, alpha=share)
