"""The curvature of a linear layer that gives the outputs: (1/m) sum_i H_i (x) a~_i a~_i^T, for any likelihood.

a~ = (a, 1) are the layer's inputs, H_i the curvature of the loss at its outputs. Classification has a shorter way
(`softmax_hessian`).
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fl_lightning.curvature.softmax_hessian import class_major_order
from fl_lightning.models.likelihoods.base import Likelihood
from fl_lightning.params import Params

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


def hessian(samples: Iterable[tuple[Tensor, Tensor]], params: Params) -> Tensor:
    """The sum of H (x) a~ a~^T, rows and columns in torch's order of parameters.

    Args:
        samples: As `rows` has them; H includes the factor 1/m.
        params: The layer's weight and possibly bias.
    """
    weight = next(iter(params.values()))
    classes, size = weight.shape[0], weight.shape[1] + (len(params) - 1)
    total = weight.new_zeros(classes, size, classes, size)
    for x, h in samples:
        is_coupled = h.any(0).tolist()
        for k in range(classes):
            for other in range(k, classes):
                if is_coupled[k][other]:
                    block = (x * h[:, k, other, None]).T @ x
                    total[k, :, other] += block
                    if other != k:
                        total[other, :, k] += block.T
    matrix = total.view(classes * size, classes * size)
    if len(params) > 1:
        order = class_major_order(classes, size - 1).to(matrix.device)
        matrix = matrix[order][:, order]
    return (matrix + matrix.T) / 2
