"""Whole runs on the device: settings, models, evaluation, checkpoints, uncertainty, and what is refused."""

import json
import shutil

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import configure, discovery, load_model, streams
from fl_lightning.cli import doctor
from fl_lightning.data.dataset import Dataset
from fl_lightning.engines.functional import Chosen, Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import PluginError, UserError
from fl_lightning.experiment import run
from fl_lightning.loop import beginning, set_up
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.scaffold import Scaffold
from fl_lightning.models.task import Task
from fl_lightning.runs import checkpoint
from fl_lightning.runs.config.compute import Compute
from fl_lightning.system import activity, devices, memory
from fl_lightning.testing.checks import Broken
from tests.device import simulated
from tests.device.runs_on_device import DEVICE, records, same_numbers
from tests.support.cases import network, ragged

SMALL = {"data": "digits", "data.clients": 3, "federation.rounds": 2, "training.lr": 0.1, "training.batch_size": 64}
# Seconds are measured; all else is computed.
MEASURED = ("second", "idle")
FAMILIES = ("softmax", "mlp", "cnn", "transformer", "lstm")
SIZES = {"lstm": {"hidden": 5}, "transformer": {"width": 8}}


def history(settings, out, device):
    config = configure(SMALL | settings | {"compute.device": device})
    (out / device).mkdir()
    shutil.copy(out / "mlflow.db", out / device)  # to make a store takes longer than the run
    result = run(config, out / device)
    return result, [
        {key: value for key, value in dict(one.metrics).items() if not any(part in key for part in MEASURED)}
        for one in result.history
    ]


def alike(settings, out):
    (_, expected), (result, found) = (history(settings, out, device) for device in ("cpu", DEVICE))
    assert found == expected
    return result


def test_a_run_with_evaluation_and_its_model(out):
    result = alike({"method": "fola", "engine": "lightning", "evaluation.local_share": 0.5}, out)
    model = load_model(result)
    x = torch.rand(5, 1, 8, 8)
    assert torch.allclose(model.predict(x).sum(1).cpu(), torch.ones(5))


def test_a_model_loads_where_its_device_is_not(out):
    """A run on a GPU is read on a laptop."""
    result = run(configure(SMALL | {"compute.device": "cpu"}), out)
    file = result.folder / "settings.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    assert settings["compute.device"] == "cpu"
    file.write_text(json.dumps(settings | {"compute.device": "cuda:5"}), encoding="utf-8")
    assert next(load_model(result.folder).parameters()).device.type == DEVICE


def test_the_doctor_compares_it_with_the_cpu(out, capsys):
    assert doctor.main(["--runs", str(out)]) == 0
    said = capsys.readouterr().out
    assert "sim:0      simulated, 1.1 TB of memory free" in said
    assert "parameters differ by 0" in said


def test_auto_takes_it():
    assert devices.named("auto") == torch.device(DEVICE)
    assert Compute().torch_device.type == DEVICE
    assert Compute(device="sim:0").torch_device == torch.device("sim:0")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sim:3", "compute.device is 'sim:3', but torch sees only sim:0 here; use --compute.device sim:0"),
        ("cuda", "compute.device is 'cuda', but torch sees no GPU here; use --compute.device cpu"),
        ("cuda:1", "compute.device is 'cuda:1', but torch sees no GPU here; use --compute.device cpu"),
        ("xpu", "compute.device is 'xpu', but torch sees no device of type xpu here; use --compute.device cpu"),
        ("gpu", "compute.device must be auto, cpu, cuda, cuda:1 or another device that torch knows, got 'gpu'"),
        ("meta", "compute.device must be auto, cpu, cuda, cuda:1 or another device that torch knows, got 'meta'"),
    ],
)
def test_refusals(name, line):
    with pytest.raises(UserError) as refused:
        _ = Compute(device=name).torch_device
    assert str(refused.value) == line


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_is_there(precision):
    assert Compute(device=DEVICE, precision=precision).mixed is not None


def test_every_device_s_generator_is_seeded_and_restored():
    def drawn():
        with streams.global_noise(0, "noise", 1):
            return torch.rand(3, device=DEVICE)

    before = torch.sim.get_rng_state()
    first = drawn()
    assert torch.equal(before, torch.sim.get_rng_state())
    torch.rand(7, device=DEVICE)
    assert torch.equal(first.cpu(), drawn().cpu())


@pytest.mark.parametrize("engine", [Functional(chunk=1), Lightning()], ids=["loop", "lightning"])
def test_dropout_does_not_depend_on_earlier_draws(engine):
    case = ragged()._replace(model=network(dropout=0.5))
    first = records(FedAvg(), engine, DEVICE, case)
    torch.rand(7, device=DEVICE)
    second = records(FedAvg(), engine, DEVICE, case)
    for name, value in first[-1].after.state.params.items():
        assert torch.equal(value.cpu(), second[-1].after.state.params[name].cpu())


class Strays(FedAvg):
    """Adds a tensor of the CPU to the aggregate."""

    def aggregate(self, state, cohort, reports):
        after = super().aggregate(state, cohort, reports)
        return after._replace(params={name: value + torch.ones(value.shape) for name, value in after.params.items()})


def test_a_stray_tensor_is_caught():
    with pytest.raises((RuntimeError, PluginError, Broken), match="on the same device"):
        records(Strays(), Functional(chunk=1), DEVICE)


