"""A network linearised at its mean, layer by layer: the Jacobian of linear and convolutional layers is not formed.

In a linear layer with inputs a~ = (a, 1) and gradients g_k of the logit f_k at its outputs, the Jacobian of f_k is the
outer product g_k a~^T; in a convolution it is the sum of those of its places. The two are kept apart. Any other
parameter counts as a layer with the input 1, whose gradients are its Jacobian.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.curvature import gauss_newton, layers
from fl_lightning.curvature.layers import Call
from fl_lightning.errors import UserError, require
from fl_lightning.models.inputs import Inputs
from fl_lightning.models.task import Task, Weights


class Layer(NamedTuple):
    """One layer of a linearised network.

    Attributes:
        rows: a~, samples x places x inputs, the one for the bias last.
        gradients: g_k, samples x classes x places x outputs.
    """

    rows: Tensor
    gradients: Tensor


class Linearised(NamedTuple):
    """The logits of some inputs, and how they change with the parameters of every layer, by the name of its weight."""

    logits: Tensor
    layers: dict[str, Layer]


def linearise(task: Task, weights: Weights, x: Inputs, last_only: bool = False) -> Linearised:
    """Logits and gradients in evaluation mode: one forward pass, and a backward pass for each class.

    Args:
        task: The network.
        weights: Where it is linearised.
        x: Inputs.
        last_only: Whether the last layer is enough, which needs no backward pass.
    """
    with task.in_mode(False):
        recording = layers.record(task, weights, x)
        logits = recording.logits.detach()
        if last_only:
            last = last_call(recording)
            gradients = torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)
            gradients = gradients[None, :, None].expand(len(logits), -1, -1, -1)
            return Linearised(logits, {last.weight: Layer(rows_of(last), gradients)})
        outputs = [call.output for call in recording.calls]
        found: list[list[Tensor]] = [[] for _ in outputs]
        for k in range(logits.shape[1]) if outputs else ():
            seed = torch.zeros_like(logits)
            seed[:, k] = 1
            pushed = torch.autograd.grad(recording.logits, outputs, seed, retain_graph=True)
            for parts, call, gradient in zip(found, recording.calls, pushed, strict=True):
                rows = layers.gradient_rows(call.layer, gradient)
                parts.append(rows.view(len(logits), -1, rows.shape[1]))
        named = {
            call.weight: Layer(rows_of(call), torch.stack(parts, 1))
            for call, parts in zip(recording.calls, found, strict=True)
        }
        return Linearised(logits, named | _of_others(task, weights, x, recording.rest))


def _of_others(task: Task, weights: Weights, x: Inputs, names: Sequence[str]) -> dict[str, Layer]:
    """Parameters outside of plain layers."""
    found = gauss_newton.jacobians(task, weights, x, names) if names else {}
    return {name: Layer(one.new_ones(len(one), 1, 1), one.flatten(2).unsqueeze(2)) for name, one in found.items()}


def rows_of(call: Call) -> Tensor:
    """a~ of every sample and place."""
    rows = layers.input_rows(call.layer, call.input)
    rows = rows.view(len(call.input), -1, rows.shape[1])
    return rows if call.bias is None else torch.cat([rows, torch.ones_like(rows[..., :1])], dim=2)


def require_plain(recording: layers.Recording) -> None:
    """Refuse a network with parameters outside of linear and convolutional layers."""
    require(
        not recording.rest,
        "uncertainty.form kron supports only linear and convolutional layers that are used once; the parameter "
        f"{''.join(recording.rest[:1])} is not of one; use --uncertainty.form diagonal, or full for few",
    )


def last_call(recording: layers.Recording) -> Call:
    """The linear layer whose outputs are the logits."""
    for call in reversed(recording.calls):
        if call.gives(recording.logits):
            return call
    raise UserError(
        "uncertainty.form last_layer expected a network that ends in a linear layer, got one whose logits are computed "
        "otherwise, or are not trained; use --uncertainty.form diagonal"
    )
