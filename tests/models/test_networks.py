from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import discovery
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError
from fl_lightning.loop import Problem, federate
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models.likelihoods import Regression, Tokens
from fl_lightning.models.networks.torchvision import Torchvision
from fl_lightning.models.task import Task
from fl_lightning.models.tuning import Tuning
from fl_lightning.runs.config.compute import Compute, Model
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import build_task
from fl_lightning.testing import check_model

IMAGES = ("cnn", "mlp", "softmax", "torchvision")
TEXT = ("lstm", "transformer")


def images(shape, classes=10):
    x = torch.zeros(4, *shape)
    return Dataset(x, torch.zeros(4, dtype=torch.long), x, torch.zeros(4, dtype=torch.long), classes)


def sequences(per_token=False, vocabulary=None):
    x, y = torch.arange(24).view(4, 6) % 7, torch.tensor([0, 1, 2, 3])
    if per_token:
        return Dataset(x, x, x, x, 7, likelihood=Tokens(), vocabulary=vocabulary)
    return Dataset(x, y, x, y, 4, vocabulary=vocabulary)


@pytest.mark.parametrize(
    ("name", "shape", "number"),
    [
        ("mlp", (1, 28, 28), 545_810),
        ("softmax", (1, 28, 28), 7_850),
        ("cnn", (3, 32, 32), 878_538),
        ("torchvision", (3, 32, 32), 11_173_962),
    ],
)
def test_parameter_counts(name, shape, number):
    assert build_task(Model(name), images(shape), seed=0, compute=Compute()).num_params == number


def test_every_model_is_tested_here():
    assert {*IMAGES, *TEXT} == set(discovery.names("models"))


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize(("shape", "classes"), [((1, 28, 28), 10), ((3, 32, 32), 100)])
def test_sizes_follow_the_data(name, shape, classes):
    task = build_task(Model(name), images(shape, classes), seed=0, compute=Compute())
    assert task.model(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize("name", [*IMAGES, *TEXT])
def test_initial_weights_depend_on_the_seed_alone(name):
    data = images((1, 28, 28)) if name in IMAGES else sequences()
    first = build_task(Model(name), data, seed=0, compute=Compute()).initial.params
    torch.rand(3)
    again = build_task(Model(name), data, seed=0, compute=Compute()).initial.params
    other = build_task(Model(name), data, seed=1, compute=Compute()).initial.params
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)
    double = build_task(Model(name), data, seed=0, compute=Compute(precision="float64")).initial.params
    assert all(torch.equal(first[k].double(), double[k]) for k in first)


def test_cnn_initialisation_is_xavier_with_zero_bias():
    params = build_task(Model("cnn"), images((3, 32, 32)), seed=0, compute=Compute()).initial.params
    assert all(bool((value == 0).all()) for name, value in params.items() if name.endswith("bias"))
    linear = params["layers.1.weight"]
    bound = (6 / sum(linear.shape)) ** 0.5
    assert 0.99 * bound < float(linear.abs().max()) <= bound


def test_cnn_refuses_small_images():
    with pytest.raises(UserError, match="use --model mlp"):
        build_task(Model("cnn"), images((1, 8, 8)), seed=0, compute=Compute())


def test_the_code_s_smaller_network_is_a_setting():
    config = configure({"model.hidden": [300, 100], "model.dropout": 0.5})
    assert build_task(config.model, images((1, 28, 28)), 0, Compute()).num_params == 266_610


def test_the_cnn_pools_before_its_relu_without_a_difference():
    """To the bit, in values and in gradients; plain is the network as the paper draws it."""
    from fl_lightning.models.networks.cnn import Cnn

    torch.manual_seed(0)
    model = Cnn((3, 16, 16), 10)
    features = model.layers[0]
    plain = torch.nn.Sequential(
        *(features[place] for place in (0, 2, 1, 3, 5, 4, 6)), *(model.layers[place] for place in (1, 2, 3))
    )
    x, y = torch.randn(5, 3, 16, 16), torch.randint(10, (5,))
    gradients = []
    for outputs in (model(x), plain(x.contiguous(memory_format=torch.channels_last))):
        loss = torch.nn.functional.cross_entropy(outputs, y)
        gradients.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


SMALL = {"name": "shufflenet_v2_x0_5"}  # trained in no time


@pytest.mark.slow
def test_torchvision_keeps_the_promises_of_models():
    check_model(partial(Torchvision, **SMALL), [((2, 16, 16), 3)])


TINY = {"lstm": {"hidden": 5}, "transformer": {"width": 8}}


@pytest.mark.parametrize("name", TEXT)
def test_text_models_keep_the_promises_of_models(name):
    check_model(partial(discovery.find("models", name), **TINY[name]))


