import warnings

import pytest
import torch
from torch import nn

from fl_lightning.curvature.per_sample import from_layers, from_samples, squared_gradients
from fl_lightning.models.networks.cnn import Cnn
from fl_lightning.models.task import Task

X = torch.randn(7, 2, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(7) % 3


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(162, 162)
        self.out = nn.Linear(162, 3)

    def forward(self, x):
        return self.out(self.layer(torch.tanh(self.layer(x.flatten(1)))))


class Scaled(nn.Module):
    """A parameter that belongs to no known layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.out = nn.Linear(162, 3)

    def forward(self, x):
        return self.scale * self.out(x.flatten(1))


class Tied(nn.Module):
    """An autoencoder's halves share a weight; and so do two layers of different place."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(162, 162), nn.Linear(162, 162), nn.Linear(162, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1))))))


class Reused(nn.Module):
    """A weight that is used by its layer and once more, transposed, outside of it."""

    def __init__(self):
        super().__init__()
        self.code, self.out = nn.Linear(162, 4), nn.Linear(162, 3)

    def forward(self, x):
        return self.out(nn.functional.linear(torch.tanh(self.code(x.flatten(1))), self.code.weight.T))


class ByKeyword(nn.Module):
    """A layer whose input has its name."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(162, 3)

    def forward(self, x):
        return self.out(input=x.flatten(1))


class Idle(nn.Module):
    """A layer whose output nobody needs."""

    def __init__(self):
        super().__init__()
        self.idle, self.out = nn.Linear(162, 2), nn.Linear(162, 3)

    def forward(self, x):
        self.idle(x.flatten(1))
        return self.out(x.flatten(1))


class Places(nn.Module):
    """The positions of all samples, one below the other, go through a layer."""

    def __init__(self):
        super().__init__()
        self.each, self.out = nn.Linear(9, 4), nn.Linear(72, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.each(x.reshape(-1, 9))).view(len(x), 72))


class Hooked(nn.Module):
    """Somebody doubles what a layer gives."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(162, 3)
        self.out.register_forward_hook(lambda layer, inputs, output: 2 * output)

    def forward(self, x):
        return self.out(x.flatten(1))


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(162, 3)))


def flat(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


KNOWN = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(162, 5), nn.ReLU(), nn.Linear(5, 3)),
    "without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(162, 3, bias=False)),
    "convolution": lambda: flat(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 2)),
    "by keyword": ByKeyword,
    "in place": lambda: nn.Sequential(nn.Flatten(), nn.Linear(162, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
    "strides and padding": lambda: flat(nn.Conv2d(2, 4, (3, 2), stride=2, padding=(1, 0), dilation=2, bias=False)),
}
UNKNOWN = {
    "used twice": Twice,
    "tied": Tied,
    "used outside of its layer": Reused,
    "not needed": Idle,
    "positions as samples": Places,
    "hooked": Hooked,
    "weight norm, by a hook": old_weight_norm,
    "weight norm": lambda: nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(162, 3))),
    "orthogonal": lambda: nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.orthogonal(nn.Linear(162, 3), orthogonal_map="cayley")
    ),
    "no layer": Scaled,
    "groups": lambda: flat(nn.Conv2d(2, 4, 3, groups=2)),
    "circular": lambda: flat(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")),
    "positions": lambda: nn.Sequential(nn.Linear(9, 4), nn.Flatten(), nn.Linear(72, 3)),
}


def task_of(build):
    torch.manual_seed(0)
    model = build().double()
    model(X)
    return Task(model)


def brute_force(task):
    total = {name: torch.zeros_like(value) for name, value in task.initial.params.items()}
    for x, y in zip(X, Y, strict=True):
        loss = nn.functional.cross_entropy(task.model(x[None]), y[None])
        slopes = torch.autograd.grad(loss, list(task.model.parameters()), materialize_grads=True)
        for name, slope in zip(total, slopes, strict=True):
            total[name] += slope**2 / len(Y)
    return total


@pytest.mark.parametrize("name", KNOWN)
def test_layers_equal_a_loop_over_samples(name):
    task = task_of(KNOWN[name])
    found, expected = from_layers(task, task.initial, X, Y), brute_force(task)
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert torch.allclose(found[key], value, atol=1e-14)


@pytest.mark.parametrize("name", KNOWN | UNKNOWN)
def test_samples_equal_a_loop_over_samples(name):
    task = task_of((KNOWN | UNKNOWN)[name])
    found, expected = from_samples(task, task.initial, X, Y), brute_force(task)
    for key, value in expected.items():
        assert torch.allclose(found[key], value, atol=1e-14)


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_networks_are_left_to_samples(name):
    task = task_of(UNKNOWN[name])
    assert from_layers(task, task.initial, X, Y) is None


def test_blocks_bound_the_memory_and_change_nothing(monkeypatch):
    task = task_of(UNKNOWN["no layer"])
    monkeypatch.setattr("fl_lightning.curvature.per_sample.LARGEST_BLOCK", 3 * task.num_params)
    found, expected = squared_gradients(task, task.initial, X, Y), brute_force(task)
    assert all(torch.allclose(found[name], value, atol=1e-14) for name, value in expected.items())


def test_a_mask_leaves_samples_out():
    task = task_of(KNOWN["linear"])
    mask = torch.tensor([1.0, 1, 1, 0, 0, 0, 0], dtype=torch.float64)
    found = from_samples(task, task.initial, X, Y, mask)
    expected = from_samples(task, task.initial, X[:3], Y[:3])
    assert all(torch.allclose(found[name], expected[name]) for name in expected)


def test_frozen_layers_are_skipped():
    torch.manual_seed(0)
    model = KNOWN["linear"]().double()
    model[1].requires_grad_(False)
    task = Task(model)
    found, expected = from_layers(task, task.initial, X, Y), from_samples(task, task.initial, X, Y)
    assert list(found) == ["3.weight", "3.bias"]
    assert all(torch.allclose(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", KNOWN | UNKNOWN)
def test_squares_equal_a_loop_over_samples(name):
    task = task_of((KNOWN | UNKNOWN)[name])
    found, expected = squared_gradients(task, task.initial, X, Y), brute_force(task)
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert torch.allclose(found[key], value, atol=1e-14)


@pytest.mark.parametrize("mask", [None, torch.ones(7, dtype=torch.float64)])
def test_squares_leave_the_dropout_of_the_step_alone(mask):
    """With one sample the square of the gradient at the same masks: those that the training step draws next."""
    task = task_of(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(162, 3)))
    before = torch.get_rng_state()
    squared_gradients(task, task.initial, X, Y, mask)
    assert torch.equal(torch.get_rng_state(), before)
    if mask is None:
        found = squared_gradients(task, task.initial, X[:1], Y[:1])
        loss = nn.functional.cross_entropy(task.model(X[:1]), Y[:1])
        for slope, square in zip(torch.autograd.grad(loss, list(task.model.parameters())), found.values(), strict=True):
            assert torch.allclose(slope.square(), square, atol=1e-14)


def test_the_cnn_lays_images_out_for_its_convolutions_under_vmap_too():
    task = Task(Cnn((3, 16, 16), 10))
    x, y = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    ours, theirs = (squares(task, task.initial, x, y) for squares in (from_layers, from_samples))
    for name, square in ours.items():
        torch.testing.assert_close(theirs[name], square, rtol=1e-3, atol=1e-6)
