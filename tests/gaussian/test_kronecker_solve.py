"""Conjugate gradients on sums of Kronecker products, against the dense system."""

import pytest
import torch

from fl_lightning.gaussian import kronecker_solve
from fl_lightning.gaussian.kronecker_solve import KronSum


def positive(size, stream):
    """A matrix with eigenvalues over four orders of magnitude."""
    basis = torch.linalg.qr(torch.randn(size, size, generator=stream, dtype=torch.float64))[0]
    return basis @ torch.logspace(-2, 2, size, dtype=torch.float64).diag() @ basis.T


def test_as_many_steps_as_unknowns_are_enough(monkeypatch):
    """Conjugate directions do not meet twice; along gradients alone it takes hundreds of steps."""
    monkeypatch.setattr(kronecker_solve, "TOLERANCE", 1e-9)
    stream = torch.Generator().manual_seed(0)
    gradients, inputs = ([positive(size, stream) for _ in range(3)] for size in (3, 4))
    weights, eye = (0.5, 0.3, 0.2), [torch.eye(size, dtype=torch.float64) for size in (3, 4)]
    right = torch.randn(3, 4, generator=stream, dtype=torch.float64)
    found = KronSum(gradients, inputs, weights, 0.1, 0.2, 0.3).solved(right)
    dense = sum(
        w * torch.kron(g + 0.1 * eye[0], a + 0.2 * eye[1]) for w, g, a in zip(weights, gradients, inputs, strict=True)
    ) + 0.3 * torch.eye(12, dtype=torch.float64)
    expected = torch.linalg.solve(dense, right.flatten()).view(3, 4)
    assert found.iterations <= 14  # two more for rounding
    assert found.residual < 1e-9
    assert (found.value - expected).norm() == pytest.approx(0, abs=1e-8 * float(expected.norm()))
