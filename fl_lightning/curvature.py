"""Curvature of a client's likelihood at a fixed model."""

from typing import Literal

import torch

from fl_lightning.data.plan import ClientData
from fl_lightning.params import Params, zeros, zip_map
from fl_lightning.task import Task, Weights

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
    was_training = task.model.training
    task.model.eval()
    total = zeros(weights.params)
    for x, y in data.blocks(batch_size or len(data)):
        if kind == "per_sample":
            squares = task.squared_gradients(weights, x, y)
        else:
            gradient = torch.func.grad(lambda p: task.loss(Weights(p, weights.buffers), x, y))(weights.params)  # noqa: B023
            squares = zip_map(torch.square, gradient)
        total = zip_map(lambda t, s: t.add(s, alpha=len(y) / len(data)), total, squares)  # noqa: B023
    task.model.train(was_training)
    return total
