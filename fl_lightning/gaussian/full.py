"""Gaussians with a full precision matrix: every correlation, at d^2 numbers.

Matrices stay in the type they come in (7,850 parameters: 246 MB in float32), are summed and factored in float64, and
are read in blocks of rows wherever float64 is only needed in passing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.damping import Merging
from fl_lightning.params import Params, cast_like, count, flatten, numbers, unflatten, weighted_sum
from fl_lightning.system import activity

# Rows that are converted to float64 at once.
ROWS = 512
# A damping of zero cannot be multiplied: the first raise is to this share of the mean diagonal.
SMALLEST_DAMPING = 1e-12
LARGEST_RAISES = 40


class Factor(NamedTuple):
    """A Cholesky factor, and what it took.

    Attributes:
        lower: L with L L^T = Lambda + damping I, in float64.
        damping: gamma, with which the matrix was positive definite.
        raises: How often gamma had to be multiplied by 10 for that.
    """

    lower: Tensor
    damping: float
    raises: int

    def solve(self, vector: Tensor) -> Tensor:
        return torch.cholesky_solve(vector.double().unsqueeze(1), self.lower).squeeze(1)


def triangle(matrix: Tensor) -> int:
    """Numbers of a symmetric matrix as it is sent: its upper triangle."""
    return len(matrix) * (len(matrix) + 1) // 2


def factor(matrix: Callable[[], Tensor], damping: float) -> Factor:
    """The Cholesky factor of a float64 matrix + damping I; while that is not positive definite, damping is raised.

    The matrix is asked for, and again after every raise, because its memory becomes the factor: holding both would
    take another d^2 numbers. A matrix that is not finite has a factor of NaN: training has diverged, and no damping
    helps.
    """
    raises = 0
    while True:
        lower = matrix()
        activity.say(f"Cholesky factor of {len(lower):,} parameters")
        diagonal = lower.diagonal()
        scale, finite = numbers((diagonal.abs().mean(), diagonal.isfinite().all().to(diagonal.dtype)))
        diagonal.add_(damping)
        info = torch.empty((), dtype=torch.int32, device=lower.device)
        torch.linalg.cholesky_ex(lower, out=(lower, info))
        failed = bool(info)
        if not failed or raises == LARGEST_RAISES or not finite:
            break
        del lower, diagonal
        damping = damping * 10 or SMALLEST_DAMPING * (scale or 1.0)
        raises += 1
    if failed:
        lower.fill_(torch.nan)
    return Factor(lower, damping, raises)


@dataclass(frozen=True)
class Full(Gaussian, stored_as="fl_lightning.gaussian.full.Full"):
    """A Gaussian with precision Lambda = matrix + damping I.

    Attributes:
        mean: mu.
        matrix: Symmetric, positive semi-definite; rows and columns in the order of `flatten`.
        damping: Added to the diagonal where the precision is used, so that no second matrix is needed for it.
        raises: How often a product multiplied its damping by 10, because its matrix was numerically singular.
    """

    mean: Params
    matrix: Tensor
    damping: float = 0.0
    raises: int = 0

    @classmethod
    def flat(cls, params: Params) -> Self:
        """The Gaussian with these parameters as mean and no precision; its matrix takes no memory."""
        size, like = count(params), next(iter(params.values()))
        return cls(params, like.new_zeros(1, 1).expand(size, size))

    def apply(self, vector: Params) -> Params:
        flat = flatten(vector)
        result = _times(self.matrix, flat)
        return unflatten(result.add_(flat, alpha=self.damping) if self.damping else result, vector)

    def solve(self, vector: Params) -> Params:
        return unflatten(factor(self._doubles, self.damping).solve(flatten(vector)), vector)

    def log_determinant(self) -> Tensor:
        lower = factor(self._doubles, self.damping).lower
        return 2 * lower.diagonal().log().sum()

    def _doubles(self) -> Tensor:
        return self.matrix.to(torch.float64, copy=True)

    def damped(self, damping: float) -> Self:
        return type(self)(self.mean, self.matrix, self.damping + damping)

    @classmethod
    def product(cls, posteriors: Sequence[Self], weights: Sequence[float], damping: float = 0.0) -> Self:
        """(sum_n w_n Lambda_n + gamma I) mu = sum_n w_n (Lambda_n + gamma I) mu_n, by a Cholesky factor in float64.

        Solved for the offset of mu from the average mu_A, whose right side sum_n w_n Lambda_n (mu_n - mu_A) does not
        depend on gamma: identical posteriors are reproduced exactly, and directions in which none has any precision
        (softmax regression has some by construction) take the average, however far gamma had to be raised. The matrix
        of the result is sum_n w_n Lambda_n; gamma is kept beside it.
        """
        like = posteriors[0]
        average = flatten(weighted_sum((e.mean for e in posteriors), weights))
        moment = torch.zeros_like(average)

        def total() -> Tensor:
            matrix = torch.zeros_like(like.matrix, dtype=torch.float64)
            for posterior, weight in zip(posteriors, weights, strict=True):
                matrix.add_(posterior.matrix, alpha=weight)
            return matrix

        for posterior, weight in zip(posteriors, weights, strict=True):
            offset = flatten(posterior.mean).double().sub_(average)
            moment.add_(_times(posterior.matrix, offset).add_(offset, alpha=posterior.damping), alpha=weight)
        damping += sum(weight * posterior.damping for posterior, weight in zip(posteriors, weights, strict=True))
        found = factor(total, damping)
        mean = unflatten(average.add_(found.solve(moment)), like.mean)
        raised, raises = found.damping, found.raises
        del found  # before the sum is formed once more
        return cls(cast_like(mean, like.mean), total().to(like.matrix.dtype), raised, raises)

    @classmethod
    def merged(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> Self:
        # Without a second sum: the product's matrix is it.
        combined = cls.product(posteriors, weights, cls.common_damping(posteriors, weights, merging))
        return replace(combined, damping=0.0)

    def diagonal(self) -> Params:
        return unflatten(self._diagonal(), self.mean)

    def trace(self) -> float:
        return float(self._diagonal().double().sum())

    def _diagonal(self) -> Tensor:
        diagonal = self.matrix.diagonal()
        return diagonal + self.damping if self.damping else diagonal

    def largest_eigenvalue(self) -> float:
        return largest_eigenvalue(self.matrix) + self.damping

    def parts(self) -> Params:
        return {"matrix": self.matrix}

    def with_parts(self, parts: Params) -> Self:
        return type(self)(self.mean, parts["matrix"], self.damping)

    def over_rounds(self, share: float, earlier: Self, earlier_share: float) -> Self:
        # In place on a private matrix: copies would take gigabytes.
        return self.with_parts({"matrix": self.matrix.mul_(share).add_(earlier.matrix, alpha=earlier_share)})

    def notes(self) -> dict[str, float]:
        return {"damping_raised": float(self.raises)}

    def numbers_sent(self) -> int:
        return count(self.mean) + triangle(self.matrix)


def largest_eigenvalue(matrix: Tensor, steps: int = 30) -> float:
    """The largest eigenvalue of a positive semi-definite matrix, from below, in few products with it.

    Rayleigh and Ritz in the Krylov space of a random vector, always the same one (Lanczos, with full
    orthogonalisation). Not of the diagonal or of ones: softmax regression has null vectors by construction, and with
    two classes these are among them.
    """
    stream = torch.Generator().manual_seed(0)
    vector = torch.randn(len(matrix), generator=stream, dtype=torch.float64).to(matrix.device)
    basis, images = vector.new_zeros(0, len(matrix)), vector.new_zeros(0, len(matrix))
    for _ in range(min(steps, len(matrix))):
        length = float(vector.norm())
        for _ in range(2):  # once more for what rounding has left
            vector = vector - basis.T @ (basis @ vector)
        if not float(vector.norm()) > 1e-10 * length:
            break  # the space holds its own image
        direction = vector / vector.norm()
        vector = (matrix @ direction.to(matrix.dtype)).double()
        basis, images = torch.cat([basis, direction[None]]), torch.cat([images, vector[None]])
    projected = basis @ images.T
    if not bool(torch.isfinite(projected).all()):
        return float("nan")
    return float(torch.linalg.eigvalsh(projected)[-1])


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """The product in the type of the vector, without a copy of the whole matrix."""
    if matrix.dtype == vector.dtype:
        return matrix @ vector
    return torch.cat([rows.to(vector.dtype) @ vector for rows in torch.split(matrix, ROWS)])
