"""Layers at work, and Kronecker factors against brute force: loops over samples and places in float64."""

import itertools

import pytest
import torch
from torch import nn

from fl_lightning import streams
from fl_lightning.curvature import gauss_newton
from fl_lightning.curvature.kronecker_factors import factors
from fl_lightning.curvature.layers import record
from fl_lightning.data.batches import ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError
from fl_lightning.models.task import Task
from tests.curvature.test_per_sample import KNOWN, UNKNOWN, X, Y, task_of
from tests.support.layer_references import seeds

CLASSES = 3


def client(x=X, y=Y):
    dataset = Dataset(x, y, x[:1], y[:1], CLASSES)
    return ClientData(0, dataset, torch.arange(len(y)), torch.float64)


def padded(layer, image):
    return nn.functional.pad(image, (layer.padding[1],) * 2 + (layer.padding[0],) * 2)


def places(layer, given):
    """Input vectors of a layer by place, with a one for the bias."""
    if isinstance(layer, nn.Linear):
        rows = list(given.reshape(-1, given.shape[-1]))
    else:
        image, rows = padded(layer, given[0]), []
        (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
        height = (image.shape[1] - dh * (kh - 1) - 1) // sh + 1
        width = (image.shape[2] - dw * (kw - 1) - 1) // sw + 1
        for i, j in itertools.product(range(height), range(width)):
            window = image[:, i * sh : i * sh + dh * (kh - 1) + 1 : dh, j * sw : j * sw + dw * (kw - 1) + 1 : dw]
            rows.append(window.reshape(-1))
    one = torch.ones(1, dtype=given.dtype)
    return [torch.cat([row, one]) if layer.bias is not None else row for row in rows]


def brute_force(task, x, y, kind):
    """A and G of every linear or convolutional layer, sample by sample and place by place."""
    layers = {n: m for n, m in task.model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    found = {}
    for sample, label in zip(x, y, strict=True):
        kept = {}
        hooks = [
            m.register_forward_hook(lambda _, i, o, n=n, k=kept: k.__setitem__(n, (i[0], o))) for n, m in layers.items()
        ]
        logits = task.model(sample[None])
        for hook in hooks:
            hook.remove()
        p = logits.detach().softmax(1)[0]
        for name, layer in layers.items():
            given, output = kept[name]
            rows = places(layer, given.detach())
            a = sum(torch.outer(row, row) for row in rows)
            g = 0.0
            for weight, seed in seeds(p, label, kind):
                (slope,) = torch.autograd.grad(logits, output, seed[None], retain_graph=True)
                columns = slope[0].reshape(len(layer.weight), -1).T if isinstance(layer, nn.Conv2d) else slope
                columns = columns.reshape(-1, len(layer.weight))
                assert len(columns) == len(rows)
                g = g + weight * sum(torch.outer(c, c) for c in columns) / len(rows)
            key = f"{name}.weight" if name else "weight"
            before = found.get(key, (0.0, 0.0))
            found[key] = (before[0] + a / len(y), before[1] + g / len(y))
    return found


PLAIN = {
    "softmax regression": lambda: nn.Sequential(nn.Flatten(), nn.Linear(162, 3)),
    "linear": KNOWN["linear"],
    "without bias": KNOWN["without bias"],
    "convolution": KNOWN["convolution"],
    "strides and padding": KNOWN["strides and padding"],
    "linear at every place": lambda: nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)),
}


@pytest.mark.parametrize("kind", ["exact", "empirical"])
@pytest.mark.parametrize("name", PLAIN)
def test_factors_equal_loops_over_samples_and_places(name, kind):
    task = task_of(PLAIN[name])
    found = factors(task, task.initial, client(), kind)
    expected = brute_force(task, X, Y, kind)
    assert found.rest == ()
    assert found.inputs.keys() == found.gradients.keys() == expected.keys()
    for key, (a, g) in expected.items():
        assert torch.allclose(found.inputs[key], a, atol=1e-12)
        assert torch.allclose(found.gradients[key], g, atol=1e-14)


