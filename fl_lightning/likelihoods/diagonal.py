"""Curvature at the outputs that is a diagonal: independent outputs."""

from collections.abc import Iterator

import torch
from torch import Tensor


def diagonal_product(diagonal: Tensor, vectors: Tensor) -> Tensor:
    """H v; the vectors may have more dimensions after those of the diagonal."""
    return diagonal.reshape(*diagonal.shape, *[1] * (vectors.dim() - diagonal.dim())) * vectors


def diagonal_roots(diagonal: Tensor) -> Iterator[Tensor]:
    """sqrt(h_l) e_l for every output l."""
    for place in range(diagonal[0].numel()):
        root = torch.zeros_like(diagonal)
        root.flatten(1)[:, place] = diagonal.flatten(1)[:, place].sqrt()
        yield root
