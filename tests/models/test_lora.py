"""Adapters of low rank, and what averaging them loses."""

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from fl_lightning import experiment, load_model
from fl_lightning.curvature.kronecker_factors import factors
from fl_lightning.data.batches import ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.engines.parallel.serialization import pack, unpack
from fl_lightning.errors import UserError
from fl_lightning.federation import Federation
from fl_lightning.loop import Problem, federate
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models.lora import INSIDE, adapt, merge
from fl_lightning.models.task import Task, Weights
from fl_lightning.models.tuning import Lora, freeze, standing_still
from fl_lightning.runs import start_weights
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of
from fl_lightning.training import Training
from tests.models.test_tuning import Attention


def images():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, 3))


X = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
SETTINGS = Lora(rank=2, alpha=4)


def adapted(freeze_a, model=None, x=X):
    model = images() if model is None else model
    freeze(model, adapt(model, SETTINGS, freeze_a, without=None))
    still = standing_still(model, x)
    return model.double(), still


@pytest.mark.parametrize("freeze_a", [True, False])
@pytest.mark.parametrize(("model", "x"), [(images, X), (Attention, torch.randn(2, 3, 4))])
def test_nothing_changes_at_first_and_a_merged_network_is_plain(model, x, freeze_a):
    plain = model()
    changed, _ = adapted(freeze_a, deepcopy(plain), x)
    plain, x = plain.double().eval(), x.double()
    assert torch.allclose(changed.eval()(x), plain(x))
    ends = {name.rpartition(".")[2] for name, p in changed.named_parameters() if p.requires_grad}
    assert ends == ({"b"} if freeze_a else {"a", "b"})
    with torch.no_grad():
        for parameter in changed.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    expected = changed(x)
    assert not torch.allclose(expected, plain(x))
    merge(changed)
    assert torch.allclose(changed(x), expected)
    assert changed.state_dict().keys() == plain.state_dict().keys()


def test_an_adapted_network_travels_to_workers():
    model, _ = adapted(False)
    there = pickle.loads(pickle.dumps(model))
    again = unpack(pack(there, {}, torch.device("cpu")), {}, torch.device("cpu"))
    for other in (there, again, pickle.loads(pickle.dumps(again))):
        assert list(dict(other.named_parameters())) == list(dict(model.named_parameters()))
        flags = [[p.requires_grad for p in one.parameters()] for one in (other, model)]
        assert flags[0] == flags[1]
        assert torch.equal(other(X.double()), model(X.double()))


@pytest.mark.parametrize("freeze_a", [True, False])
def test_the_average_is_that_of_the_dense_weights(freeze_a):
    """FFA-LoRA by itself, and with A trained by the residual, in each of two rounds."""
    torch.manual_seed(0)
    model, still = adapted(freeze_a)
    y = torch.tensor([0, 1, 2, 0, 1])
    dataset = Dataset(X.double(), y, X.double(), y, 3)
    task = Task(model, still=still)
    problem = Problem(task, dataset, [torch.tensor([0, 1, 2]), torch.tensor([3, 4])])
    frozen = {name: value.clone() for name, value in model.state_dict().items()}

    def dense(params, buffers):
        one = deepcopy(model)
        one.load_state_dict({**frozen, **params, **buffers})
        merge(one)
        return one.state_dict()

    for record in federate(FedAvg(), problem, Training(lr=0.5, batch_size=2), Federation(rounds=2)):
        clients = [dense(client.local.params, record.before.buffers) for client in record.clients]
        found = dense(record.after.state.params, record.after.buffers)
        for name, value in found.items():
            mean = sum(weight * one[name] for weight, one in zip(record.cohort.weights, clients, strict=True))
            assert torch.allclose(value, mean, rtol=1e-12, atol=1e-12), name
        trained = sum(value.numel() for value in task.initial.params.values())
        assert record.bytes_up == 2 * 4 * trained  # the residual goes down alone
        assert (record.bytes_down > record.bytes_up) != freeze_a
    if not freeze_a:
        assert all(float(value.abs().max()) > 0 for value in record.after.buffers.values())


def test_a_network_without_such_layers_is_refused():
    with pytest.raises(UserError, match=r"model.train lora needs linear .* got LayerNorm; use --model.train all"):
        adapt(nn.Sequential(nn.LayerNorm(3)), SETTINGS, True, without=None)
    with pytest.raises(UserError, match="beside a new head"):
        adapt(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)), SETTINGS, True, without="1")


def config(**changes):
    settings = {"engine": "functional", "data.clients": 2, "federation.rounds": 1, "data.subset": 0.1}
    settings |= {"model.train": "lora", "model.lora.rank": 2, "model.hidden": [8], "training.lr": 0.1}
    return configure({**settings, **{key.replace("__", "."): value for key, value in changes.items()}})


def test_a_is_frozen_by_default_where_there_is_a_posterior():
    for method, ends in (("fola", {"b"}), ("fedavg", {"a", "b"})):
        params = problem_of(config(method=method)).task.initial.params
        assert {name.rpartition(".")[2] for name in params} == ends
        assert all(INSIDE in f".{name}" for name in params)
    assert config(model__lora__rank=3).flat()["model.lora.rank"] == 3
    with pytest.raises(UserError, match=r"freeze_a false adds .* got ep, .*; use --model.lora.freeze_a true"):
        problem_of(config(method="ep", model__lora__freeze_a=False))
    with pytest.raises(UserError, match=r"model.lora.rank must be at least 1"):
        config(model__lora__rank=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fola"])
def test_a_run_leaves_a_plain_network(out, method):
    result = experiment.run(config(method=method), out)
    model = load_model(result)
    plain = start_weights.read(str(result.folder), {})
    whole = problem_of(config(model__train="all")).task.model.state_dict()
    assert model.state_dict().keys() == plain.keys() == whole.keys()
    assert all(torch.allclose(value, plain[name]) for name, value in model.state_dict().items())


def test_precisions_of_adapters_are_those_of_linear_layers():
    """Kronecker factors of B with A in front of it are those of a network that has both as layers."""
    model, still = adapted(True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".b"):
                parameter.normal_()
    task = Task(model, still=still)
    y = torch.tensor([0, 1, 2, 0, 1])
    data = ClientData(0, Dataset(X.double(), y, X.double(), y, 3), torch.arange(5), torch.float64)
    found = factors(task, task.initial, data, "exact", torch.Generator())
    assert not found.rest
    assert list(found.inputs) == list(task.initial.params)
    jacobian = torch.func.jacrev(lambda params: task.logits(Weights(params, {}), X.double()))(task.initial.params)
    name = "3.parametrizations.weight.0.b"
    one, layer = jacobian[name][:1, :, :, :], model[3].parametrizations.weight[0]
    inputs = nn.Sequential(*model[:3])(X.double()) @ (layer.scale * layer.a).T
    assert torch.allclose(found.inputs[name].double(), inputs.T @ inputs / 5)
    assert torch.allclose(one[0, 0, 0], inputs[0])
    kernel = "0.parametrizations.weight.0.b"
    assert found.inputs[kernel].shape == (2, 2)
    assert found.gradients[kernel].shape == (4, 4)
