"""Workers behind `run`, `compare`, `sweep` and `federate`: the same numbers, the same run."""

import json
from dataclasses import dataclass

import pytest
import torch
import yaml

from fl_lightning import experiment
from fl_lightning.__main__ import main
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.parallel import executor
from fl_lightning.engines.parallel.executor import Workers, executing
from fl_lightning.engines.parallel.ray_cluster import Resources
from fl_lightning.loop import federate
from fl_lightning.methods.fedavg import FedAvg, Report
from fl_lightning.methods.fola import Fola
from fl_lightning.params import zip_map
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.open_run import RunOptions
from fl_lightning.system import activity
from tests.support.cases import final, ragged
from tests.support.clusters import alone, timeless
from tune.grid import cells
from tune.study_file import load
from tune.sweep import Options, sweep

pytestmark = pytest.mark.system


SMALL = {
    "data": "digits",
    "data.subset": 0.2,
    "data.clients": 5,
    "data.alpha": 0.5,
    "model": "mlp",
    "model.hidden": [8],
    "training.lr": 0.1,
    "federation.rounds": 3,
    "engine": "functional",
    "engine.chunk": 1,
}
NARROW = Resources(cpu=0.5)


def test_a_run_begins_with_two_workers_and_ends_with_one(out, two, tmp_path):
    """The reference posterior's distances are measured in the workers, too."""
    reference = experiment.run(configure({**SMALL, "method": "centralised"}), out)
    config = configure({**SMALL, "method": "fola", "probe.reference": str(reference.folder)})
    progress = experiment.rounds(config, out, RunOptions(workers=two))
    for _ in range(2):
        next(progress)
    progress.close()
    found = experiment.run(config, out, workers=1)
    assert [m.metrics.get("workers_idle") is not None for m in found.history] == [True, True, False]
    assert all(0 <= m["workers_idle"] <= 1 for m in found.history[:2])
    expected = experiment.run(config, tmp_path / "alone")
    assert timeless(found) == timeless(expected)
    assert "LF" in expected.final
    assert found.folder.name == expected.folder.name


def test_trials_have_workers_of_their_own(out, ray_here, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"base": SMALL, "cases": ["scaffold"], "seeds": 1}))
    study = load(str(path))
    found = sweep(study, Options(out, resources=NARROW, workers=2), lambda status: None)
    assert found.failures == {}
    for cell in found.cells:
        for config, result in cell.runs:
            assert all("workers_idle" in measurement.metrics for measurement in result.history)
            assert timeless(result) == timeless(alone(config, tmp_path / "alone"))
    assert len(found.cells) == len(cells(study)) == 1


def test_compare_takes_the_flag(out, ray_here, capsys):
    flags = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in SMALL.items()]
    workers = ["--workers", "2", "--resources.cpu", "0.5", "--runs", str(out), "--quiet"]
    assert main(["compare", "--methods", "fedavg,fola", *flags, *workers]) == 0
    assert "fola" in capsys.readouterr().out
    config = configure({**SMALL, "method": "fola"})
    assert experiment.run(config, out).reused  # the number of workers is no part of what a run is known by


@pytest.fixture
def notes(monkeypatch):
    found = []
    monkeypatch.setattr(activity, "note", found.append)
    return found


def rounds_of(workers, method=Fola(), engine=Functional(chunk=1)):  # noqa: B008
    case = ragged(sizes=(20, 7, 9, 33, 12, 5)).changed(rounds=2)
    return list(federate(method, case.problem(), case.training, case.federation, engine, workers=workers))


@dataclass(frozen=True)
class Threads(FedAvg):
    """Sends how many threads there are where a client is trained, in place of its model."""

    def report(self, local, context):
        return Report(zip_map(lambda p: torch.full_like(p, torch.get_num_threads()), local.params))


@pytest.mark.parametrize("workers", [Workers(2, resources=NARROW), "auto"], ids=["two", "auto"])
def test_wherever_clients_are_trained_there_is_one_thread(ray_here, workers):
    """On two threads torch adds in another order than on one, and who trains whom must not matter."""
    torch.set_num_threads(2)
    try:
        found = rounds_of(workers, Threads())
        assert torch.get_num_threads() == 2  # the caller's own
        assert {float(value) for p in final(rounds_of(1, Threads())).values() for value in p.flatten()} == {2.0}
    finally:
        torch.set_num_threads(1)
    assert {float(value) for p in final(found).values() for value in p.flatten()} == {1.0}


def test_workers_that_have_nothing_to_do_are_told_of_once(notes, ray_here):
    rounds_of(Workers(2, resources=NARROW), engine=Functional(chunk=6))
    told = "6 clients are trained in 1 groups, so 1 of 2 workers have nothing to do; --engine.chunk 3 would employ all"
    assert notes == [told]
    rounds_of(Workers(2, resources=NARROW), engine=Functional(chunk=3))
    assert notes == [told]


@pytest.mark.parametrize(("cpu", "clients", "number"), [(0.5, 9, 6), (1, 9, 3), (0.5, 2, 2)])
def test_auto_takes_all_cores_but_no_more_workers_than_clients(ray_here, cpu, clients, number):
    with executing(Functional(chunk=1), Workers("auto", resources=Resources(cpu)), clients) as trainer:
        assert trainer.workers == number


def test_auto_stays_in_this_process_where_there_is_one_core(monkeypatch):
    monkeypatch.setattr(executor, "is_connected", lambda: False)
    monkeypatch.setattr(executor, "local_nodes", lambda: [{"NodeManagerAddress": "here", "Resources": {"CPU": 1.0}}])
    engine = Functional(chunk=1)
    for workers, clients in (("auto", 9), (4, 0)):
        with executing(engine, workers, clients) as trainer:
            assert trainer is engine
