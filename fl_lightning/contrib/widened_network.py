"""Networks with room for more hidden units: those that are not in use have all weights zero.

A unit with zero weights in, bias and weights out has zero gradients if its activation is 0 at 0, so that it stays as it
is through any training by SGD; a small network inside a wide one trains like the small one. Networks can thus grow
without tensors that change their shapes.

A layer is a pair of a weight and a bias; a weight is looked at as (units out, units in, block): one entry per pair of
units between fully connected layers, a kernel between convolutions, the pixels of a channel where images are flattened.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning import streams
from fl_lightning.data.batches import ClientData
from fl_lightning.errors import require
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, zip_map

# At most as many units of a layer, unless there are more to begin with: the cap of the published codes.
MOST_UNITS = 700
EXAMPLES = 8


class Layer(NamedTuple):
    """The names of a layer's parameters."""

    weight: str
    bias: str


Rows = Mapping[int, Tensor]


def layers_of(params: Params) -> list[Layer]:
    """The layers from the input to the output."""
    return [Layer(n, n.removesuffix("weight") + "bias") for n in params if n.endswith("weight")]


def pairs(params: Params, layers: Sequence[Layer], number: int) -> Tensor:
    """The weight of a layer as (units out, units in, block)."""
    weight = params[layers[number].weight]
    if number == 0:
        return weight.reshape(len(weight), -1, 1)
    return weight.reshape(len(weight), len(params[layers[number - 1].bias]), -1)


def widened(module: nn.Module, growth: float, convolutions: bool, method: str) -> nn.Module:
    """The module with more room in its hidden layers; it computes what it did before.

    Args:
        module: A chain of linear layers and convolutions; changed in place.
        growth: How many times as many units there is room for, up to `MOST_UNITS`.
        convolutions: Whether convolutions are allowed.
        method: Name of the method, for error messages.
    """
    names = _chain(module, convolutions, method)
    before = 0  # units of the layer before, and room for them
    room = 0
    for position, name in enumerate(names):
        layer = module.get_submodule(name)
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        units = len(layer.weight)
        is_last = position == len(names) - 1
        new_room = units if is_last else max(units, min(int(units * growth), MOST_UNITS))
        inputs = layer.weight.shape[1]
        new_inputs = inputs // before * room if before else inputs
        wide: nn.Linear | nn.Conv2d
        if isinstance(layer, nn.Linear):
            wide = nn.Linear(new_inputs, new_room)
        else:
            sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
            wide = nn.Conv2d(new_inputs, new_room, *sizes, padding_mode=layer.padding_mode)  # type: ignore[arg-type]
        wide = wide.to(layer.weight.device, layer.weight.dtype)
        with torch.no_grad():
            wide.weight.zero_()
            wide.weight[:units, :inputs] = layer.weight
            assert wide.bias is not None
            assert layer.bias is not None
            wide.bias.zero_()
            wide.bias[:units] = layer.bias
        before, room = units, new_room
        if not name:
            return wide
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, wide)
    return module


def _chain(module: nn.Module, convolutions: bool, method: str) -> list[str]:
    """The names of the layers, in order; refuses networks without hidden units."""
    names = []
    for name, part in module.named_modules():
        kind = type(part).__name__
        own = list(part.parameters(recurse=False)) + list(part.buffers(recurse=False))
        if isinstance(part, nn.Linear) or (isinstance(part, nn.Conv2d) and convolutions and part.groups == 1):
            require(part.bias is not None, f"{method} needs layers with biases, got {kind} {name} without; give it one")
            names.append(name)
            continue
        also = " and convolutions" if convolutions else ""
        advice = "use --model mlp" if convolutions else "use --model mlp, or --method fedma for images"
        require(not own, f"{method} matches units of linear layers{also} alone, got {kind} {name}; {advice}")
        if not list(part.children()):
            require(
                _is_zero_at_zero(part),
                f"{method} needs units that are 0 where all their weights are, expected an activation with f(0) = 0, "
                f"got {kind}; use ReLU or tanh",
            )
    require(bool(names), f"{method} matches units of linear layers, got a model without any; use --model mlp")
    return names


def _is_zero_at_zero(part: nn.Module) -> bool:
    """Whether a part without parameters maps zero to zero; it is tried on one vector."""
    try:
        with torch.no_grad(), streams.undisturbed():
            return not part(torch.zeros(1, 4)).any()
    except (RuntimeError, ValueError, TypeError):  # it wants images
        return True


def used(params: Params, layers: Sequence[Layer], number: int) -> Tensor:
    """Which units of a layer are in use, that is have a weight that is not zero; all of the output."""
    bias = params[layers[number].bias]
    if number == len(layers) - 1:
        return torch.ones_like(bias, dtype=torch.bool)
    out = pairs(params, layers, number + 1).transpose(0, 1).flatten(1).any(1)
    return pairs(params, layers, number).flatten(1).any(1) | bias.bool() | out


