"""Which part of a network is trained, and what it starts from."""

import pytest
import torch
from torch import nn

from fl_lightning.errors import UserError
from fl_lightning.models.networks.torchvision import Torchvision
from fl_lightning.models.task import Task
from fl_lightning.models.tuning import (
    Tuning,
    fit,
    freeze,
    head_of,
    parameters_of,
    standing_still,
    with_new_head,
)


class Attention(nn.Module):
    """As a vision transformer has it: parameters of its own, and attention that uses its projection itself."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        y, _ = self.attention(x + self.token, x, x)
        return self.out(self.norm(y).mean(1))


def network():
    return nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
    )


X = torch.randn(2, 5)


@pytest.mark.parametrize(
    ("train", "names"),
    [
        ("head", {"5.weight", "5.bias"}),
        ("last:2", {"3.weight", "3.bias", "5.weight", "5.bias"}),
        ("bias", {"0.bias", "1.bias", "3.bias", "5.bias"}),
        ("norm", {"1.weight", "1.bias"}),
        ("[03].weight", {"0.weight", "3.weight"}),
    ],
)
def test_a_part_by_its_name(train, names):
    assert parameters_of(network(), train, X) == names


def test_the_head_of_an_attention_network_and_its_last_layers():
    model, x = Attention(), torch.randn(2, 3, 4)
    assert head_of(model, x) == "out"
    projections = {
        f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    }
    assert parameters_of(model, "last:2", x) == projections | {"out.weight", "out.bias"}
    freeze(model, parameters_of(model, "last:2", x))
    assert standing_still(model, x) == set()


def test_what_is_not_there_is_refused_with_what_there_is():
    for train, message in (
        ("heads", r"matches no parameter.*expected head, last:N.*its parameters are 0.weight, 0.bias"),
        ("last:9", r"has 3 layers, 0, 3, 5"),
    ):
        with pytest.raises(UserError, match=message):
            parameters_of(network(), train, X)
    with pytest.raises(UserError, match=r"head of Sequential was not found.*got Bilinear, LayerNorm"):
        head_of(nn.Sequential(nn.LayerNorm(5), nn.Flatten(), Twice()), X)
    with pytest.raises(UserError, match="number of layers"):
        Tuning(train="last:x")


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Bilinear(5, 5, 3)

    def forward(self, x):
        return self.both(x, x)


def test_what_is_fixed_stands_still_in_training():
    """Dropout and statistics before the first trained layer; statistics of a norm that is not trained anywhere."""
    model = network()
    freeze(model, parameters_of(model, "last:2", X))
    task = Task(model, still=standing_still(model, X))
    task.train()
    before = {name: value.clone() for name, value in model.named_buffers()}
    assert torch.equal(model(X), model(X))
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert task.weights().buffers == {}
    assert not task.has_batch_norm
    model[0].requires_grad_(True)
    task = Task(model, still=standing_still(model, X))
    task.train()
    assert [one.training for one in model] == [True, False, True, True, True, True]


def test_a_norm_that_is_trained_keeps_its_statistics_among_the_weights():
    model = network()
    freeze(model, parameters_of(model, "norm", X))
    task = Task(model, still=standing_still(model, X))
    assert set(task.weights().buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert task.has_batch_norm


def test_a_new_head_has_the_outputs_of_the_data():
    assert with_new_head(network(), "5", 7)(X).shape == (2, 7)
    assert with_new_head(nn.Linear(5, 3, bias=False), "", 7)(X).shape == (2, 7)
    images = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    new = with_new_head(images, "0", 6)
    assert new(torch.zeros(2, 1, 9, 9)).shape == (2, 6)
    assert new[0].stride == (2, 2)


def test_weights_of_another_network_are_refused_with_all_that_differs():
    given = network().state_dict() | {"9.weight": torch.zeros(1), "5.weight": torch.zeros(10, 4)}
    del given["0.bias"]
    wanted = r"missing: 0.bias; unexpected: 9.weight; of another shape: 5.weight \[10, 4\] \(here \[3, 4\]\).*new_head"
    with pytest.raises(UserError, match=wanted) as error:
        fit(network(), given, "file")
    assert "\n" not in str(error.value)


def test_weights_fit_below_and_above_a_wrapper():
    inner, wrapped = network(), nn.ModuleDict({"net": network()})
    fit(wrapped, inner.state_dict(), "file")
    assert torch.equal(wrapped["net"][3].weight, inner[3].weight)
    other = network()
    fit(other, wrapped.state_dict(), "file")
    assert torch.equal(other[3].weight, inner[3].weight)


def test_torchvision_starts_from_its_own_weights_with_another_head():
    small = {"name": "shufflenet_v2_x0_5", "norm": "batch", "stem": "large"}
    given = Torchvision((3, 32, 32), 1000, **small).network.state_dict()
    model = Torchvision((3, 32, 32), 10, **small)
    assert head_of(model, torch.zeros(1, 3, 32, 32)) == "network.fc"
    fit(model, given, "file", without="network.fc")
    assert torch.equal(model.network.conv5[0].weight, given["conv5.0.weight"])
    with pytest.raises(UserError, match=r"unexpected.*running_mean"):
        fit(Torchvision((3, 32, 32), 10, **{**small, "norm": "group"}), given, "file", without="network.fc")
