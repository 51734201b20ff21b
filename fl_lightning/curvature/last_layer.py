"""The curvature of a linear layer that gives the outputs: (1/m) sum_i H_i (x) a~_i a~_i^T, for any likelihood.

a~ = (a, 1) are the layer's inputs, H_i the curvature of the loss at its outputs. Classification has a shorter way
(`softmax_hessian`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fl_lightning.models.likelihoods.base import Likelihood

# Numbers in the matrices H_i that are in memory at once: 64 MB in float32.
LARGEST_BLOCK = 2**24


def rows(likelihood: Likelihood, inputs: Tensor, outputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """a~ and H of every sample, or of every position of a sample, in blocks.

    Args:
        likelihood: Knows H.
        inputs: a~ of the layer.
        outputs: Of the layer, and of the network.
        targets: Of the samples.
    """
    classes = outputs.shape[-1]
    size = max(1, LARGEST_BLOCK // (outputs[0].numel() * classes))
    parts = (torch.split(tensor, size) for tensor in (inputs, outputs, targets))
    for x, f, y in zip(*parts, strict=True):
        unit = torch.eye(classes, dtype=f.dtype, device=f.device).expand(*f.shape, classes)
        yield x.flatten(0, -2), likelihood.product(f, y, unit).flatten(0, -3)
