"""Softmax regression, the model of the paper's Laplace study."""

import math
from collections.abc import Sequence

from torch import Tensor, nn


class Softmax(nn.Module):
    """Softmax regression, a single linear layer; 784-10 has 7,850 parameters.

    Args:
        shape: Shape of one input.
        num_classes: Number of outputs.
    """

    def __init__(self, shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(shape), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x.flatten(1))
        return logits