def joint_order(weight, bias):
    """Where the parameters of [W, b], row by row, stand in `flatten` order: all of W, then b."""
    outputs, inputs = weight.shape[0], weight[0].numel()
    order = []
    for o in range(outputs):
        order += [o * inputs + i for i in range(inputs)]
        order += [outputs * inputs + o] if bias is not None else []
    return order


@pytest.mark.parametrize("name", ["softmax regression", "linear", "without bias"])
def test_of_one_sample_the_product_is_the_gauss_newton_block(name):
    task = task_of(PLAIN[name])
    found = factors(task, task.initial, client(X[:1], Y[:1]))
    matrix = gauss_newton.matrix(task, task.initial, X[:1], Y[:1])
    offset = 0
    params = task.initial.params
    for key in found.inputs:
        weight, bias = params[key], params.get(key.removesuffix("weight") + "bias")
        size = weight.numel() + (0 if bias is None else bias.numel())
        block = matrix[offset : offset + size, offset : offset + size]
        order = torch.tensor(joint_order(weight, bias))
        assert torch.allclose(torch.kron(found.gradients[key], found.inputs[key]), block[order][:, order], atol=1e-14)
        offset += size
    assert offset == len(matrix)


@pytest.mark.parametrize("kind", ["exact", "empirical", "sampled", None])
def test_neither_the_order_of_samples_nor_blocks_change_anything(kind):
    task = task_of(PLAIN["convolution"])

    def found(data, block):
        return factors(task, task.initial, data, kind, streams.generator(0, "test"), block)

    whole, parts = found(client(), 500), found(client(), 2)
    shuffled = found(client(X.flip(0), Y.flip(0)), 3) if kind != "sampled" else parts
    for other in (parts, shuffled):
        for mine, theirs in zip(whole[:2], other[:2], strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.allclose(mine[key], theirs[key], rtol=0, atol=1e-12) for key in mine)
    assert (whole.gradients == {}) == (kind is None)


def test_small_blocks_of_patches_change_nothing(monkeypatch):
    task = task_of(PLAIN["convolution"])
    whole = factors(task, task.initial, client(), None)
    monkeypatch.setattr("fl_lightning.curvature.kronecker_factors.LARGEST_BLOCK", 1)
    single = factors(task, task.initial, client(), None)
    assert all(torch.allclose(whole.inputs[key], single.inputs[key], atol=1e-12) for key in whole.inputs)


