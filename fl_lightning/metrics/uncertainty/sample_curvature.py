"""The final round: the curvature of every client's data at the common mean, and their sum.

    H = sum_n pi_n H_n,  pi_n = m_n / m

H_n is the mean curvature of client n's samples: the diagonal or the full Gauss-Newton matrix, or the Kronecker factors
A and G of every layer. All of these are means over samples at one model, so that H is the curvature of the pooled data,
whatever the partition; without aggregation error. All clients take part once, without training.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.curvature import full, gauss_newton, kronecker_factors, layers, softmax_hessian
from fl_lightning.curvature.fisher import diagonal_fisher
from fl_lightning.curvature.per_sample import RULES
from fl_lightning.data.batches import ClientData
from fl_lightning.errors import require
from fl_lightning.metrics.uncertainty.linearised import last_call, require_plain, rows_of
from fl_lightning.metrics.uncertainty.settings import Form, GradientKind
from fl_lightning.models.inputs import Inputs, split
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, weighted_sum
from fl_lightning.system import activity, memory

MATRIX = "matrix"
# Kronecker factors are named by their layer's weight after these.
INPUTS, GRADIENTS = "inputs:", "slopes:"


class Pooled(NamedTuple):
    """What the server knows after the final round.

    Attributes:
        curvature: H by named tensors, in float64.
        loss: Mean training loss at the mean.
        samples: m.
        sent: Numbers that the clients have sent; of a symmetric matrix, its upper triangle.
    """

    curvature: Params
    loss: float
    samples: int
    sent: int


def final_round(
    task: Task, weights: Weights, clients: Sequence[ClientData], form: Form, gradients: GradientKind
) -> Pooled:
    """The curvature of all clients' data at one model, and their mean loss there."""
    clients = [data for data in clients if len(data)]
    total = sum(map(len, clients))
    check(task, weights, clients[0], form)
    messages: list[Params] = []
    losses, sent = 0.0, 0
    for number, data in enumerate(clients):
        activity.say(f"final round, {number} of {len(clients)} clients")
        message = of_client(task, weights, data, form, gradients)
        losses += total_loss(task, weights, data)
        sent += sum(_size(value) for value in message.values()) + 1
        shares = [len(data) / total] if not messages else [1.0, len(data) / total]
        messages = [weighted_sum([*messages, message], shares)]
    require_finite(messages[0])
    return Pooled(messages[0], losses / total, total, sent)


def require_finite(curvature: Params) -> None:
    """Refuse a curvature from which no posterior can be made."""
    for name, value in curvature.items():
        require(
            bool(torch.isfinite(value).all()),
            f"the curvature at the final model is not finite ({name}): training has diverged; lower training.lr",
        )


def check(task: Task, weights: Weights, data: ClientData, form: Form) -> None:
    """Refuse a network that the form does not cover, and a matrix that exceeds the memory."""
    gauss_newton.require_cross_entropy(task)
    recording = _recorded(task, weights, data.fetch(data.indices[:1])[0])
    if form == "last_layer":
        call = last_call(recording)
        size = sum(weights.params[name].numel() for name in call.names)
    else:
        size = task.num_params
    if form == "kron":
        require_plain(recording)
    if form in ("full", "last_layer"):
        needed = 5 * 8 * size**2  # the sum, a client's, and what eigh takes
        what = f"uncertainty.form {form} of {size:,} parameters"
        memory.require_room(what, needed, task.device, "use --uncertainty.form diagonal")


def of_client(task: Task, weights: Weights, data: ClientData, form: Form, gradients: GradientKind) -> Params:
    """What one client sends: the mean curvature of its samples at the mean."""
    match form:
        case "diagonal":
            if gradients == "empirical":
                return diagonal_fisher(task, weights, data, "per_sample", None)
            return diagonal_gauss_newton(task, weights, data)
        case "kron":
            found = kronecker_factors.factors(task, weights, data, gradients)
            named = {f"{INPUTS}{name}": value for name, value in found.inputs.items()}
            return named | {f"{GRADIENTS}{name}": value for name, value in found.gradients.items()}
        case "last_layer":
            return {MATRIX: last_layer(task, weights, data)}
        case "full":
            return {MATRIX: full.at(task, weights, data)}


