"""Adapters of low rank beside frozen weights: W + (alpha / rank) B A + R, by torch's parametrisations.

W is a frozen weight of a linear or convolutional layer, or the projections of attention, as a matrix with a row for
each output. A starts at random and B at zero, so that nothing changes at first. Where A is trained, too, the average of
the clients' products is not the product of the averages, and what is missing goes to the buffer R:

    R <- R + (alpha / rank) (sum_n p_n B_n A_n - (sum_n p_n B_n) (sum_n p_n A_n))

so that the network after the average has exactly the average weights. The server sends R; clients do not change it.
"""

import copyreg
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fl_lightning.errors import UserError
from fl_lightning.params import Params

if TYPE_CHECKING:
    from fl_lightning.models.tuning import Lora

# The layers that can be the head, and have adapters.
HEADS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# The weights of attention are its own parameters; that of its last projection is a linear layer's.
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
# In the name of an adapter, between the layer and the tensor.
INSIDE = ".parametrizations."
RESIDUAL = "residual"
# So many names say what there is.
SHOWN = 8


class Adapter(nn.Module):
    """What is added to a weight.

    Attributes:
        a: A, rank times inputs.
        b: B, outputs times rank.
        scale: alpha / rank.
    """

    def __init__(self, weight: Tensor, settings: "Lora", freeze_a: bool) -> None:
        super().__init__()
        rows, columns = len(weight), weight[0].numel()
        rank = min(settings.rank, rows, columns)
        self.scale = settings.alpha / settings.rank
        self.a = nn.Parameter(weight.new_empty(rank, columns), requires_grad=not freeze_a)
        self.b = nn.Parameter(weight.new_zeros(rows, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        if not freeze_a:
            self.register_buffer(RESIDUAL, torch.zeros_like(weight))

    def forward(self, weight: Tensor) -> Tensor:
        changed = weight + (self.scale * (self.b @ self.a)).view_as(weight)
        residual = self._buffers.get(RESIDUAL)
        return changed if residual is None else changed + residual


def adapt(model: nn.Module, settings: "Lora", freeze_a: bool, without: str | None) -> set[str]:
    """Give all layers but one adapters; the names of what is trained of them.

    Raises:
        UserError: If no layer can have any.
    """
    found = set()
    for name, module in list(model.named_modules()):
        for weight in _weights(module) if name != without else ():
            adapter = Adapter(getattr(module, weight).detach(), settings, freeze_a)
            attach(module, weight, adapter)
            path = f"{name}.parametrizations.{weight}.0".lstrip(".")
            found |= {f"{path}.{key}" for key, value in adapter.named_parameters() if value.requires_grad}
    if not found:
        kinds = sorted({type(one).__name__ for one in model.modules() if not list(one.children())})
        raise UserError(
            "model.train lora needs linear or convolutional layers or attention beside a new head, got "
            f"{in_words(kinds)}; use --model.train all, bias or a pattern"
        )
    return found


def attach(module: nn.Module, weight: str, adapter: Adapter) -> None:
    """Put an adapter beside a weight; the module can be pickled, as workers need it."""
    original = getattr(module, weight)
    trains = original.requires_grad
    parametrize.register_parametrization(module, weight, adapter)
    module.get_parameter(f"parametrizations.{weight}.original").requires_grad_(trains)
    copyreg.pickle(type(module), _reduced)


def merge(model: nn.Module) -> None:
    """Add the adapters to the weights, and take them away: a network of plain layers is left."""
    for module in [one for one in model.modules() if parametrize.is_parametrized(one)]:
        sums = {name: nn.Parameter(getattr(module, name).detach()) for name in _adapted(module)}
        del module._modules["parametrizations"]
        module.__class__ = type(module).__mro__[1]  # torch would take the weights from copies, too: they share a class
        module._parameters = {**sums, **module._parameters}


def merged(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The same of a state dict."""
    found = {name: value for name, value in state.items() if INSIDE not in f".{name}"}
    for name, value in state.items():
        place, inside, rest = f".{name}".rpartition(INSIDE)
        if inside and rest.endswith(".original"):
            key = name.removesuffix("original") + "0."
            change = (scale * (state[f"{key}b"] @ state[f"{key}a"])).view_as(value)
            layer = f"{place}.{rest.removesuffix('.original')}".lstrip(".")
            found[layer] = value + change + state.get(key + RESIDUAL, 0)
    return found


def scale_of(model: nn.Module) -> float | None:
    """Alpha / rank of a network's adapters; None without any."""
    return next((adapter.scale for _, adapter in adapters(model)), None)


def adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """The adapters of a network, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield name, module


def starts(model: nn.Module) -> list[str]:
    """The names of every A, which starts at random."""
    return [f"{name}.a" for name, _ in adapters(model)]


def residuals(model: nn.Module, before: Params, models: Sequence[Params], weights: Sequence[float]) -> Params:
    """R of every adapter after clients with these models were averaged; nothing where A is frozen."""
    found: Params = {}
    for name, adapter in adapters(model):
        key = f"{name}.{RESIDUAL}"
        if key not in before:
            continue
        factors = [(one[f"{name}.b"].double(), one[f"{name}.a"].double()) for one in models]
        products = sum(weight * (b @ a) for weight, (b, a) in zip(weights, factors, strict=True))
        b, a = (sum(weight * one[place] for weight, one in zip(weights, factors, strict=True)) for place in (0, 1))
        missing = adapter.scale * (torch.as_tensor(products) - torch.as_tensor(b) @ torch.as_tensor(a))
        found[key] = (before[key].double() + missing.view_as(before[key])).to(before[key].dtype)
    return found


def without_residuals(buffers: Params) -> Params:
    """The buffers that clients send."""
    return {name: value for name, value in buffers.items() if not (INSIDE in name and name.endswith(RESIDUAL))}


def in_words(names: Iterable[str]) -> str:
    """Some names, and how many more.

    >>> in_words("abc")
    'a, b, c'
    """
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return (", ".join(every[:SHOWN]) or "none") + more


def _weights(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's own weights that can have adapters."""
    if isinstance(module, nn.MultiheadAttention):
        return tuple(name for name in PROJECTIONS if getattr(module, name) is not None)
    return ("weight",) if isinstance(module, HEADS) else ()


def _adapted(module: nn.Module) -> dict[str, Any]:
    """The weights with adapters of a module, by name."""
    return dict(module.get_submodule("parametrizations").named_children())


def _reduced(module: nn.Module) -> tuple[Any, ...]:
    """A module with adapters for pickle, to which torch leaves state dicts only."""
    own = vars(module)
    inner = {name: part for name, part in own["_modules"].items() if name != "parametrizations"}
    parts = {weight: (place.original, place[0]) for weight, place in _adapted(module).items()}
    return _rebuilt, (type(module).__mro__[1], {**own, "_modules": inner}, parts)


def _rebuilt(cls: type[nn.Module], own: dict[str, Any], parts: Mapping[str, tuple[nn.Parameter, Adapter]]) -> nn.Module:
    module = cls.__new__(cls)
    vars(module).update(own)
    for weight, (original, adapter) in parts.items():
        module.register_parameter(weight, original)
        attach(module, weight, adapter)
    return module
