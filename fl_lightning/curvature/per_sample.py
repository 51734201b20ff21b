"""Squared per-sample gradients, (1/b) sum_i (grad log p(y_i | x_i, theta))^2, without a loop over samples.

In a linear layer with inputs a_i and gradients d_i of the loss at its outputs, the gradient of sample i is d_i a_i^T,
and its square d_i^2 (a_i^2)^T: the sum over samples is one matrix product, and no per-sample gradient is ever formed.
Convolutions are linear in their patches. Networks with other parameters go through torch.func, which forms all
per-sample gradients; on one CPU thread that took 24 times as long for 784-500-300-10, 3 times for the CIFAR CNN.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import unfold

from fl_lightning import streams
from fl_lightning.curvature import layers
from fl_lightning.errors import require
from fl_lightning.models.inputs import Inputs, each, part, split
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, cast_like, weighted_sum, zip_map

# Numbers in all the per-sample gradients that are in memory at once: 64 MB in float32.
LARGEST_BLOCK = 2**24


def squared_gradients(task: Task, weights: Weights, x: Inputs, y: Tensor, mask: Tensor | None = None) -> Params:
    """Mean over the batch of the squared per-sample gradients, in the mode that the task's model is in.

    Args:
        task: Model and likelihood.
        weights: Where to evaluate.
        x: Inputs.
        y: Labels.
        mask: Which samples count (1 or 0), for padded batches under vmap.
    """
    require(
        not task.has_batch_norm,
        "per-sample gradients do not exist in a network with BatchNorm, whose samples depend on each other; "
        "use gradients of whole batches, or a model without BatchNorm",
    )
    # The training step that follows draws the same dropout masks, with squares or without.
    with streams.undisturbed():
        if mask is not None:  # hooks and autograd do not work under vmap
            return from_samples(task, weights, x, y, mask)
        if task.step is not None:
            return one_by_one(task, weights, x, y)
        by_layers = from_layers(task, weights, x, y)
        if by_layers is not None:
            return by_layers
        size = max(1, LARGEST_BLOCK // task.num_params)
        blocks = list(zip(split(x, size), torch.split(y, size), strict=True))
        means = [from_samples(task, weights, *block) for block in blocks]
    shares = [len(labels) / len(y) for _, labels in blocks]
    return cast_like(weighted_sum(means, shares), weights.params)


def from_samples(task: Task, weights: Weights, x: Inputs, y: Tensor, mask: Tensor | None = None) -> Params:
    """For any network: all per-sample gradients at once by vmap, then their squares."""

    def sample_loss(params: Params, x: Inputs, y: Tensor) -> Tensor:
        alone = each(lambda one: one.unsqueeze(0), x)
        return task.loss(Weights(params, weights.buffers), alone, y.unsqueeze(0))

    grads = vmap(grad(sample_loss), in_dims=(None, 0, 0), randomness="different")(weights.params, x, y)
    share = torch.ones(len(y), dtype=task.dtype, device=y.device) if mask is None else mask
    share = share / share.sum().clamp(min=1)
    return {name: torch.tensordot(share, g.square(), dims=1) for name, g in grads.items()}


def one_by_one(task: Task, weights: Weights, x: Inputs, y: Tensor) -> Params:
    """For the training step of a LightningModule, of which nothing is known: sample by sample."""
    places = [slice(i, i + 1) for i in range(len(y))]
    squares = (zip_map(torch.square, task.gradient(weights, part(x, place), y[place])) for place in places)
    return cast_like(weighted_sum(squares, [1 / len(y)] * len(y)), weights.params)


def from_layers(task: Task, weights: Weights, x: Inputs, y: Tensor) -> Params | None:
    """For networks whose parameters are all those of linear and convolutional layers used once; None for others."""
    if not all(map(layers.is_plain, layers.trained_layers(task).values())):
        return None
    recording = layers.record(task, weights, x)
    if recording.rest:
        return None
    with torch.enable_grad():
        losses = task.likelihood(recording.logits, y, reduction="sum")
    gradients = torch.autograd.grad(losses, [call.output for call in recording.calls])
    squares: Params = {}
    for call, gradient in zip(recording.calls, gradients, strict=True):
        found = RULES[type(call.layer)](call.layer, call.input, gradient) if len(gradient) == len(y) else None
        if found is None:
            return None
        squares |= {name: value / len(y) for name, value in zip(call.names, found, strict=False)}
    return {name: squares[name] for name in weights.params}


def _linear(layer: nn.Linear, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor] | None:
    if inputs.dim() != 2:
        return None  # the gradient of a sample is a sum over its positions
    squares = gradients.square()
    return squares.T @ inputs.square(), squares.sum(0)


def _convolution(layer: nn.Conv2d, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor] | None:
    if inputs.dim() != 4:
        return None
    assert not isinstance(layer.padding, str)
    patches = unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    at_places = gradients.flatten(2)
    kernels = torch.bmm(at_places, patches.transpose(1, 2))  # the gradient of every sample
    return kernels.square().sum(0).view_as(layer.weight), at_places.sum(2).square().sum(0)


# The sums over samples of the squared gradients of weight and bias.
RULES: dict[type, Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor] | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
}
