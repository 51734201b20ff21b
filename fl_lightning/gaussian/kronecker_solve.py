"""Linear equations whose matrix is a sum of Kronecker products, solved without forming it.

    K V = sum_n w_n (G_n + g I) V (A_n + a I) + gamma V

Conjugate gradients, preconditioned in the eigenbasis of the mean factors by the diagonal that K has there: exact if all
G_n or all A_n have the same eigenvectors. Products run in the factors' own type, sums and scalars in float64.

Conjugate gradients on sums of Kronecker products: Tam, Bansal, Raffel: Merging by Matching Models in Task Parameter
Subspaces, TMLR 2024.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.params import numbers
from fl_lightning.system import activity

# Where conjugate gradients stop: residual relative to the right side, and iterations.
TOLERANCE = 1e-3
MOST_ITERATIONS = 100


class Solution(NamedTuple):
    """What was found, in how many iterations, and how large K V - R still is relative to R."""

    value: Tensor
    iterations: int
    residual: float


@dataclass(frozen=True)
class KronSum:
    """The operator K.

    Attributes:
        gradients: G_n.
        inputs: A_n.
        weights: w_n.
        damping_gradients: g.
        damping_inputs: a.
        damping: gamma.
    """

    gradients: Sequence[Tensor]
    inputs: Sequence[Tensor]
    weights: Sequence[float]
    damping_gradients: float
    damping_inputs: float
    damping: float

    def apply(self, matrix: Tensor) -> Tensor:
        """K V."""
        return self.sum_of([matrix] * len(self.weights))

    def sum_of(self, matrices: Sequence[Tensor]) -> Tensor:
        """The sum over n with a matrix for each, as on the right side of a product of Gaussians."""
        total = torch.zeros_like(matrices[0], dtype=torch.float64)
        for g, a, weight, matrix in zip(self.gradients, self.inputs, self.weights, matrices, strict=True):
            own = matrix.to(a.dtype)
            left = (g @ own).add_(own, alpha=self.damping_gradients)
            total.add_((left @ a).add_(left, alpha=self.damping_inputs), alpha=weight)
            total.add_(matrix, alpha=weight * self.damping)
        return total

    def solved(self, right: Tensor) -> Solution:
        """V with K V = R, by preconditioned conjugate gradients from zero."""
        size, finite = numbers((right.norm(), right.isfinite().all().to(right.dtype)))
        value, residual = torch.zeros_like(right), right.clone()
        if size == 0 or not finite:
            return Solution(right.clone(), 0, 0.0)
        precondition = self._preconditioner()
        direction = step = precondition(residual)
        error, decrease = numbers((residual.norm(), (residual * step).sum()))
        iterations = 0
        while error > TOLERANCE * size and iterations < MOST_ITERATIONS and decrease > 0:
            iterations += 1
            activity.say(f"conjugate gradients over {right.numel():,} parameters, iteration {iterations}")
            image = self.apply(direction)
            length = decrease / float((direction * image).sum())
            value.add_(direction, alpha=length)
            residual.sub_(image, alpha=length)
            step = precondition(residual)
            before, (error, decrease) = decrease, numbers((residual.norm(), (residual * step).sum()))
            direction = step + (decrease / before) * direction
        return Solution(value, iterations, error / size)

    def factored(self, right: Tensor) -> Solution:
        """[sum_n w_n G_n]^-1 R [sum_n w_n A_n]^-1, which solves K V = R if all G_n or all A_n are equal."""
        gradients, inputs = self._mean_factors()
        value = _solve(inputs, _solve(gradients, right).T).T
        return Solution(value, 0, float((self.apply(value) - right).norm() / right.norm().clamp(min=1e-300)))

    def _mean_factors(self) -> tuple[Tensor, Tensor]:
        """The mean factors with their damping, in float64."""
        means = []
        for factors, damping in ((self.gradients, self.damping_gradients), (self.inputs, self.damping_inputs)):
            total = torch.zeros_like(factors[0], dtype=torch.float64)
            for factor, weight in zip(factors, self.weights, strict=True):
                total.add_(factor, alpha=weight)
            total.diagonal().add_(damping)
            means.append(total)
        return means[0], means[1]

    def _preconditioner(self) -> Callable[[Tensor], Tensor]:
        left, right = (torch.linalg.eigh(mean)[1] for mean in self._mean_factors())
        scale = left.new_full((len(left), len(right)), self.damping)
        for g, a, weight in zip(self.gradients, self.inputs, self.weights, strict=True):
            rows = _diagonal_in(left, g).add_(self.damping_gradients)
            columns = _diagonal_in(right, a).add_(self.damping_inputs)
            scale.addr_(rows, columns, alpha=weight)
        # Directions without any precision: the right side has no share in them.
        inverse = torch.where(scale > 1e-14 * scale.max(), 1 / scale, 0.0)
        return lambda residual: left @ ((left.T @ residual @ right) * inverse) @ right.T


def _diagonal_in(basis: Tensor, matrix: Tensor) -> Tensor:
    """The diagonal of a symmetric matrix in another basis, in float64."""
    own = basis.to(matrix.dtype)
    return (own * (matrix @ own)).sum(0).double()


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """The least solution of a symmetric, positive semi-definite system."""
    values, basis = torch.linalg.eigh(matrix)
    inverse = torch.where(values > 1e-14 * values[-1].abs(), 1 / values, 0.0)
    solution: Tensor = basis @ (inverse[:, None] * (basis.T @ right))
    return solution
