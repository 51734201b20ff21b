"""What goes into and comes out of the linear and convolutional layers of a network, in one forward pass.

The loss depends on such a layer's parameters only through its outputs, which are linear in them: inputs a and gradients
g of the loss at the outputs are all that per-sample gradients (g a^T), their squares and Kronecker factors need. A
convolution is linear in its patches.

B of an adapter (`models/lora.py`) is such a layer, too, where A is frozen: its input is A times that of the layer.

A network may hold other parameters, too: `Recording.rest` names those that belong to no plain layer. A layer is plain
if it is an `nn.Linear` or `nn.Conv2d` whose computation is unchanged (hooks, weight norm, parametrizations,
groups, padding other than zeros), that is called once, and whose weights no other layer uses (tied weights, a weight
used outside of its layer).
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from fl_lightning.models.lora import Adapter
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import zip_map

Plain = nn.Linear | nn.Conv2d


class Call(NamedTuple):
    """A plain layer at work.

    Attributes:
        weight: Name of its weight among the model's parameters.
        bias: Name of its bias, or None if it has none that is trained.
        layer: The layer itself.
        input: What went in, without gradient.
        output: What came out, as a part of the graph of the logits.
    """

    weight: str
    bias: str | None
    layer: Plain
    input: Tensor
    output: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def gives(self, logits: Tensor) -> bool:
        """Whether its outputs are the logits; a forward pass that overflows has NaN in both."""
        same = self.output.shape == logits.shape
        return same and torch.allclose(self.output, logits, rtol=0, atol=0, equal_nan=True)


class Recording(NamedTuple):
    """One forward pass.

    Attributes:
        logits: The network's outputs, with their graph.
        calls: The plain layers, in the order of the forward pass.
        rest: The names of all parameters that belong to none of them.
    """

    logits: Tensor
    calls: tuple[Call, ...]
    rest: tuple[str, ...]


def record(task: Task, weights: Weights, x: Tensor) -> Recording:
    """The plain layers of a network at work on these inputs, in the mode that the task's model is in.

    Gradients at the layers follow by `torch.autograd.grad(..., [call.output for call in calls])`.
    """
    trained = trained_layers(task)
    plain = {name: layer for name, layer in trained.items() if is_plain(layer)}
    adapted = _adapted(task, trained)
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in weights.params.items()}
        buffers = zip_map(torch.clone, weights.buffers)  # in training mode BatchNorm writes into them
        every = {**plain, **{name: task.model.get_submodule(name) for name in adapted}}
        met, logits = _met(task, Weights(leaves, buffers), every, x)
    uses = dict(zip(leaves, _uses(logits, leaves.values()), strict=True))
    names = [one.name for one in met]
    calls = []
    for name, given, version, output in met:
        weight, bias = (f"{name}.{key}" if name else key for key in ("weight", "bias"))
        layer, is_kept = every[name], given._version == version  # not written over by what follows
        if name in adapted:
            weight = f"{adapted[name]}.b"
            given, layer = _projected(_layer(layer), task.model.get_submodule(adapted[name]), given)
        own = [key for key in (weight, bias) if key in leaves]
        if (
            weight in leaves
            and names.count(name) == 1
            and all(uses[key] == 1 for key in own)  # not tied to another layer, used outside of its own, or not at all
            and output.requires_grad
            and is_kept
        ):
            calls.append(Call(weight, bias if bias in own else None, _layer(layer), given, output))
    known = {key for call in calls for key in call.names}
    return Recording(logits, tuple(calls), tuple(key for key in leaves if key not in known))


def trained_layers(task: Task) -> dict[str, nn.Module]:
    """The modules that have trainable parameters of their own, by name."""
    return {
        name: module
        for name, module in task.model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    }


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is linear or convolutional, with its computation unchanged.

    Weights that are computed from others (weight norm, parametrizations) are not parameters of the layer itself.
    """
    changed = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
    if changed or layer._parameters.keys() != {"weight", "bias"}:
        return False
    if type(layer) is nn.Conv2d:
        return _is_usual(layer)
    return type(layer) is nn.Linear


