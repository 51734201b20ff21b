"""The paper's MNIST network, 784-500-300-10."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from fl_lightning.errors import require


class Mlp(nn.Module):
    """Fully connected network with ReLU; 784-500-300-10 has 545,810 parameters.

    Args:
        shape: Shape of one input.
        num_classes: Number of outputs.
        hidden: Widths of the hidden layers.
        dropout: Probability of dropping a hidden unit in training; 0 is none.
    """

    def __init__(
        self, shape: Sequence[int], num_classes: int, hidden: tuple[int, ...] = (500, 300), dropout: float = 0.0
    ) -> None:
        super().__init__()
        require(all(units >= 1 for units in hidden), f"model.hidden must hold widths of at least 1, got {list(hidden)}")
        require(0 <= dropout < 1, f"model.dropout must lie in [0, 1), got {dropout}")
        layers: list[nn.Module] = [nn.Flatten()]
        width = math.prod(shape)
        for units in hidden:
            layers += [nn.Linear(width, units), nn.ReLU()]
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            width = units
        self.layers = nn.Sequential(*layers, nn.Linear(width, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits
