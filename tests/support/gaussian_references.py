"""Dense matrices for Gaussians by layers: brute force in float64, in the order of `flatten`."""

import torch

from fl_lightning.params import flatten, unflatten


def dense(gaussian):
    """The precision as a matrix, column by column, from nothing but `apply`."""
    like = gaussian.mean
    size = len(flatten(like))
    eye = torch.eye(size, dtype=torch.float64)
    return torch.stack([flatten(gaussian.apply(unflatten(column, like))) for column in eye], dim=1)


def kron_matrix(slopes, inputs, biased=True):
    """G (x) A over [W, b], with rows and columns in `flatten` order: all of W, then b."""
    outputs, columns = len(slopes), len(inputs)
    matrix = torch.zeros(outputs * columns, outputs * columns, dtype=torch.float64)
    weights = columns - 1 if biased else columns

    def place(o, i):
        return o * weights + i if i < weights else outputs * weights + o

    for o in range(outputs):
        for i in range(columns):
            for p in range(outputs):
                for j in range(columns):
                    matrix[place(o, i), place(p, j)] = slopes[o, p] * inputs[i, j]
    return matrix


def dense_product(means, matrices, weights):
    """The mean of the product of Gaussians with dense precisions."""
    total = sum(w * m for w, m in zip(weights, matrices, strict=True))
    moment = sum(w * m @ flatten(mean) for w, m, mean in zip(weights, matrices, means, strict=True))
    return torch.linalg.solve(total, moment)
