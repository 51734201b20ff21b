"""Gaussians over one layer whose precision is that of its inputs: Lambda = I (x) A.

M = [W, b] are the layer's weight (kernels of a convolution flattened) and bias, A the second moments of its inputs
(a, 1). Every output has the same precision A, so that a product takes one Cholesky factor. It is known as RegMean: Jin,
Ren, Preotiuc-Pietro, Cheng: Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR 2023.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.full import factor, triangle
from fl_lightning.params import Params, cast_like, count


def joined(params: Params) -> Tensor:
    """M = [W, b] of a layer's weight and, if it has one, bias."""
    weight, *bias = params.values()
    return torch.cat([weight.flatten(1), *(b.unsqueeze(1) for b in bias)], dim=1)


def split(matrix: Tensor, like: Params) -> Params:
    """The inverse of `joined`, named and shaped like other parameters."""
    (weight, shape), *bias = ((name, value.shape) for name, value in like.items())
    size = shape[1:].numel()
    return {weight: matrix[:, :size].reshape(shape)} | {name: matrix[:, size] for name, _ in bias}


def average_and_offsets(means: Sequence[Params], weights: Sequence[float]) -> tuple[Tensor, list[Tensor]]:
    """The weighted average of several M, and each one's offset from it, in float64."""
    matrices = [joined(mean).double() for mean in means]
    average = torch.zeros_like(matrices[0])
    for matrix, weight in zip(matrices, weights, strict=True):
        average.add_(matrix, alpha=weight)
    return average, [matrix - average for matrix in matrices]


@dataclass(frozen=True)
class Inputs(Gaussian, stored_as="fl_lightning.gaussian.inputs.Inputs"):
    """A Gaussian over one layer with precision I (x) (A + damping I).

    Attributes:
        mean: Weight and, if there is one, bias, in this order.
        inputs: A, with the bias last.
        damping: Added to the diagonal where the precision is used.
        raises: How often a product multiplied its damping by 10, because its matrix was numerically singular.
    """

    mean: Params
    inputs: Tensor
    damping: float = 0.0
    raises: int = 0

    def apply(self, vector: Params) -> Params:
        matrix = joined(vector)
        return split(matrix @ self.inputs.to(matrix.dtype) + self.damping * matrix, vector)

    def solve(self, vector: Params) -> Params:
        lower = factor(self._doubles, self.damping).lower
        return split(torch.cholesky_solve(joined(vector).double().T, lower).T, vector)

    def log_determinant(self) -> Tensor:
        return 2 * self.outputs * factor(self._doubles, self.damping).lower.diagonal().log().sum()

    def damped(self, damping: float) -> Self:
        return replace(self, damping=self.damping + damping)

    @classmethod
    def product(cls, posteriors: Sequence[Self], weights: Sequence[float], damping: float = 0.0) -> Self:
        """M = [sum_n w_n M_n (A_n + gamma I)] [sum_n w_n A_n + gamma I]^-1, by a Cholesky factor in float64.

        Solved for the offset from the average, as in `Full.product`.
        """
        like = posteriors[0]
        average, offsets = average_and_offsets([posterior.mean for posterior in posteriors], weights)
        moment, total = torch.zeros_like(average), torch.zeros_like(like.inputs, dtype=torch.float64)
        for posterior, offset, weight in zip(posteriors, offsets, weights, strict=True):
            own = posterior.inputs.double()
            total.add_(own, alpha=weight)
            moment.add_((offset @ own).add_(offset, alpha=posterior.damping), alpha=weight)
        damping += sum(weight * posterior.damping for posterior, weight in zip(posteriors, weights, strict=True))
        found = factor(total.clone, damping)
        mean = split(average + torch.cholesky_solve(moment.T, found.lower).T, like.mean)
        return cls(cast_like(mean, like.mean), total.to(like.inputs.dtype), found.damping, found.raises)

    def diagonal(self) -> Params:
        return split((self.inputs.diagonal() + self.damping).expand(self.outputs, -1), self.mean)

    def trace(self) -> float:
        return self.outputs * float(self.inputs.diagonal().double().sum() + self.damping * len(self.inputs))

    def largest_eigenvalue(self) -> float:
        return float(torch.linalg.eigvalsh(self._doubles())[-1]) + self.damping

    def parts(self) -> Params:
        return {"inputs": self.inputs}

    def with_parts(self, parts: Params) -> Self:
        return type(self)(self.mean, parts["inputs"], self.damping)

    def notes(self) -> dict[str, float]:
        return {"damping_raised": float(self.raises)}

    def numbers_sent(self) -> int:
        return count(self.mean) + triangle(self.inputs)

    @property
    def outputs(self) -> int:
        """The number of the layer's outputs."""
        return len(next(iter(self.mean.values())))

    def _doubles(self) -> Tensor:
        return self.inputs.to(torch.float64, copy=True)
