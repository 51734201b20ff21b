"""Gaussians over one layer whose precision is a Kronecker product: Lambda = G (x) A.

M = [W, b] are the layer's weight (kernels of a convolution flattened) and bias, A the second moments of its inputs (a,
1) and G those of the gradients at its outputs: Lambda vec(M) = vec(G M A), row by row. A sum of Kronecker products is
none: products of Gaussians are solved by conjugate gradients (`kronecker_solve`), and their precision is projected.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.damping import Merging, Solver
from fl_lightning.gaussian.full import triangle
from fl_lightning.gaussian.input_kronecker import average_and_offsets, joined, split
from fl_lightning.gaussian.kronecker_solve import KronSum
from fl_lightning.params import Params, cast_like, count, numbers, weighted_sum

# Alternations towards the nearest Kronecker product; two were enough wherever we looked.
ALTERNATIONS = 5


@dataclass(frozen=True)
class Kron(Gaussian, stored_as="fl_lightning.gaussian.kron.Kron"):
    """A Gaussian over one layer with precision G (x) A + damping I.

    Attributes:
        mean: Weight and, if there is one, bias, in this order.
        inputs: A, with the bias last.
        slopes: G.
        damping: Added to the diagonal where the precision is used.
        iterations: Of the conjugate gradients in the product that made it.
        residual: Of its equation, relative to the right side.
    """

    mean: Params
    inputs: Tensor
    slopes: Tensor
    damping: float = 0.0
    iterations: int = 0
    residual: float = 0.0

    def apply(self, vector: Params) -> Params:
        matrix = joined(vector)
        image = self.slopes.to(matrix.dtype) @ matrix @ self.inputs.to(matrix.dtype)
        return split(image + self.damping * matrix, vector)

    def solve(self, vector: Params) -> Params:
        (left, basis), (right, other) = (torch.linalg.eigh(part.double()) for part in (self.slopes, self.inputs))
        rotated = basis.T @ joined(vector).double() @ other / (torch.outer(left, right) + self.damping)
        return split(basis @ rotated @ other.T, vector)

    def log_determinant(self) -> Tensor:
        left, right = (torch.linalg.eigvalsh(part.double()) for part in (self.slopes, self.inputs))
        return (torch.outer(left, right) + self.damping).log().sum()

    def damped(self, damping: float) -> Self:
        return replace(self, damping=self.damping + damping)

    @classmethod
    def product(cls, posteriors: Sequence[Self], weights: Sequence[float], damping: float = 0.0) -> Self:
        """The solution of sum_n w_n (G_n M A_n + gamma M) = sum_n w_n (G_n M_n A_n + gamma M_n).

        The precision of the result is the product of the mean factors, with the trace of the sum.
        """
        solved = cls._solved(posteriors, weights, damping, (0.0, 0.0), "cg")
        projected = cls.summed(posteriors, weights, Merging())
        total = damping + sum(weight * posterior.damping for posterior, weight in zip(posteriors, weights, strict=True))
        return replace(solved, inputs=projected.inputs, slopes=projected.slopes, damping=total)

    @classmethod
    def merged(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> Self:
        """With (G_n + gamma_G I) (x) (A_n + gamma_A I), or gamma I added to the whole without gamma_G."""
        if merging.gradients is None:
            solved = cls._solved(
                posteriors, weights, cls.common_damping(posteriors, weights, merging), (0.0, 0.0), merging.solver
            )
        else:
            solved = cls._solved(
                posteriors, weights, 0.0, cls._factor_damping(posteriors, weights, merging), merging.solver
            )
        projected = cls.summed(posteriors, weights, merging)
        return replace(solved, inputs=projected.inputs, slopes=projected.slopes)

    @classmethod
    def damped_posteriors(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> list[Self]:
        if merging.gradients is None:
            return super().damped_posteriors(posteriors, weights, merging)
        slopes, inputs = cls._factor_damping(posteriors, weights, merging)
        return [
            replace(posterior, slopes=_plus(posterior.slopes, slopes), inputs=_plus(posterior.inputs, inputs))
            for posterior in posteriors
        ]

    @classmethod
    def _factor_damping(
        cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging
    ) -> tuple[float, float]:
        """Is added to the diagonals of all G_n and of all A_n: the same for all, so that equal posteriors stay so."""

        def mean_trace(factors: Sequence[Tensor]) -> float:
            traces = numbers(factor.diagonal().double().sum() for factor in factors)
            return sum(weight * trace for weight, trace in zip(weights, traces, strict=True))

        like = posteriors[0]
        return (
            merging.gamma_of_gradients(mean_trace([posterior.slopes for posterior in posteriors]), len(like.slopes)),
            merging.gamma(mean_trace([posterior.inputs for posterior in posteriors]), len(like.inputs)),
        )

    @classmethod
    def _solved(
        cls,
        posteriors: Sequence[Self],
        weights: Sequence[float],
        damping: float,
        factor_damping: tuple[float, float],
        solver: Solver,
    ) -> Self:
        like = posteriors[0]
        damping += sum(weight * posterior.damping for posterior, weight in zip(posteriors, weights, strict=True))
        total = KronSum(
            [posterior.slopes for posterior in posteriors],
            [posterior.inputs for posterior in posteriors],
            tuple(weights),
            *factor_damping,
            damping,
        )
        average, offsets = average_and_offsets([posterior.mean for posterior in posteriors], weights)
        if solver == "cg":
            found = total.solved(total.sum_of(offsets))
            matrix = average + found.value
        else:
            found = total.factored(total.sum_of([average + offset for offset in offsets]))
            matrix = found.value
        mean = cast_like(split(matrix, like.mean), like.mean)
        return cls(mean, like.inputs, like.slopes, 0.0, found.iterations, found.residual)

    @classmethod
    def summed(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> Self:
        """One Kronecker product for sum_n w_n G_n (x) A_n.

        factors: the product of the mean factors, scaled to the trace of the sum. nearest: the nearest one in Frobenius
        norm, by alternating least squares: each factor is a non-negative combination of the posteriors', hence positive
        semi-definite. Scaled to tr A = sum_n w_n tr A_n: averages over rounds take the factors one by one.
        """
        like = posteriors[0]
        left, right = [posterior.slopes for posterior in posteriors], [posterior.inputs for posterior in posteriors]
        slopes, inputs = _combination(left, weights), _combination(right, weights)
        if len(posteriors) > 1 and merging.projection == "factors":
            traces = numbers(
                g.diagonal().double().sum() * a.diagonal().double().sum() for g, a in zip(left, right, strict=True)
            )
            whole = sum(weight * trace for weight, trace in zip(weights, traces, strict=True))
            found = float(slopes.diagonal().sum() * inputs.diagonal().sum())
            slopes = slopes * (whole / found) if found > 0 else slopes
        elif len(posteriors) > 1:
            whole = float(inputs.diagonal().sum())
            for _ in range(ALTERNATIONS):
                inputs = _combination(right, [w * _share(g, slopes) for w, g in zip(weights, left, strict=True)])
                slopes = _combination(left, [w * _share(a, inputs) for w, a in zip(weights, right, strict=True)])
            found = float(inputs.diagonal().sum())
            if found > 0:
                inputs, slopes = inputs * (whole / found), slopes * (found / whole)
        return like.with_parts(cast_like({"inputs": inputs, "slopes": slopes}, like.parts()))

    def diagonal(self) -> Params:
        return split(torch.outer(self.slopes.diagonal(), self.inputs.diagonal()) + self.damping, self.mean)

    def trace(self) -> float:
        left, right = (float(part.diagonal().double().sum()) for part in (self.slopes, self.inputs))
        return left * right + self.damping * self.size

    def largest_eigenvalue(self) -> float:
        left, right = (float(torch.linalg.eigvalsh(part.double())[-1]) for part in (self.slopes, self.inputs))
        return left * right + self.damping

    def parts(self) -> Params:
        return {"inputs": self.inputs, "slopes": self.slopes}

    def with_parts(self, parts: Params) -> Self:
        return type(self)(self.mean, parts["inputs"], parts["slopes"], self.damping)

    def notes(self) -> dict[str, float]:
        return {"solver_iterations": float(self.iterations), "solver_residual": self.residual}

    def numbers_sent(self) -> int:
        return count(self.mean) + triangle(self.inputs) + triangle(self.slopes)


def _combination(matrices: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return weighted_sum(({"": matrix} for matrix in matrices), weights)[""]


def _share(matrix: Tensor, onto: Tensor) -> float:
    """The coefficient of the projection of one matrix onto another."""
    size = float(onto.square().sum())
    return float((matrix.double() * onto).sum()) / size if size > 0 else 0.0


def _plus(matrix: Tensor, damping: float) -> Tensor:
    return matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
