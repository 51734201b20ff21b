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


@pytest.mark.parametrize("name", [name for name in PENALTIES if name != "detached"])
def test_gradients_and_steps_are_those_of_the_value(name):
    penalty, theta = PENALTIES[name], params(4)
    slope = torch.func.grad(penalty.value)(theta)
    value, beside = penalty.value_and_grad(theta)
    assert value == pytest.approx(penalty.value(theta).item(), rel=1e-14)
    moved = zip_map(torch.clone, theta)
    penalty.descent(0.1)(moved)
    step = zip_map(lambda before, after: (before - after) / 0.1, theta, moved)
    for found in (penalty.grad(theta), beside, step):
        torch.testing.assert_close(found, slope, rtol=1e-12, atol=1e-14)


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
def test_along_a_path_the_order_of_numbers_in_memory_does_not_matter(mine, theirs):
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
    path = penalty.along_path()
    for seed in range(4, 9):
        theta = params(seed)
        value, grad = path(theta)
        expected, slope = penalty.value_and_grad(theta)
        assert value == pytest.approx(expected.item(), rel=1e-14)
        assert all(torch.equal(grad[name], slope[name]) for name in slope)
        for total in grad.values():  # the caller's to write into
            total.add_(1.0)


def test_one_number_in_a_tensor_is_a_stiffness_for_all():
    params, centre = ({"w": torch.randn(4, 3), "b": torch.randn(1)} for _ in range(2))
    expected, found = Quadratic(centre, 0.3), Quadratic(centre, torch.tensor(0.3, dtype=torch.float64))
    for penalty in (found.value_and_grad, found.along_path()):
        value, slope = penalty(params)
        torch.testing.assert_close(value, expected.value(params))
        torch.testing.assert_close(slope, expected.grad(params))
    stepped = [zip_map(torch.clone, params) for _ in range(2)]
    for penalty, mine in zip((found, expected), stepped, strict=True):
        penalty.descent(0.1)(mine)
    torch.testing.assert_close(*stepped)


def test_each_client_may_have_a_stiffness_of_its_own_under_vmap():
    params, centre = ({"w": torch.randn(4, 3)} for _ in range(2))
    strengths = torch.tensor([0.1, 0.5])
    found = torch.func.vmap(lambda mu: Quadratic(centre, mu).grad(params)["w"])(strengths)
    torch.testing.assert_close(found, torch.stack([Quadratic(centre, float(mu)).grad(params)["w"] for mu in strengths]))


@pytest.mark.parametrize(("stiffness", "given"), [(None, "None"), ("1", "'1'"), (torch.ones(2), "a tensor of shape")])
def test_a_stiffness_of_another_kind_is_refused_where_it_is_given(stiffness, given):
    with pytest.raises(TypeError, match=rf"must be a number or a dict like its centre, got {given}"):
        Quadratic({"w": torch.ones(3)}, stiffness)
