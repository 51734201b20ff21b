import pytest
import torch

from fl_lightning import discovery
from fl_lightning.config import Compute, Model, configure
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError


def images(shape, classes=10):
    x = torch.zeros(4, *shape)
    return Dataset(x, torch.zeros(4, dtype=torch.long), x, torch.zeros(4, dtype=torch.long), classes)


@pytest.mark.parametrize(
    ("name", "shape", "number"),
    [("mlp", (1, 28, 28), 545_810), ("softmax", (1, 28, 28), 7_850), ("cnn", (3, 32, 32), 878_538)],
)
def test_parameter_counts(name, shape, number):
    assert Model(name).build(images(shape), seed=0, compute=Compute()).num_params == number


@pytest.mark.parametrize("name", discovery.discover("models"))
@pytest.mark.parametrize(("shape", "classes"), [((1, 28, 28), 10), ((3, 32, 32), 100)])
def test_sizes_follow_the_data(name, shape, classes):
    task = Model(name).build(images(shape, classes), seed=0, compute=Compute())
    assert task.model(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize("name", discovery.discover("models"))
def test_initial_weights_depend_on_the_seed_alone(name):
    data = images((1, 28, 28))
    first = Model(name).build(data, seed=0, compute=Compute()).initial.params
    torch.rand(3)
    again = Model(name).build(data, seed=0, compute=Compute()).initial.params
    other = Model(name).build(data, seed=1, compute=Compute()).initial.params
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)
    double = Model(name).build(data, seed=0, compute=Compute(precision="float64")).initial.params
    assert all(torch.equal(first[k].double(), double[k]) for k in first)


def test_cnn_initialisation_is_xavier_with_zero_bias():
    params = Model("cnn").build(images((3, 32, 32)), seed=0, compute=Compute()).initial.params
    assert all(bool((value == 0).all()) for name, value in params.items() if name.endswith("bias"))
    linear = params["layers.1.weight"]
    bound = (6 / sum(linear.shape)) ** 0.5
    assert 0.99 * bound < float(linear.abs().max()) <= bound


def test_cnn_refuses_small_images():
    with pytest.raises(UserError, match="use --model mlp"):
        Model("cnn").build(images((1, 8, 8)), seed=0, compute=Compute())


def test_the_code_s_smaller_network_is_a_setting():
    config = configure({"model.hidden": [300, 100], "model.dropout": 0.5})
    assert config.model.build(images((1, 28, 28)), 0, Compute()).num_params == 266_610


def test_the_cnn_pools_before_its_relu_without_a_difference():
    """To the bit, in values and in gradients; plain is the network as the paper draws it."""
    from fl_lightning.models.cnn import Cnn

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
