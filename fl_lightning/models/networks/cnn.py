"""The paper's CIFAR-10 network."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_lightning.errors import require


class ChannelsLast(torch.autograd.Function):
    """Images in the order in which oneDNN is fastest; under vmap, whose tensors have no such order, as they are."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to remember."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
        return x, in_dims[0]


class Cnn(nn.Module):
    """Two 5x5 convolutions (32, 64) with pooling, 512 units; 878,538 parameters on CIFAR-10.

    No padding, Xavier-uniform weights, zero biases, as in the paper's published code. Pooling and ReLU can be exchanged
    to the bit; pooling goes first. On a CPU, images are laid out channels last: other rounding (1e-6 of a gradient).

    Args:
        shape: Shape of one input: channels, height, width, at least 16 pixels each way.
        num_classes: Number of outputs.
        units: Units of the layer before the last one.
    """

    version: ClassVar[int] = 2

    def __init__(self, shape: Sequence[int], num_classes: int, units: int = 512) -> None:
        super().__init__()
        require(
            len(shape) == 3 and min(shape[1:]) >= 16,
            f"the model cnn needs images of at least 16x16 pixels, got inputs of shape {tuple(shape)}; "
            "use --model mlp or --model softmax",
        )
        require(units >= 1, f"model.units must be at least 1, got {units}")
        features = nn.Sequential(
            nn.Conv2d(shape[0], 32, 5),
            nn.MaxPool2d(2),  # before the ReLU, which then has a quarter to do
            nn.ReLU(),
            nn.Conv2d(32, 64, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            width = features(torch.zeros(1, *shape)).shape[1]
        self.layers = nn.Sequential(features, nn.Linear(width, units), nn.ReLU(), nn.Linear(units, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            x = ChannelsLast.apply(x)  # type: ignore[no-untyped-call]
        logits: Tensor = self.layers(x)
        return logits
