"""The Gauss-Newton matrix of any network: G = (1/m) sum_i J_i^T H_i J_i.

J_i is the Jacobian of the outputs for sample i, H_i the curvature of its loss there, which the likelihood knows: for
classification diag P_i - P_i P_i^T with its class probabilities P_i. G is positive semi-definite, needs no labels, and
is the Fisher information of the model's own predictions; for softmax regression, whose logits are linear in the
parameters, it is the Hessian of the loss. Products with a vector never form it.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import jacrev, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_lightning.errors import require
from fl_lightning.models.inputs import Inputs, each, part, split
from fl_lightning.models.likelihoods.classification import Classification
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, zip_map

# Numbers in the Jacobians that are in memory at once: 64 MB in float32.
LARGEST_BLOCK = 2**24

Batches = Iterable[tuple[Inputs, Tensor]]


def quadratics(task: Task, weights: Weights, batches: Batches, vectors: Sequence[Params]) -> list[float]:
    """v^T G v; for classification (1/m) sum_i Var_{P_i}(J_i v), the mean variance of the logits' shift.

    For several vectors at once: every batch is prepared once.
    """
    totals, size = [0.0] * len(vectors), 0
    for x, y in batches:
        for index, vector in enumerate(vectors):
            logits, shift = _push(task, weights, x, vector)
            totals[index] += float(task.likelihood.quadratic(logits, y, shift))
        size += len(y)
    return [total / size for total in totals]


def matrix(task: Task, weights: Weights, x: Inputs, y: Tensor) -> Tensor:
    """G of one batch as a dense matrix, rows and columns in the order of `flatten`: b K d^2 multiplications."""
    params = weights.params
    size = sum(value.numel() for value in params.values())
    total = torch.zeros(size, size, dtype=task.dtype, device=task.device)
    with task.evaluating():
        outputs = task.logits(weights, part(x, slice(1)))
        block = max(1, LARGEST_BLOCK // (outputs.numel() * size))
        for inputs, targets in zip(split(x, block), torch.split(y, block), strict=True):
            gradients = jacobians(task, weights, inputs, params)
            jacobian = torch.cat([gradients[name].flatten(outputs.dim()) for name in params], dim=-1)  # (b, K, d)
            image = task.likelihood.product(task.logits(weights, inputs), targets, jacobian)
            total.addmm_(jacobian.flatten(0, -2).T, image.flatten(0, -2))
    return (total + total.T) / (2 * len(y))


def jacobians(task: Task, weights: Weights, x: Inputs, names: Iterable[str]) -> Params:
    """J_i of every sample for the parameters of these names, of any kind: samples x outputs x parameters."""

    def outputs_of(params: Params, sample: Inputs) -> Tensor:
        every = Weights({**weights.params, **params}, weights.buffers)
        return task.logits(every, each(lambda one: one.unsqueeze(0), sample)).squeeze(0)

    with plain_attention():
        found: Params = vmap(jacrev(outputs_of), in_dims=(None, 0))({name: weights.params[name] for name in names}, x)
    return found


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by products of matrices, in this block: vmap would take its own kernels sample by sample."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def require_cross_entropy(task: Task) -> None:
    require(
        type(task.likelihood) is Classification,
        "the posterior's predictions are known for the cross-entropy likelihood only, got a task of "
        f"{task.likelihood.task}; use a task with it",
    )


def _push(task: Task, weights: Weights, x: Inputs, vector: Params) -> tuple[Tensor, Tensor]:
    """Logits, and their shift J v along a direction in parameter space."""
    direction = zip_map(lambda v, p: v.to(p.dtype), vector, weights.params)
    with task.evaluating(), warnings.catch_warnings():
        # torch scripts its own rules of forward differentiation when they are first used, and warns that this is old.
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated", category=DeprecationWarning)
        result = jvp(lambda params: task.logits(Weights(params, weights.buffers), x), (weights.params,), (direction,))
    return result[0], result[1]