@pytest.mark.parametrize("method", [Fola(), Scaffold()], ids=["fola", "scaffold"])
@pytest.mark.parametrize(("first", "then"), [("cpu", DEVICE), (DEVICE, "cpu")])
def test_checkpoints_cross_devices(method, first, then, tmp_path):
    """Round 1 on one device, round 2 on the other: the numbers of two rounds on one."""
    case, whole = ragged().changed(rounds=2), records(method, Functional(chunk=1), "cpu")
    checkpoint.write(tmp_path, "id", records(method, Functional(chunk=1), first, rounds=1)[-1].after)
    task = Task(case.task().model.to(then))
    template = beginning(method, task, set_up(method, case.problem()._replace(task=task), *case[4:6]).server)
    saved = checkpoint.read(tmp_path, "id", template)
    last = case.go_on(method, saved, task)[-1]
    assert last.round == 2
    for name, value in last.after.state.params.items():
        assert value.device.type == then
        assert torch.equal(value.cpu(), whole[-1].after.state.params[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_models(name):
    """Every family of models."""
    reads_tokens = name in ("lstm", "transformer")
    shape = (6,) if reads_tokens else (1, 16, 16)
    stream = torch.Generator().manual_seed(0)
    x = torch.randint(5, (30, 6), generator=stream) if reads_tokens else torch.rand(30, *shape, generator=stream)
    options = {"vocabulary": 5, "per_token": False} if reads_tokens else {}
    with streams.global_noise(0, "weights"):
        model = discovery.find("models", name)(shape, 3, **options, **SIZES.get(name, {}))
    case = ragged()._replace(
        model=model,
        dataset=Dataset(x[:20], torch.arange(20) % 3, x[20:], torch.arange(10) % 3, num_classes=3),
        clients=[torch.arange(12), torch.arange(12, 20)],
        holdout=torch.arange(0),
    )
    same_numbers(FedAvg(), Functional(chunk=1), case, tolerance=1e-6 if name == "lstm" else 0.0)


@pytest.mark.parametrize("engine", [Functional(chunk=1), Lightning()], ids=["loop", "lightning"])
def test_a_network_with_batch_norm(engine):
    """Its statistics lie in buffers, which the server averages."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    expected, found = same_numbers(FedAvg(), engine, ragged(sizes=(20, 8, 33))._replace(model=model))
    for name, value in expected[-1].after.buffers.items():
        assert torch.equal(value, found[-1].after.buffers[name].cpu())


@pytest.mark.parametrize("trained", ["head", "lora"])
def test_a_part_of_a_network(trained, out):
    """The head on kept features, and adapters."""
    alike({"engine": "functional", "engine.chunk": 1, "model.train": trained}, out)


def test_a_trainer():
    """What plain networks do without: callbacks."""
    same_numbers(FedAvg(), Lightning(callbacks=(pl.Callback(),)))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_run_in_mixed_precision(precision, out):
    settings = SMALL | {"method": "fola", "engine": "lightning", "compute.precision": precision}
    result = run(configure(settings | {"compute.device": DEVICE}), out)
    assert result.history[-1].metrics["GA"] > 0.5


@pytest.mark.parametrize("form", ["diagonal", "full", "kron", "last_layer"])
def test_uncertainty(form, out):
    final_round = {
        "uncertainty.final_round": True,
        "uncertainty.form": form,
        "uncertainty.predictive": ["probit", "nn"],
    }
    loop = {"method": "fola", "engine": "functional", "engine.chunk": 1, "data.validation": 0.1, "model.hidden": [8]}
    alike(loop | final_round, out)


def test_fewer_clients_at_once_where_memory_runs_out(monkeypatch):
    """auto halves their number until they fit, once in a run, to the same numbers; a number that was asked for stays.

    A worker is given the number that auto has chosen, and may halve it, too.
    """
    said = []
    monkeypatch.setattr(activity, "note", said.append)
    case = ragged(sizes=(16,) * 8)
    expected = records(FedAvg(), Functional(chunk=2), DEVICE, case, rounds=3)
    with simulated.memory(28_000):
        found = records(FedAvg(), Functional(), DEVICE, case, rounds=3)
    with simulated.memory(28_000):
        in_worker = records(FedAvg(), Functional(Chosen(8)), DEVICE, case, rounds=1)
    out_of_memory = pytest.raises((torch.OutOfMemoryError, PluginError, Broken), match="out of memory")
    with simulated.memory(28_000), out_of_memory:
        records(FedAvg(), Functional(chunk=8), DEVICE, case, rounds=1)
    halved = [f"{n} clients at once do not fit into the device's memory; {n // 2} are tried" for n in (8, 4, 2)]
    # How many fit depends on what earlier tests still hold.
    assert said in [halved[:first] + halved[:second] for first in (1, 2, 3) for second in (1, 2, 3)]
    for here, there in ((expected[-1], found[-1]), (expected[0], in_worker[0])):
        for name, value in here.after.state.params.items():
            assert torch.allclose(value.cpu(), there.after.state.params[name].cpu(), rtol=0, atol=1e-12)


def test_as_many_clients_at_once_as_fit():
    task = ragged().task()
    task = Task(task.model.to(DEVICE), task.likelihood)
    client = 8 * task.num_params * task.dtype.itemsize
    assert Functional().chunk_for(task, [1] * 9) == 100
    for fitting, found in ((5, 5), (0, 1)):
        with simulated.memory(fitting * client + client // 2 - simulated.allocated()):
            assert Functional().chunk_for(task, [1] * 9) == found


def test_memory_that_is_free():
    with simulated.memory(1000):
        assert memory.available(torch.device(DEVICE)) == 1000


@pytest.fixture
def a_quarter():
    """As a trial with `--resources.gpu 0.25` has it."""
    devices.hold_to(0.25)
    yield
    devices.hold_to(1.0)


def test_a_trial_with_a_quarter_of_a_gpu_has_a_quarter_of_its_memory(a_quarter):
    device = torch.device(DEVICE)
    assert memory.available(device) == simulated.LIMITLESS // 4