def test_torchvision_has_group_norm_and_a_small_stem_for_small_images():
    small, large = Torchvision((3, 32, 32), 10), Torchvision((3, 64, 64), 10)
    kinds = {type(module) for module in small.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
    assert small.network.conv1.kernel_size == (3, 3)
    assert small.network.conv1.stride == (1, 1)
    assert isinstance(small.network.maxpool, nn.Identity)
    assert large.network.conv1.kernel_size == (7, 7)
    assert any(isinstance(one, nn.BatchNorm2d) for one in Torchvision((3, 32, 32), 10, norm="batch").modules())
    assert Torchvision((1, 32, 32), 10, stem="large").network.conv1.in_channels == 1


@pytest.mark.slow
def test_small_images_are_scaled_to_the_size_that_published_weights_of_transformers_expect():
    """Weights of the published shapes, at random: ViT-B cuts 224 pixels into 196 patches."""
    from torchvision import models

    stream = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in models.vit_b_16(weights=None).state_dict().items()}
    given = {name: 0.02 * torch.randn(shape, generator=stream) for name, shape in shapes.items()}
    tuning = Tuning(weights="DEFAULT", new_head=True, train="head")
    options = {"name": "vit_b_16", "norm": "batch", "stem": "large", "resize": 224}
    task = build_task(Model("torchvision", options, tuning), images((3, 32, 32)), 0, Compute(), given)
    assert list(task.initial.params) == ["network.heads.head.weight", "network.heads.head.bias"]
    x = torch.randn(1, 3, 32, 32, generator=stream)
    with task.evaluating():
        scaled = nn.functional.interpolate(x, (224, 224), mode="bilinear")
        assert torch.equal(task.model(x), task.model.network(scaled))
    with pytest.raises(UserError, match=r"model.resize must be at least 1, or null, got 0"):
        Torchvision((3, 32, 32), 10, resize=0)


@pytest.mark.parametrize("name", TEXT)
def test_text_models_speak_per_token_or_per_sequence(name):
    x = sequences().train_x
    assert build_task(Model(name), sequences(), 0, Compute()).model(x).shape == (4, 4)
    assert build_task(Model(name), sequences(per_token=True), 0, Compute()).model(x).shape == (4, 6, 7)
    assert build_task(Model(name), sequences(vocabulary=50), 0, Compute()).model.embedding.num_embeddings == 50


def test_what_comes_later_does_not_change_what_is_said_before():
    for name in TEXT:
        model = build_task(Model(name), sequences(per_token=True), 0, Compute()).model.eval()
        x = sequences().train_x
        other = x.clone()
        other[:, 4:] = 0
        assert torch.allclose(model(x)[:, :4], model(other)[:, :4], atol=1e-6)
        assert not torch.allclose(model(x)[:, 4:], model(other)[:, 4:], atol=1e-6)


class OneSize(nn.Module):
    def __init__(self, num_classes, width=3):
        super().__init__()


class NeedsMore(nn.Module):
    def __init__(self, shape, num_classes, width):
        super().__init__()


class Breaks(nn.Module):
    def __init__(self, shape, num_classes):
        raise TypeError("unsupported\noperand")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (OneSize, r"must take \(shape, num_classes\), .* got \(num_classes\)"),
        (NeedsMore, r"got \(shape, num_classes, width\); give the others defaults"),
        (Breaks, "cannot be made for inputs of numbers of shape .*TypeError: unsupported operand"),
    ],
)
def test_constructors_that_do_not_fit_are_refused(cls, message, monkeypatch):
    monkeypatch.setattr(discovery, "find", lambda kind, name: cls)
    with pytest.raises(UserError, match=message) as caught:
        build_task(Model("mine"), images((1, 8, 8)), 0, Compute())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("lstm", images((5,)), "the model lstm reads tokens .whole numbers., got inputs of numbers of shape .5,."),
        ("cnn", images((5,)), "needs images of at least 16x16"),
        ("torchvision", images((5,)), "needs images .channels, height, width."),
    ],
)
def test_models_for_other_data_are_refused(name, data, message):
    with pytest.raises(UserError, match=message):
        build_task(Model(name), data, 0, Compute())


def test_an_unknown_name_of_torchvision_is_told_the_nearest():
    words = "unknown model.name 'resnet81': did you mean 'resnet18'. any classifier in torchvision.models"
    with pytest.raises(UserError, match=words):
        Torchvision((3, 8, 8), 10, name="resnet81")


class Asserting(nn.Linear):
    """Asserts what it needs, as torchvision's ViT does."""

    def forward(self, x):
        raise AssertionError("indivisible by the patch size")


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), images((1, 2, 2)), r"outputs of shape \(10,\) .* got \(3,\)"),
        (nn.Linear(6, 4), sequences(), "cannot take inputs of tokens of shape .6,. .* such as --model lstm"),
        (Asserting(5, 10), images((5,)), "AssertionError: indivisible by the patch size"),
        (nn.Conv2d(3, 10, 3), images((5,)), "cannot take inputs of numbers of shape .5,. .* --model mlp"),
    ],
)
def test_models_that_do_not_fit_are_refused_before_training(model, data, message):
    with pytest.raises(UserError, match=message) as caught:
        federate(FedAvg(), Problem(Task(model), data, [torch.arange(4)]))
    assert "\n" not in str(caught.value)


def test_a_task_must_be_that_of_the_data():
    x, y = torch.zeros(4, 2), torch.zeros(4)
    data = Dataset(x, y, x, y, 1, likelihood=Regression())
    with pytest.raises(UserError, match=r"the data need regression; use .*likelihood=dataset\.likelihood"):
        federate(FedAvg(), Problem(Task(nn.Linear(2, 1)), data, [torch.arange(4)]))
