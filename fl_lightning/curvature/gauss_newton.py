"""The Gauss-Newton matrix of any classifier with cross-entropy: G = (1/m) sum_i J_i^T (diag P_i - P_i P_i^T) J_i.

J_i is the Jacobian of the logits of sample i, P_i its class probabilities. G is positive semi-definite, needs no
labels, and is the Fisher information of the model's own predictions; for softmax regression, whose logits are linear in
the parameters, it is the Hessian of the loss. Products with a vector never form it.
"""

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.func import jacrev, jvp, vjp, vmap

from fl_lightning.errors import require
from fl_lightning.params import Params, zip_map
from fl_lightning.task import Task, Weights

# Numbers in the Jacobians that are in memory at once: 64 MB in float32.
LARGEST_BLOCK = 2**24

Batches = Iterable[tuple[Tensor, Tensor]]


def quadratics(task: Task, weights: Weights, batches: Batches, vectors: Sequence[Params]) -> list[float]:
    """v^T G v = (1/m) sum_i Var_{P_i}(J_i v): the mean variance of the logits' shift under the predictions.

    For several vectors at once: every batch is prepared once.
    """
    totals, size = [0.0] * len(vectors), 0
    for x, _ in batches:
        for index, vector in enumerate(vectors):
            logits, shift = _push(task, weights, x, vector)
            p, a = logits.double().softmax(1), shift.double()
            centred = a - (p * a).sum(1, keepdim=True)  # rather than a difference of squares: never negative
            totals[index] += float((p * centred.square()).sum())
        size += len(x)
    return [total / size for total in totals]


def product(task: Task, weights: Weights, batches: Batches, vector: Params) -> Params:
    """G v, as J^T (M (J v)) batch by batch."""
    total = zip_map(lambda v: torch.zeros_like(v, dtype=torch.float64), vector)
    size = 0
    for x, _ in batches:
        logits, shift = _push(task, weights, x, vector)
        with task.evaluating():
            pull = vjp(lambda params: task.logits(Weights(params, weights.buffers), x), weights.params)[1]  # noqa: B023
            (image,) = pull(output_product(logits.softmax(1), shift))
        for name, value in image.items():
            total[name] += value
        size += len(x)
    return zip_map(lambda t, v: (t / size).to(v.dtype), total, vector)


def matrix(task: Task, weights: Weights, x: Tensor) -> Tensor:
    """G of one batch as a dense matrix, rows and columns in the order of `flatten`: b K d^2 multiplications."""
    params = weights.params
    number = sum(value.numel() for value in params.values())

    def logits_of(params: Params, sample: Tensor) -> Tensor:
        return task.logits(Weights(params, weights.buffers), sample.unsqueeze(0)).squeeze(0)

    total = torch.zeros(number, number, dtype=task.dtype, device=task.device)
    with task.evaluating():
        classes = task.logits(weights, x[:1]).shape[1]
        for block in torch.split(x, max(1, LARGEST_BLOCK // (classes * number))):
            slopes = vmap(jacrev(logits_of), in_dims=(None, 0))(params, block)
            jacobian = torch.cat([slopes[name].flatten(2) for name in params], dim=2)  # (b, K, d)
            p = task.logits(weights, block).softmax(1)
            image = p.unsqueeze(2) * (jacobian - (p.unsqueeze(2) * jacobian).sum(1, keepdim=True))
            total.addmm_(jacobian.flatten(0, 1).T, image.flatten(0, 1))
    return (total + total.T) / (2 * len(x))


def hessian(task: Task, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
    """The true Hessian of the mean loss as a dense matrix, for checks: of a network it may be indefinite."""
    params = weights.params

    def loss(params: Params) -> Tensor:
        return task.likelihood(task.logits(Weights(params, weights.buffers), x), y)

    with task.evaluating():
        blocks = jacrev(jacrev(loss))(params)
    rows = [torch.cat([blocks[a][b].reshape(params[a].numel(), -1) for b in params], dim=1) for a in params]
    return torch.cat(rows)


def output_product(p: Tensor, a: Tensor) -> Tensor:
    """(diag P - P P^T) a for every sample."""
    return p * (a - (p * a).sum(1, keepdim=True))


def require_cross_entropy(task: Task) -> None:
    require(
        task.likelihood is torch.nn.functional.cross_entropy,
        "the curvature of the outputs is known for the cross-entropy likelihood only; use a task with it",
    )


def _push(task: Task, weights: Weights, x: Tensor, vector: Params) -> tuple[Tensor, Tensor]:
    """Logits, and their shift J v along a direction in parameter space."""
    direction = zip_map(lambda v, p: v.to(p.dtype), vector, weights.params)
    with task.evaluating(), warnings.catch_warnings():
        # torch scripts its own rules of forward differentiation when they are first used, and warns that this is old.
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated", category=DeprecationWarning)
        result = jvp(lambda params: task.logits(Weights(params, weights.buffers), x), (weights.params,), (direction,))
    return result[0], result[1]
