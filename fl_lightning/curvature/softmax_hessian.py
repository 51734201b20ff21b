"""The exact Hessian of softmax regression, by blocks.

With inputs x~_i = (x_i, 1), class probabilities P_i and K classes, the Hessian of the mean cross-entropy is

    H = (1/m) sum_i (diag P_i - P_i P_i^T) (x) x~_i x~_i^T = sum_{k<l} (e_k - e_l)(e_k - e_l)^T (x) S_kl
    S_kl = (1/m) sum_i P_ik P_il x~_i x~_i^T

It needs no labels and equals the Fisher and the Gauss-Newton matrix. The second form takes K (K - 1) / 2 matrix
products (45 for ten classes) instead of K (K + 1) / 2, each of whose results is positive semi-definite, and H has its
null directions exactly: adding one vector to the weights of all classes changes no prediction.

Curvature averaged over the steps of local training costs no more than curvature at its end: every sample is used once
per epoch, so it is enough to average its P_ik P_il, taken at the moment of use, and to form the products once.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fl_lightning.models.likelihoods.classification import Classification
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params
from fl_lightning.system import activity

# Samples whose weighted copies are in memory at once.
BLOCK = 2000


def inputs_and_logits(task: Task, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The inputs x~ of the last layer and the logits, if the task is softmax regression; None if it is not.

    It is if its only trainable layer is linear and gives the logits themselves; what comes before may be any fixed
    function, such as flattening.
    """
    trainable = [
        module for module in task.model.modules() if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    if len(trainable) != 1 or type(trainable[0]) is not nn.Linear or set(task.names) != _names(task, trainable[0]):
        return None
    if type(task.likelihood) is not Classification:
        return None
    calls: list[tuple[Tensor, Tensor]] = []
    hook = trainable[0].register_forward_hook(lambda _, inputs, output: calls.append((inputs[0], output)))
    try:
        with task.evaluating():
            logits = task.logits(weights, x)
    finally:
        hook.remove()
    if len(calls) != 1 or calls[0][1] is not logits or calls[0][0].dim() != 2:
        return None
    inputs = calls[0][0]
    if trainable[0].bias is not None:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    return inputs, logits


def pair_weights(logits: Tensor) -> Tensor:
    """P_ik P_il for all pairs k < l of classes, in the order of `torch.triu_indices`."""
    p = logits.softmax(1)
    first, second = _pairs(p.shape[1], p.device)
    return p[:, first] * p[:, second]


def hessian(samples: Iterable[tuple[Tensor, Tensor]], params: Params) -> Tensor:
    """sum_i of the samples' curvature, rows and columns in torch's order of parameters.

    Args:
        samples: Batches of (x~, weights of the pairs of classes); the weights include the factor 1/m.
        params: The model's parameters, weight and possibly bias, for their shapes.
    """
    weight = next(iter(params.values()))
    classes, size = weight.shape[0], weight.shape[1] + (len(params) - 1)
    first, second = _pairs(classes, weight.device)
    sums = weight.new_zeros(len(first), size, size)
    seen = 0
    for inputs, shares in samples:
        for x, w in zip(torch.split(inputs, BLOCK), torch.split(shares, BLOCK), strict=True):
            activity.say(f"curvature, {seen} samples so far")
            seen += len(x)
            for pair, block in enumerate(sums):
                block.addmm_((x * w[:, pair : pair + 1]).T, x)
    return _assemble(sums, list(zip(first.tolist(), second.tolist(), strict=True)), classes, weight.shape[1])


def class_major_order(classes: int, num_inputs: int) -> Tensor:
    """Where the parameters of torch's order (all weights, then all biases) stand if each class has its bias last.

    For a vector or matrix in class-major order, `v[class_major_order(K, n)]` is in torch's order.
    """
    places = torch.arange(classes * (num_inputs + 1)).view(classes, num_inputs + 1)
    return torch.cat([places[:, :-1].reshape(-1), places[:, -1]])


def _assemble(sums: Tensor, pairs: list[tuple[int, int]], classes: int, num_inputs: int) -> Tensor:
    size = sums.shape[1]
    biased = size > num_inputs
    result = sums.new_zeros(classes * size, classes * size)
    biases = classes * num_inputs

    def place(k: int, l: int, block: Tensor) -> None:  # noqa: E741 - the paper's letters
        rows, columns = slice(k * num_inputs, (k + 1) * num_inputs), slice(l * num_inputs, (l + 1) * num_inputs)
        result[rows, columns] = block[:num_inputs, :num_inputs]
        if biased:
            result[rows, biases + l] = block[:num_inputs, -1]
            result[biases + k, columns] = block[-1, :num_inputs]
            result[biases + k, biases + l] = block[-1, -1]

    own = sums.new_zeros(classes, size, size)
    for (k, l), block in zip(pairs, sums, strict=True):  # noqa: E741
        symmetric = (block + block.T) / 2  # the product is symmetric up to rounding only
        own[k] += symmetric
        own[l] += symmetric
        place(k, l, -symmetric)
        place(l, k, -symmetric)
    for k in range(classes):
        place(k, k, own[k])
    return result


def _pairs(classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    first, second = torch.triu_indices(classes, classes, offset=1, device=device)
    return first, second


def _names(task: Task, layer: nn.Linear) -> set[str]:
    return {name for name, p in task.model.named_parameters() if any(p is own for own in layer.parameters())}