def _adapted(task: Task, trained: Mapping[str, nn.Module]) -> dict[str, str]:
    """The names of layers whose adapters have a frozen A, and of these adapters."""
    found: dict[str, str] = {}
    for path, adapter in trained.items():
        name = path.removesuffix(".parametrizations.weight.0").removeprefix("parametrizations.weight.0")
        if isinstance(adapter, Adapter) and name != path and not adapter.a.requires_grad:
            layer = task.model.get_submodule(name)
            own = [parameter.requires_grad for parameter in layer.parameters(recurse=False)]
            if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and _is_usual(layer)):
                found |= {} if any(own) else {name: path}
    return found


def _projected(layer: Plain, adapter: nn.Module, x: Tensor) -> tuple[Tensor, Plain]:
    """What B of an adapter is multiplied with, and the layer that it is by itself: (alpha / rank) A times the input.

    A convolution by A comes before one of a single pixel by B.
    """
    assert isinstance(adapter, Adapter)
    a, rows = adapter.scale * adapter.a.detach(), len(adapter.b)
    if isinstance(layer, nn.Conv2d):
        kernels = a.view(-1, *layer.weight.shape[1:])
        inner = nn.functional.conv2d(x, kernels, None, layer.stride, layer.padding, layer.dilation)
        return inner, nn.Conv2d(len(a), rows, 1, bias=False, device="meta")
    return nn.functional.linear(x, a), nn.Linear(len(a), rows, bias=False, device="meta")


def _is_usual(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def input_rows(layer: Plain, inputs: Tensor) -> Tensor:
    """What a layer's weight is multiplied with, one row per output: inputs of a linear layer, patches of a convolution.

    Rows of one sample stand together, in the order of the places of `gradient_rows`.
    """
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        patches = unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return patches.transpose(1, 2).reshape(-1, patches.shape[1])
    return inputs.reshape(-1, inputs.shape[-1])


def gradient_rows(layer: Plain, gradients: Tensor) -> Tensor:
    """Gradients at a layer's outputs as a matrix, one row per place."""
    if isinstance(layer, nn.Conv2d):
        return gradients.flatten(2).transpose(1, 2).reshape(-1, gradients.shape[1])
    return gradients.reshape(-1, gradients.shape[-1])


class _Met(NamedTuple):
    """A layer that was called: its name, input and output, and how often the input had been written to by then."""

    name: str
    input: Tensor
    version: int
    output: Tensor


def _met(task: Task, weights: Weights, layers: Mapping[str, nn.Module], x: Tensor) -> tuple[list[_Met], Tensor]:
    """The calls of these layers in a forward pass, and the logits."""
    met: list[_Met] = []

    def remember(
        name: str, layer: nn.Module, positional: tuple[Tensor, ...], named: Mapping[str, Tensor], output: Tensor
    ) -> Tensor:
        (given,) = (*positional, *named.values())
        met.append(_Met(name, given.detach(), given._version, output))
        return output.clone()  # what follows may write over it, as an in-place ReLU does

    hooks = [layer.register_forward_hook(partial(remember, name), with_kwargs=True) for name, layer in layers.items()]
    try:
        logits = task.logits(weights, x)
    finally:
        for hook in hooks:
            hook.remove()
    return met, logits


def _uses(result: Tensor, leaves: Iterable[Tensor]) -> list[int]:
    """How many operations on the way to a result take each of these leaves."""
    numbers = {id(leaf): 0 for leaf in leaves}
    seen, ahead = {result.grad_fn}, [result.grad_fn]
    while ahead:
        operation = ahead.pop()
        for source, _ in operation.next_functions if operation is not None else ():
            leaf = getattr(source, "variable", None)
            if leaf is not None:
                numbers[id(leaf)] = numbers.get(id(leaf), 0) + 1
            elif source not in seen:
                seen.add(source)
                ahead.append(source)
    return list(numbers.values())


def _layer(module: nn.Module) -> Plain:
    assert isinstance(module, nn.Linear | nn.Conv2d)
    return module
