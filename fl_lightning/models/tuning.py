"""Which part of a network is trained, and what stands still.

The layers of a network are the modules that hold parameters, in the order in which a forward pass calls them. The head
is the last linear or convolutional one. What comes before the first trained layer is a fixed function of the inputs: it
computes in evaluation mode, also in training, and so does every BatchNorm whose parameters are not trained. Its
statistics stay what they are, and are not sent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning import streams
from fl_lightning.errors import UserError, require
from fl_lightning.models.inputs import Inputs, shown
from fl_lightning.models.lora import HEADS, in_words

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (*BATCH_NORMS, *INSTANCE_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
WORDS = "head, last:N, bias, norm, lora, all, or a pattern of parameter names such as layers.3.*"


@dataclass(frozen=True)
class Tuning:
    """Where a network starts, and which part of it is trained.

    Attributes:
        weights: What the network starts from: a file of weights (safetensors, or a state dict of torch), the folder of
            a finished run (in a command also its MLflow id), or for the model torchvision a published name such as
            DEFAULT. null starts at random.
        new_head: Whether the last layer is replaced by a new one, at random, with as many outputs as the data need.
        train: The part that is trained, sent, counted and saved: head, the last layer; last:N, the last N layers, norms
            not counted; bias; norm; lora, adapters of low rank; all; or a pattern of parameter names. A new head is
            trained with any of them.
    """

    weights: str | None = None
    new_head: bool = False
    train: str = "all"

    def __post_init__(self) -> None:
        require(self.weights != "", "model.weights needs a value, got ''; give a file or folder, null starts at random")
        number = self.train.removeprefix("last:")
        require(
            number == self.train or (number.isdecimal() and int(number) >= 1),
            f"model.train last:N needs a number of layers, such as last:2, got {self.train!r}",
        )


@dataclass(frozen=True)
class Lora:
    """Adapters of low rank: W + (alpha / rank) B A, for model.train lora.

    Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. With A frozen, as in FFA-LoRA (Sun et al.,
    ICLR 2024), the average of the products is the product of the averages; with A trained, the server adds what is
    missing to W, as in FedEx-LoRA (Singhal et al., ACL 2025).

    Attributes:
        rank: Rank of B A, or the smaller side of W, if that is less.
        alpha: Scale of the adapters: B A counts alpha / rank times.
        freeze_a: Whether A stays at its random start and B alone is trained. null is true for methods with a posterior,
            in whose parameters the network is then linear, layer by layer; they refuse false. null is false for others,
            where the residual is that of the clients' weighted mean, whatever else the server's rule does.
    """

    rank: int = 8
    alpha: float = 16.0
    freeze_a: bool | None = None

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"model.lora.rank must be at least 1, got {self.rank}")
        require(self.alpha > 0, f"model.lora.alpha must be > 0, got {self.alpha:g}")


def called(model: nn.Module, x: Inputs) -> dict[str, nn.Module]:
    """The modules of a network by name, in the order in which a forward pass first calls them."""
    found: dict[str, nn.Module] = {}

    def meet(name: str, module: nn.Module, _: Any) -> None:
        found.setdefault(name, module)

    hooks = [one.register_forward_pre_hook(partial(meet, name)) for name, one in model.named_modules()]
    was_training = model.training
    model.eval()
    try:
        with streams.undisturbed(), torch.enable_grad():  # without gradients, torch's attention calls no modules
            shown(model, x)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return found


def head_of(model: nn.Module, x: Inputs) -> str:
    """The name of the last layer.

    Raises:
        UserError: If there is none.
    """
    heads = [name for name, module in called(model, x).items() if isinstance(module, HEADS)]
    if not heads:
        kinds = sorted({type(one).__name__ for one in model.modules() if _own(one)})
        raise UserError(
            f"the head of {type(model).__name__} was not found: expected a linear or convolutional layer, got "
            f"{', '.join(kinds) or 'no layers'}; name the parameters by model.train PATTERN"
        )
    return heads[-1]


def with_new_head(model: nn.Module, name: str, outputs: int) -> nn.Module:
    """Put a new layer in the place of the head; a head that is the whole network is returned."""
    old = model.get_submodule(name)
    assert isinstance(old, HEADS)
    new: nn.Module
    if isinstance(old, nn.Linear):
        new = nn.Linear(old.in_features, outputs, bias=old.bias is not None)
    else:
        require(
            old.groups == 1 and old.padding_mode == "zeros",
            f"model.new_head cannot replace {name}, a convolution with groups or padding of its own; use an own model",
        )
        places: dict[str, Any] = {"stride": old.stride, "padding": old.padding, "dilation": old.dilation}
        new = type(old)(old.in_channels, outputs, old.kernel_size, bias=old.bias is not None, **places)  # type: ignore[arg-type]
    if not name:
        return new
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)
    return model


def parameters_of(model: nn.Module, train: str, x: Inputs) -> set[str]:
    """The names of the parameters that a choice of `model.train` means.

    Raises:
        UserError: If it means none.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if train == "all":
        return set(names)
    if train == "head":
        return _of_modules(model, [head_of(model, x)])
    if train.startswith("last:"):
        number = int(train.removeprefix("last:"))
        layers = [name for name, one in called(model, x).items() if _own(one) and not isinstance(one, NORMS)]
        require(
            number <= len(layers),
            f"model.train {train} is more than there is: the network has {len(layers)} layers, {in_words(layers)}",
        )
        return _of_modules(model, layers[-number:])
    if train == "norm":
        found = _of_modules(model, [name for name, one in model.named_modules() if isinstance(one, NORMS)])
    elif train == "bias":
        found = {name for name in names if name.endswith("bias")}
    else:
        found = {name for name in names if fnmatchcase(name, train)}
    require(
        bool(found),
        f"model.train {train} matches no parameter of the network: expected {WORDS}; its parameters are "
        f"{in_words(names)}",
    )
    return found


