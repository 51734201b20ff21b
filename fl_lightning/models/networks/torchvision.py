"""The classifiers of torchvision: ResNet, VGG, MobileNet, EfficientNet, DenseNet, ViT and others."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.errors import require, unknown

# Images with fewer pixels than this on a side are small.
SMALL = 64
# Of networks that have outputs beside the last ones in training.
WITHOUT_SIDES = {"googlenet": {"aux_logits": False}, "inception_v3": {"aux_logits": False}}


class Torchvision(nn.Module):
    """Any classifier of torchvision, with GroupNorm in place of BatchNorm; 11,173,962 parameters on CIFAR-10.

    BatchNorm's statistics of one client do not suit another, and its samples depend on each other: most work in
    federated learning has GroupNorm instead (Hsieh et al., *The Non-IID Data Quagmire*, ICML 2020).

    Args:
        shape: Shape of one input: channels, height, width.
        num_classes: Number of outputs.
        name: As torchvision has it: resnet18, vgg11, mobilenet_v2, efficientnet_b0, densenet121, vit_b_16, ...
        norm: What normalises: group is GroupNorm in place of every BatchNorm, batch leaves them as they are.
        groups: Groups of each GroupNorm, or the next smaller number that divides its channels.
        stem: small: a 3x3 convolution without stride and no pooling at the input, as usual for CIFAR; large: as
            torchvision has it; auto: small for images of less than 64 pixels on a side.
        resize: Pixels on a side to which images are scaled inside the network, such as 224, for which published weights
            of transformers are made; null leaves them as they are.
    """

    def __init__(
        self,
        shape: Sequence[int],
        num_classes: int,
        name: str = "resnet18",
        norm: Literal["group", "batch"] = "group",
        groups: int = 2,
        stem: Literal["auto", "small", "large"] = "auto",
        resize: int | None = None,
    ) -> None:
        super().__init__()
        from torchvision import models

        known = models.list_models(module=models)
        if name not in known:
            raise unknown("model.name", name, known, elsewhere="any classifier in torchvision.models")
        require(
            len(shape) == 3,
            f"the model {name} needs images (channels, height, width), got inputs of shape {tuple(shape)}; use --model "
            "mlp or --model softmax",
        )
        require(groups >= 1, f"model.groups must be at least 1, got {groups}")
        require(resize is None or resize >= 1, f"model.resize must be at least 1, or null, got {resize}")
        self.resize = resize
        smallest = resize or min(shape[1:])
        options: dict[str, Any] = dict(WITHOUT_SIDES.get(name, {}))
        if name.startswith("vit"):
            options["image_size"] = resize or shape[1]
        self.network: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
        _take_channels(self.network, shape[0])
        if stem == "small" or (stem == "auto" and smallest < SMALL):
            _shrink_stem(self.network)
        if norm == "group":
            _replace_batch_norm(self.network, groups)

    def forward(self, x: Tensor) -> Tensor:
        if self.resize is not None:
            x = nn.functional.interpolate(x, (self.resize, self.resize), mode="bilinear")
        outputs: Tensor = self.network(x)
        return outputs


def _set(network: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module in the place of one."""
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, module)


def _first_convolution(network: nn.Module) -> tuple[str, nn.Conv2d]:
    return next((name, one) for name, one in network.named_modules() if isinstance(one, nn.Conv2d))


def _with(old: nn.Conv2d, **changes: Any) -> nn.Conv2d:
    """A convolution like this one with other sizes, and weights of its own."""
    settings: dict[str, Any] = {
        "in_channels": old.in_channels,
        "out_channels": old.out_channels,
        "kernel_size": old.kernel_size,
        "stride": old.stride,
        "padding": old.padding,
        "bias": old.bias is not None,
    }
    new = nn.Conv2d(**{**settings, **changes})
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    return new


def _take_channels(network: nn.Module, channels: int) -> None:
    """Let the first convolution take images of so many channels."""
    name, first = _first_convolution(network)
    if first.in_channels != channels:
        _set(network, name, _with(first, in_channels=channels))


def _shrink_stem(network: nn.Module) -> None:
    """No stride in the first convolution, and no pooling right after it; cutting into patches is left alone."""
    name, first = _first_convolution(network)
    if max(first.stride) == 1 or first.kernel_size == first.stride:
        return
    _set(network, name, _with(first, kernel_size=3, stride=1, padding=1))
    after = [one for one in network.named_modules() if isinstance(one[1], nn.Conv2d | nn.MaxPool2d)]
    place = [one[0] for one in after].index(name)
    if place + 1 < len(after) and isinstance(after[place + 1][1], nn.MaxPool2d):
        _set(network, after[place + 1][0], nn.Identity())


def _replace_batch_norm(network: nn.Module, groups: int) -> None:
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            channels = module.num_features
            fitting = max(number for number in range(1, min(groups, channels) + 1) if channels % number == 0)
            _set(network, name, nn.GroupNorm(fitting, channels))
