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


def large(seed, change=lambda value: value):
    """More than a piece, one tensor in another order, one empty."""
    stream = torch.Generator().manual_seed(seed)
    shapes = {"w": (300, 500), "conv": (7, 5, 3, 3), "none": (0, 3), "b": (300,)}
    return {name: change(torch.randn(shape, generator=stream, dtype=torch.float64)) for name, shape in shapes.items()}


def in_other_order(value):
    return value.to(memory_format=torch.channels_last) if value.dim() == 4 else value


LAYOUTS = {
    "the usual": lambda value: value,
    "channels last": in_other_order,
    "columns first": lambda value: value.T.contiguous().T if value.dim() == 2 else value,
    "with gaps": lambda value: torch.stack([value, value], -1)[..., 0],
    "all the same": lambda value: torch.tensor(0.7, dtype=torch.float64).expand_as(value),
}


@pytest.mark.parametrize("theirs", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mine", list(LAYOUTS.values())[:4], ids=list(LAYOUTS)[:4])
def test_pieces_are_the_same_in_whatever_order_numbers_lie(mine, theirs):
    penalty = Quadratic(large(1, in_other_order), large(2, theirs))
    path, theta = penalty.along_path(), large(3, mine)
    for _ in range(3):
        value, grad = path(theta)
        expected, slope = penalty.value_and_grad(theta)
        assert value == pytest.approx(expected.item(), rel=1e-13)
        assert all(torch.equal(grad[name], slope[name]) for name in slope)
        for place in theta.values():
            place.mul_(0.9)


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