def diagonal_gauss_newton(task: Task, weights: Weights, data: ClientData) -> Params:
    """The diagonal of (1/m) sum_i J_i^T (diag p_i - p_i p_i^T) J_i, by a backward pass for each class.

    With diag p - p p^T = sum_k p_k (e_k - p)(e_k - p)^T it is a sum of squares of pushed-back gradients.
    """
    total: Params = {}
    for x, _ in data.blocks():
        recording = _recorded(task, weights, x)
        outputs = [call.output for call in recording.calls]
        p = recording.logits.detach().softmax(1)
        for name, value in _squares_of_others(task, weights, x, p, recording.rest).items():
            total[name] = total.get(name, 0) + value / len(data)
        for k in range(p.shape[1]) if outputs else ():
            seed = -p.clone()
            seed[:, k] += 1
            pushed = torch.autograd.grad(
                recording.logits, outputs, p[:, k : k + 1].sqrt() * seed, retain_graph=k + 1 < p.shape[1]
            )
            for call, gradient in zip(recording.calls, pushed, strict=True):
                squares = RULES[type(call.layer)](call.layer, call.input, gradient) or _at_places(call, gradient)
                for name, value in zip(call.names, squares, strict=False):
                    share = value.double() / len(data)
                    total[name] = total[name].add_(share) if name in total else share
    return {name: total[name] for name in weights.params}


def _at_places(call: layers.Call, gradient: Tensor) -> tuple[Tensor, ...]:
    """Sums over samples of the squared gradients of a layer with several places, such as tokens."""
    rows = rows_of(call)
    at = layers.gradient_rows(call.layer, gradient).view(*rows.shape[:2], -1)
    squares = (at.mT @ rows).square().sum(0)
    return (squares,) if call.bias is None else (squares[:, :-1], squares[:, -1])


def _squares_of_others(task: Task, weights: Weights, x: Inputs, p: Tensor, names: Sequence[str]) -> Params:
    """The same sum for the parameters of these names, outside of plain layers, by their Jacobians."""
    total: Params = {}
    size = p.shape[1] * sum(weights.params[name].numel() for name in names)
    block = max(1, gauss_newton.LARGEST_BLOCK // max(1, size))
    for inputs, shares in zip(split(x, block), torch.split(p, block), strict=True) if names else ():
        with task.in_mode(False):
            found = gauss_newton.jacobians(task, weights, inputs, names)
        for name, jacobian in found.items():
            mean = torch.einsum("bk,bk...->b...", shares, jacobian)
            squares = torch.einsum("bk,bk...->...", shares, (jacobian - mean.unsqueeze(1)).square())
            total[name] = total.get(name, 0) + squares.double()
    return total


def last_layer(task: Task, weights: Weights, data: ClientData) -> Tensor:
    """The full Gauss-Newton matrix of the last layer, which is the Hessian of its loss."""
    first = last_call(_recorded(task, weights, data.fetch(data.indices[:1])[0]))

    def samples() -> list[tuple[Tensor, Tensor]]:
        found = []
        for x, _ in data.blocks():
            recording = _recorded(task, weights, x)
            rows = rows_of(last_call(recording)).squeeze(1)
            pairs = softmax_hessian.pair_weights(recording.logits.detach().double()) / len(data)
            found.append((rows.double(), pairs))
        return found

    return softmax_hessian.hessian(samples(), {name: weights.params[name].double() for name in first.names})


def _recorded(task: Task, weights: Weights, x: Tensor) -> layers.Recording:
    with task.in_mode(False):
        return layers.record(task, weights, x)


def total_loss(task: Task, weights: Weights, data: ClientData) -> float:
    """The sum of the losses of all samples."""
    with task.evaluating():
        return sum(float(task.likelihood(task.logits(weights, x), y, reduction="sum")) for x, y in data.blocks())


def _size(value: Tensor) -> int:
    symmetric = value.dim() == 2 and value.shape[0] == value.shape[1] and bool(torch.equal(value, value.T))
    return value.shape[0] * (value.shape[0] + 1) // 2 if symmetric else value.numel()