def freeze(model: nn.Module, trained: Iterable[str]) -> None:
    """Leave the parameters of these names alone trainable."""
    chosen = set(trained)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name in chosen)


def standing_still(model: nn.Module, x: Inputs) -> frozenset[str]:
    """The modules that compute in evaluation mode: see the module's text."""

    def is_fixed(module: nn.Module) -> bool:
        return not any(parameter.requires_grad for parameter in module.parameters())

    before = list(called(model, x).items())
    first = next((place for place, (_, one) in enumerate(before) if not is_fixed(one) and _trains(one)), len(before))
    still = {name for name, one in before[:first] if is_fixed(one)}
    norms = {name for name, one in model.named_modules() if isinstance(one, BATCH_NORMS)}
    return frozenset(still | {name for name in norms if is_fixed(model.get_submodule(name))})


def fit(model: nn.Module, given: Mapping[str, Tensor], source: str, without: str | None = None) -> None:
    """Load weights into a network, all but those of a layer that is to be new.

    Names may have something before them, as wrappers make them: `network.conv1.weight` fits `conv1.weight`, and the
    other way round.

    Raises:
        UserError: If a tensor is missing, unexpected, or of another shape.
    """
    own = model.state_dict()

    def counts(name: str) -> bool:
        return without is None or name.rpartition(".")[0] != without

    found = {name: value for name, value in _aligned(given, own).items() if counts(name)}
    wanted = {name: value for name, value in own.items() if counts(name)}
    unlike = [
        f"{name} {list(found[name].shape)} (here {list(value.shape)})"
        for name, value in wanted.items()
        if name in found and found[name].shape != value.shape
    ]
    problems = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in wanted],
        "of another shape": unlike,
    }
    lines = [f"{what}: {in_words(names)}" for what, names in problems.items() if names]
    head = " Where only the last layer is another one, set --model.new_head true." if without is None else ""
    require(
        not lines,
        f"model.weights {source} are of another network than {type(model).__name__}; {'; '.join(lines)}.{head}",
    )
    model.load_state_dict({**own, **found})


def _aligned(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under those names, of all with something before them or less, that the network knows best."""
    firsts = sorted({name.partition(".")[0] for name in own})
    ways = [dict(given), *({f"{first}.{name}": value for name, value in given.items()} for first in firsts)]
    while len({name.partition(".")[0] for name in given}) == 1 and all("." in name for name in given):
        given = {name.partition(".")[2]: value for name, value in given.items()}
        ways.append(dict(given))
    return max(ways, key=lambda names: len(names.keys() & own.keys()))


def _own(module: nn.Module) -> bool:
    """Whether a module holds parameters itself."""
    return next(module.parameters(recurse=False), None) is not None


def _trains(module: nn.Module) -> bool:
    """Whether a module holds trained parameters itself; attention uses those of its last projection itself."""
    inner = isinstance(module, nn.MultiheadAttention)
    return any(parameter.requires_grad for parameter in module.parameters(recurse=inner))


def _of_modules(model: nn.Module, names: Iterable[str]) -> set[str]:
    """The trainable parameters of these modules; of attention also those of its projections."""
    found = set()
    for name in names:
        module = model.get_submodule(name)
        inner = isinstance(module, nn.MultiheadAttention)
        own = module.named_parameters(prefix=name, recurse=inner)
        found |= {key for key, parameter in own if parameter.requires_grad}
    return found
