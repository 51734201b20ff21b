"""Penalties along a path: the same values and gradients, in memory that the caller may write into."""

import pytest
import torch

from fl_lightning.params import zip_map
from fl_lightning.penalty import Detached, Linear, Quadratic, Sum


def params(seed):
    stream = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=stream, dtype=torch.float64) for name, shape in (("w", (3, 2)), ("b", 2))
    }


PENALTIES = {
    "one stiffness": Quadratic(params(1), 0.3),
    "many": Quadratic(params(1), params(2)),
    "linear": Linear(params(3)),
    "sum": Sum(Linear(params(3)), Quadratic(params(1), params(2))),
    "detached": Detached(Quadratic(params(1), 0.3)),
}


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_along_a_path_a_penalty_is_what_it_is_anywhere(penalty):
    path, kept = penalty.along_path(), []
    for seed in range(4, 9):
        theta = params(seed)
        value, grad = path(theta)
        expected, slope = penalty.value_and_grad(theta)
        assert value == pytest.approx(expected.item(), rel=1e-14)
        assert all(torch.equal(grad[name], slope[name]) for name in slope)
        for before, copy in kept[-1:]:  # of the step before, which nothing has overwritten
            assert all(torch.equal(before[name], copy[name]) for name in copy)
        for total in grad.values():  # the caller's to write into
            total.add_(1.0)
        kept.append((grad, zip_map(torch.clone, grad)))