def live_units(params: Params) -> tuple[Tensor, ...]:
    """The units in use in each hidden layer of a network that was widened; they come first."""
    layers, device = layers_of(params), next(iter(params.values())).device
    numbers = [int(used(params, layers, number).sum()) for number in range(len(layers) - 1)]
    return tuple(torch.arange(number, device=device) for number in numbers)


def widths(clients: Iterable[tuple[Tensor, ...]]) -> dict[str, float | list[float]]:
    """How many units the server has in each hidden layer, by those that its clients have: `units_1`, ..."""
    layers = zip(*clients, strict=True)
    return {f"units_{number}": float(torch.cat(layer).max()) + 1 for number, layer in enumerate(layers, start=1)}


def restricted(params: Params, units: Rows) -> Params:
    """The parameters with zeros wherever a unit of a layer is not among these; other layers keep all of theirs."""
    layers = layers_of(params)
    masked = {}
    for number, layer in enumerate(layers):
        weight, bias = pairs(params, layers, number).clone(), params[layer.bias].clone()
        if number in units:
            gone = torch.ones(len(bias), dtype=torch.bool, device=bias.device)
            gone[units[number]] = False
            weight[gone], bias[gone] = 0, 0
        if number - 1 in units:
            gone = torch.ones(weight.shape[1], dtype=torch.bool, device=bias.device)
            gone[units[number - 1]] = False
            weight[:, gone] = 0
        masked[layer.weight], masked[layer.bias] = weight.reshape(params[layer.weight].shape), bias
    return {name: masked[name] for name in params}


def in_use(params: Params) -> int:
    """How many numbers it takes to send the units in use: dead ones are not sent."""
    return sum(layer_in_use(params, number) for number in range(len(layers_of(params))))


def layer_in_use(params: Params, number: int) -> int:
    """The same for one layer: the units in use of it, with their weights from those of the layer before."""
    layers = layers_of(params)
    _, inputs, block = pairs(params, layers, number).shape
    if number > 0:
        inputs = int(used(params, layers, number - 1).sum())
    return int(used(params, layers, number).sum()) * (inputs * block + 1)


def stacked_starts(starts: Sequence[Params], members: Sequence[int], seed: int, own_init: bool) -> Params:
    """Where the members of a cohort begin, one row each; with weights of their own if they want some."""
    if own_init:
        starts = [_own_weights(start, seed, n) for n, start in zip(members, starts, strict=True)]
    return zip_map(lambda *rows: torch.stack(rows), *starts)


def _own_weights(params: Params, seed: int, client: int) -> Params:
    """The numbers of each tensor in random order, zeros left alone: they have the model's own distribution."""
    stream = streams.generator(seed, "own weights", client)

    def shuffled(value: Tensor) -> Tensor:
        places = value.flatten().nonzero()[:, 0]
        order = torch.randperm(len(places), generator=stream).to(value.device)
        flat = value.flatten().clone()
        flat[places] = flat[places[order]]
        return flat.view_as(value)

    return zip_map(shuffled, params)


def require_growth(growth: float) -> None:
    """Refuse less room than there are units."""
    require(1 <= growth < float("inf"), f"method.growth must be at least 1, got {growth}")


def check_room(method: str, found: int, room: int, layer: int) -> None:
    """Refuse more units than there is room for."""
    require(
        found <= room,
        f"{method} needs {found} units in hidden layer {layer + 1}, more than the {room} there is room for; raise "
        "--method.growth, lower --method.gamma, or use a model of another width",
    )


def check_wide(method: str, task: Task, data: ClientData) -> None:
    """Try out on a few samples whether units can change places, and whether dead ones stay dead.

    Args:
        method: Name of the method, for error messages.
        task: Of the wide network.
        data: Whose dataset the samples are taken from.
    """
    params, number = task.initial.params, min(EXAMPLES, len(data.dataset.train_y))
    x, y = data.fetch(torch.arange(number, device=data.indices.device))
    live = dict(enumerate(live_units(params)))
    with streams.undisturbed():
        with task.evaluating():
            same = torch.allclose(
                task.logits(Weights(_rolled(params), {}), x), task.logits(Weights(params, {}), x), rtol=1e-3, atol=1e-4
            )
        with task.in_mode(True):
            gradient = torch.func.grad(lambda p: task.loss(Weights(p, {}), x, y))(params)
    dead = all(torch.equal(gradient[name], value) for name, value in restricted(gradient, live).items())
    require(
        same and dead,
        f"{method} needs a chain of layers whose units can change places and whose activations are 0 at 0, got a model "
        f"in which {'unused units are trained' if same else 'the order of hidden units matters'}; use --model mlp",
    )


def _rolled(params: Params) -> Params:
    """The same function, if the network is a chain: hidden units moved on, in each layer by other places."""
    layers, moved = layers_of(params), dict(params)
    for number, layer in enumerate(layers):
        weight, bias = pairs(params, layers, number), params[layer.bias]
        if number > 0:
            weight = weight.roll(number, dims=1)
        if number < len(layers) - 1:
            weight, bias = weight.roll(number + 1, dims=0), bias.roll(number + 1)
        moved[layer.weight], moved[layer.bias] = weight.reshape(params[layer.weight].shape), bias
    return moved