def test_a_kernel_of_the_size_of_the_image_is_a_linear_layer():
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(2, 5, 9), nn.Flatten(), nn.Tanh(), nn.Linear(5, 3)).double()
    linear = nn.Sequential(nn.Flatten(), nn.Linear(162, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for mine, theirs in zip(linear.parameters(), convolution.parameters(), strict=True):
        mine.data = theirs.detach().reshape(mine.shape).clone()
    one, two = (factors(Task(model), Task(model).initial, client()) for model in (convolution, linear))
    for first, second in (("0.weight", "1.weight"), ("3.weight", "3.weight")):
        assert torch.allclose(one.inputs[first], two.inputs[second], atol=1e-12)
        assert torch.allclose(one.gradients[first], two.gradients[second], atol=1e-14)


@pytest.mark.slow
def test_drawn_labels_are_right_in_the_mean():
    """G of drawn labels is that of all labels in expectation: 2,000 passes within five standard errors."""
    task = task_of(PLAIN["linear"])
    exact = factors(task, task.initial, client()).gradients
    draws = [
        factors(task, task.initial, client(), "sampled", streams.generator(i, "test")).gradients for i in range(2000)
    ]
    for key, expected in exact.items():
        values = torch.stack([draw[key] for draw in draws])
        error = values.std(0) / len(draws) ** 0.5
        assert bool(((values.mean(0) - expected).abs() <= 5 * error + 1e-12).all())


def test_the_same_stream_draws_the_same_labels():
    task = task_of(PLAIN["linear"])
    one, two, other = (
        factors(task, task.initial, client(), "sampled", streams.generator(seed, "test")).gradients["3.weight"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_factors_are_taken_in_evaluation_mode_and_leave_no_trace():
    task = task_of(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(162, 3)))
    task.model.train()
    before = torch.get_rng_state()
    found = factors(task, task.initial, client())
    assert torch.equal(torch.get_rng_state(), before)
    assert task.model.training
    rows = torch.cat([X.flatten(1), torch.ones(7, 1, dtype=torch.float64)], dim=1)
    assert torch.allclose(found.inputs["2.weight"], rows.T @ rows / 7, atol=1e-12)
    assert not any(module._forward_hooks for module in task.model.modules())


def test_other_likelihoods_have_empirical_slopes_only():
    task = Task(task_of(PLAIN["linear"]).model, nn.functional.multi_margin_loss)
    factors(task, task.initial, client(), "empirical")
    with pytest.raises(UserError, match="curvature of the outputs is not known"):
        factors(task, task.initial, client(), "exact")


class Mixed(nn.Module):
    """A convolution with groups, GroupNorm, BatchNorm, a scale of its own, and plain layers between them."""

    def __init__(self):
        super().__init__()
        self.plain, self.grouped = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=2)
        self.norm, self.batch = nn.GroupNorm(2, 4), nn.BatchNorm1d(6)
        self.hidden, self.out = nn.Linear(100, 6), nn.Linear(6, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = torch.relu_(self.norm(self.grouped(self.plain(x))))
        return self.scale * self.out(torch.relu(self.batch(self.hidden(x.flatten(1)))))


def test_a_mixed_network_says_which_parameters_are_of_plain_layers():
    task = task_of(Mixed)
    recording = record(task, task.initial, X)
    assert [call.names for call in recording.calls] == [
        ("plain.weight", "plain.bias"),
        ("hidden.weight", "hidden.bias"),
        ("out.weight",),
    ]
    assert set(recording.rest) == {
        "scale",
        "grouped.weight",
        "grouped.bias",
        "norm.weight",
        "norm.bias",
        "batch.weight",
        "batch.bias",
    }
    task.model.eval()
    found, expected = factors(task, task.initial, client()), brute_force(task, X, Y, "exact")
    assert found.rest == recording.rest
    for key in found.inputs:
        assert torch.allclose(found.inputs[key], expected[key][0], atol=1e-12)
        assert torch.allclose(found.gradients[key], expected[key][1], atol=1e-14)


PLAIN_OF_ODD = {
    "used twice": ["out.weight"],
    "tied": ["out.weight"],
    "used outside of its layer": ["out.weight"],
    "not needed": ["out.weight"],
    "positions as samples": ["each.weight", "out.weight"],
    "hooked": [],
    "weight norm, by a hook": [],
    "weight norm": [],
    "orthogonal": [],
    "no layer": ["out.weight"],
    "groups": ["2.weight"],
    "circular": ["2.weight"],
    "positions": ["0.weight", "2.weight"],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_odd_layers_are_not_plain(name):
    task = task_of(UNKNOWN[name])
    recording = record(task, task.initial, X)
    assert [call.weight for call in recording.calls] == PLAIN_OF_ODD[name]
    known = {key for call in recording.calls for key in call.names}
    assert known | set(recording.rest) == set(task.initial.params)
    assert not known & set(recording.rest)


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(162, 3)

    def forward(self, x):
        x = x.flatten(1).clone()
        logits = self.out(x)
        x.zero_()
        return logits


def test_a_layer_whose_input_is_written_over_is_not_plain():
    task = task_of(Overwriting)
    assert record(task, task.initial, X).rest == ("out.weight", "out.bias")


def test_frozen_parameters_belong_to_nobody():
    torch.manual_seed(0)
    model = KNOWN["linear"]().double()
    model[1].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    task = Task(model)
    recording = record(task, task.initial, X)
    assert [call.names for call in recording.calls] == [("3.weight",)]
    assert recording.rest == ("1.bias",)
    assert factors(task, task.initial, client()).inputs["3.weight"].shape == (5, 5)
