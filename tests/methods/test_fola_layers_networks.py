"""FOLA with precisions by layers on networks with more than plain layers, and which networks it refuses."""

import pytest
import torch
from torch import nn

from fl_lightning import discovery
from fl_lightning.data.batches import ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import Diverged, UserError
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.improper import Flat
from fl_lightning.method import Server
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola_extended import FolaExtended as Fola
from fl_lightning.methods.parts.layer_forms import REST
from fl_lightning.models.task import Task
from fl_lightning.params import flatten
from fl_lightning.training import Training
from tests.support.cases import final, largest_difference, ragged

FORMS = ["inputs", "kron", "last_layer"]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.scale * self.out(torch.relu_(self.norm(self.hidden(x))))


@pytest.mark.parametrize("engine", [Functional(chunk=1), Functional(chunk=4), Lightning()], ids=["loop", "vmap", "pl"])
@pytest.mark.parametrize("form", ["inputs", "kron"])
def test_what_is_no_plain_layer_is_diagonal_in_the_same_gaussian(form, engine):
    torch.manual_seed(0)
    case = ragged()._replace(model=Mixed().double())
    records = case.run(Fola(curvature_form=form, strength=0.1), engine)
    posterior = records[-1].after.state.posterior
    assert list(posterior.blocks) == ["hidden.weight", "out.weight", REST]
    assert isinstance(posterior.blocks[REST], Diagonal)
    assert set(posterior.blocks[REST].precision) == {"scale", "norm.weight", "norm.bias"}
    assert list(records[-1].after.state.params) == list(case.task().initial.params)
    first = records[0]
    reports = [r.posterior.parted()[-1][1] for r in first.reports]
    gamma = Diagonal.common_damping(reports, first.cohort.weights, Fola()._merging)
    expected = Diagonal.product(reports, first.cohort.weights, gamma).mean
    for name, value in expected.items():
        assert torch.allclose(first.after.state.params[name], value, atol=1e-14)


def test_batch_norm_is_no_obstacle():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 3)).double()
    case = ragged(sizes=(20, 7, 0, 33))._replace(model=model)
    for form in ("inputs", "kron"):
        posterior = case.run(Fola(curvature_form=form, strength=0.0))[-1].after.state.posterior
        assert list(posterior.blocks) == ["0.weight", "3.weight", REST]


def test_convolutions_train_and_merge():
    torch.manual_seed(0)
    case = ragged()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 2, (1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    case = case._replace(model=model)
    for form in FORMS:
        records = case.run(Fola(curvature_form=form, strength=0.0))
        assert largest_difference(final(records), final(case.run(FedAvg()))) > 1e-4
        assert bool(flatten(final(records)).isfinite().all())


def server_of(model, shape):
    """What `check` sees of a network."""
    x, y = torch.zeros(2, *shape), torch.zeros(2, dtype=torch.long)
    holdout = ClientData(0, Dataset(x, y, x, y, num_classes=10), torch.arange(2), x.dtype)
    return Server(Task(model), (2,), holdout, 0)


def test_a_bias_of_a_convolution_is_pulled_at_every_place():
    """784 places on CIFAR-10: what a perceptron stands is sure to diverge."""
    training, settings = Training(lr=0.05), {"curvature_form": "inputs"}
    torch.manual_seed(0)
    cnn = server_of(discovery.find("models", "cnn")((3, 32, 32), 10), (3, 32, 32))
    with pytest.raises(UserError, match=r"whose precision is 784 for a bias; use --method\.strength 0, or") as refusal:
        Fola(strength=0.5, **settings).check(training, cnn)
    assert "\n" not in str(refusal.value)
    Fola(strength=0.05, **settings).check(training, cnn)
    with pytest.raises(UserError, match="whose precision is 100 for a bias"):  # of the second convolution
        Fola(strength=0.5, first_layer="average", **settings).check(training, cnn)
    perceptron = server_of(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), (5,))
    Fola(strength=0.5, **settings).check(training, perceptron)
    with pytest.raises(UserError, match="whose precision is 1 for a bias"):
        Fola(strength=50.0, **settings).check(training, perceptron)


def test_the_certain_precision_is_that_of_the_measured_bias():
    torch.manual_seed(0)
    layers = nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 2, (1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    record = (
        ragged()
        ._replace(model=nn.Sequential(*layers).double())
        .run(Fola(curvature_form="inputs", strength=0.0), rounds=1)[0]
    )
    certain = Fola(curvature_form="inputs")._form.certain_precision(record.cohort.server)
    assert certain == 4 == pytest.approx(float(record.after.state.posterior.diagonal()["1.bias"].max()))


def test_the_first_layer_can_be_averaged_and_is_then_not_sent():
    case = ragged()
    method = Fola(curvature_form="kron", first_layer="average", strength=0.0)
    record = case.run(method, rounds=1)[0]
    assert isinstance(record.after.state.posterior.blocks["0.weight"], Flat)
    average = sum(w * r.local.params["0.weight"] for w, r in zip(record.cohort.weights, record.clients, strict=True))
    assert torch.allclose(record.after.state.params["0.weight"], average, atol=1e-14)
    d = case.task().num_params
    assert record.bytes_up == 4 * 4 * (d + 7 * 8 // 2 + 3 * 4 // 2)


def test_the_rest_of_last_layer_can_be_diagonal():
    case = ragged()
    record = case.run(Fola(curvature_form="last_layer", rest="diagonal", strength=0.0), rounds=1)[0]
    posterior = record.after.state.posterior
    assert set(posterior.blocks[REST].precision) == {"0.weight", "0.bias"}
    offline = case.run(Fola(curvature="offline", strength=0.0), rounds=1)[0]
    for name in ("0.weight", "0.bias"):
        expected = offline.after.state.posterior.precision[name]
        assert torch.allclose(posterior.blocks[REST].precision[name], expected, atol=1e-15)


def test_many_classes_are_drawn():
    form = Fola(curvature_form="kron")._form
    case = ragged()
    local = case.run(FedAvg(), rounds=1)[0].clients[0].local
    assert form._gradients(local) == "exact"
    many = case._replace(
        dataset=case.dataset.__class__(
            *(getattr(case.dataset, n) for n in ("train_x", "train_y", "test_x", "test_y")), 11
        )
    )
    local = many._replace(model=nn.Linear(5, 11).double()).run(FedAvg(), rounds=1)[0].clients[0].local
    assert form._gradients(local) == "sampled"


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5, dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight.T


def test_networks_without_layers_are_refused():
    case, mixed = ragged()._replace(model=Odd()), ragged()._replace(model=Mixed().double())
    with pytest.raises(UserError, match="needs a linear or convolutional layer"):
        case.run(Fola(curvature_form="kron"))
    with pytest.raises(UserError, match="whose last layer is linear and gives the logits"):
        mixed.run(Fola(curvature_form="last_layer"))


def test_a_client_whose_forward_pass_overflows_has_diverged():
    """Its weights are finite, its logits are not: the last layer is still the last."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    case = ragged(torch.float32)._replace(model=model).changed(lr=1e25, epochs=1, batch_size=100)
    with pytest.raises(Diverged, match="not finite in round 1"):
        case.run(Fola(curvature_form="last_layer", strength=0.0))
