"""Kronecker factors of the curvature of linear and convolutional layers (K-FAC).

For a layer with inputs a~ = (a, 1), weight and bias M = [W, b] and gradients g of the log-likelihood at its outputs,
the curvature of M is approximated by G (x) A:

    A = (1/m) sum_i sum_s a~_is a~_is^T
    G = (1/(m S)) sum_i sum_s E[g_is g_is^T]

m samples i, S places s: the patches of a convolution, one place for a linear layer. (That is the convention called
"expand".) For a single sample G (x) A is the exact Gauss-Newton block of a linear layer; over several samples the mean
of the products is replaced by the product of the means. A needs no labels and no backward pass.

Both are taken in evaluation mode, on samples as they are stored, without augmentation.

Martens, Grosse: Optimizing Neural Networks with Kronecker-factored Approximate Curvature, ICML 2015. Grosse, Martens: A
Kronecker-factored approximate Fisher matrix for convolution layers, ICML 2016.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.curvature.layers import Call, Recording, gradient_rows, input_rows, record
from fl_lightning.data.batches import BLOCK, ClientData
from fl_lightning.models.likelihoods.base import require_curvature
from fl_lightning.models.task import Task, Weights
from fl_lightning.system import activity

# Which gradients: the roots of the curvature at the outputs (Gauss-Newton; for classification those of all classes,
# weighted by their probabilities: one backward pass for each), those of one label drawn from the predictions, or those
# of the label that the sample has.
GradientKind = Literal["exact", "sampled", "empirical"]

# Numbers in the patches that are in memory at once: 64 MB in float32.
LARGEST_BLOCK = 2**24


class Factors(NamedTuple):
    """The factors of every plain layer, by the name of its weight, in float64.

    Attributes:
        inputs: A, (i + 1) x (i + 1) with the bias last; i x i for a layer without bias.
        gradients: G, o x o; empty if no gradients were asked for.
        rest: The names of the parameters that belong to no plain layer.
    """

    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    rest: tuple[str, ...]


def factors(
    task: Task,
    weights: Weights,
    data: ClientData,
    gradients: GradientKind | None = "exact",
    stream: torch.Generator | None = None,
    block: int = BLOCK,
) -> Factors:
    """The factors of all the client's samples at one model, block by block.

    Args:
        task: Model and likelihood.
        weights: Where to evaluate.
        data: The client's samples.
        gradients: Which gradients G is made of; None leaves G out, and with it all backward passes.
        stream: From which `sampled` draws its labels; each sample has its own number, whatever the blocks.
        block: Samples per forward pass.
    """
    if gradients in ("exact", "sampled"):
        require_curvature(task.likelihood)
    draws: Tensor | None = None
    second_moments: dict[str, Tensor] = {}
    gradient_moments: dict[str, Tensor] = {}
    rest: tuple[str, ...] = ()
    seen = 0
    with task.in_mode(False):
        for x, y in data.blocks(block):
            activity.say(f"Kronecker factors, {seen} of {len(data)} samples")
            recording = record(task, weights, x)
            rest = recording.rest
            for call in recording.calls:
                _add(second_moments, call.weight, _input_moment(call))
            if gradients == "sampled" and draws is None:
                each = task.likelihood.num_draws(recording.logits)
                draws = torch.rand(len(data), each, generator=stream, dtype=torch.float64)
            if gradients is not None:
                drawn = torch.empty(0) if draws is None else draws[seen : seen + len(y)]
                for seed in _seeds(task, recording.logits, y, gradients, drawn):
                    _add_gradients(gradient_moments, recording, seed)
            seen += len(y)
    return Factors(
        {name: moment / len(data) for name, moment in second_moments.items()},
        {name: moment / len(data) for name, moment in gradient_moments.items()},
        rest,
    )


def _input_moment(call: Call) -> Tensor:
    """The sum of a~ a~^T over samples and places."""
    size = call.layer.weight[0].numel()
    biased = int(call.bias is not None)
    total = torch.zeros(size + biased, size + biased, dtype=torch.float64, device=call.input.device)
    places = max(1, call.output[0].numel() // call.layer.weight.shape[0])
    for part in torch.split(call.input, max(1, LARGEST_BLOCK // (size * places))):
        rows = input_rows(call.layer, part)
        total[:size, :size] += rows.T @ rows
        if biased:
            sums = rows.sum(0)
            total[-1, :size] += sums
            total[:size, -1] += sums
            total[-1, -1] += len(rows)
    return total


def _seeds(task: Task, logits: Tensor, y: Tensor, gradients: GradientKind, draws: Tensor) -> Iterator[Tensor]:
    """Gradients at the logits, whose second moments add up to the curvature there: what backward passes start from."""
    if gradients == "empirical":
        with torch.enable_grad():
            outputs = logits.detach().requires_grad_()
            losses = task.likelihood(outputs, y, reduction="sum")
        yield torch.autograd.grad(losses, outputs)[0]
        return
    if gradients == "sampled":
        yield task.likelihood.sampled(logits.detach(), y, draws)
    else:
        yield from task.likelihood.roots(logits.detach(), y)


def _add_gradients(moments: dict[str, Tensor], recording: Recording, seed: Tensor) -> None:
    """Push gradients back from the logits to every layer, and add sum g g^T / S to the layers' moments."""
    outputs = [call.output for call in recording.calls]
    found = torch.autograd.grad(recording.logits, outputs, seed, retain_graph=True) if outputs else ()
    for call, gradient in zip(recording.calls, found, strict=True):
        rows = gradient_rows(call.layer, gradient)
        _add(moments, call.weight, (rows.T @ rows).double().mul_(len(seed) / len(rows)))


def _add(moments: dict[str, Tensor], name: str, value: Tensor) -> None:
    moments[name] = moments[name].add_(value) if name in moments else value
