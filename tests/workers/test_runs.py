"""Workers behind `run`, `compare`, `sweep` and `federate`: the same numbers, the same run."""

import json
from dataclasses import dataclass

import pytest
import torch
import yaml

from fl_lightning import experiment
from fl_lightning.__main__ import main
from fl_lightning.cluster.connection import Resources
from fl_lightning.config import configure
from fl_lightning.engines.functional import Functional
from fl_lightning.loop import federate
from fl_lightning.methods.fedavg import FedAvg, Report
from fl_lightning.methods.fola import Fola
from fl_lightning.params import zip_map
from fl_lightning.system import activity
from fl_lightning.workers import choice
from fl_lightning.workers.choice import Auto
from fl_lightning.workers.crew import Workers
from tests.cases import equal_bits, final, ragged
from tests.tune.clusters import alone, timeless
from tune.grid import cells
from tune.study_file import load
from tune.sweep import Options, sweep

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
    progress = experiment.rounds(config, out, workers=two)
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


def test_first_rounds_are_shared_among_workers(out, ray_here, tmp_path):
    content = {"base": {**SMALL, "federation.rounds": 1}, "cases": ["fedavg", "fola"], "seeds": 1}
    path = tmp_path / "first.yaml"
    path.write_text(yaml.safe_dump({**content, "space": {"training.epochs": [1, 2]}}))
    study = load(str(path))
    found = sweep(study, Options(out, resources=NARROW, workers=2, in_process=True), lambda status: None)
    assert found.failures == {}
    for config, result in (run for cell in found.cells for run in cell.runs):
        assert timeless(result) == timeless(alone(config, tmp_path / "alone"))


def test_compare_takes_the_flag(out, ray_here, capsys):
    flags = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in SMALL.items()]
    workers = ["--workers", "2", "--resources.cpu", "0.5", "--out", str(out), "--quiet"]
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
    arguments = (case.dataset, case.clients, case.training, case.federation, engine, 0, case.holdout)
    return list(federate(method, case.task(), *arguments, workers=workers))


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


def test_auto_keeps_tiny_fits_in_this_process(notes):
    found = rounds_of("auto")
    (note,) = notes
    assert note.startswith("workers auto: clients are trained in this process: about 1 s")
    assert [record.workers_idle for record in found] == [None, None]
    assert equal_bits(final(found), final(rounds_of(1)))


def test_auto_hires_where_it_pays(notes, ray_here, monkeypatch):
    """In the middle of a round, with chunks that stay together."""
    engine = Functional(chunk=2)
    monkeypatch.setattr(choice, "START_WORKERS", 0.0)
    monkeypatch.setattr(choice, "WORTH", -1e9)
    monkeypatch.setattr(choice, "TIMED", 1)
    found = rounds_of(Workers("auto", resources=NARROW), engine=engine)
    (note,) = notes
    assert note.startswith("workers auto: ")
    assert "workers: about" in note
    assert found[1].workers_idle is not None
    assert equal_bits(final(found), final(rounds_of(1, engine=engine)))


def test_auto_asks_what_the_rest_of_the_run_takes(monkeypatch, notes):
    """By numbers: 10 rounds of 4 clients, of which 3 are done, each a unit."""
    asked = []
    monkeypatch.setattr(choice, "is_connected", lambda: False)
    monkeypatch.setattr(choice, "pool_of", lambda wanted, number: asked.append(number))
    monkeypatch.setattr(choice, "local_nodes", lambda: [{"Resources": {"CPU": 8.0}}])
    stack = type("Stack", (), {"enter_context": lambda self, pool: pool})()
    auto = Auto(Functional(), Workers("auto"), 10, 1, stack)
    task = ragged().task()
    assert auto._pool(0.1, [1.0] * 4, 3, 1, task, 0) is None  # 3.7 s: less than Ray takes to start
    assert asked == []
    assert notes.pop().endswith("clients are trained in this process: about 4 s, workers would not save time")
    auto._pool(2.0, [1.0] * 4, 3, 1, task, 0)  # 74 s, on four workers 18 s and the start
    assert asked == [4]
    assert notes.pop() == "workers auto: 4 workers: about 31 s instead of 74 s"
    auto._pool(2.0, [30.0, 0.1, 0.1, 0.1], 3, 1, task, 0)  # one client is all the work: nobody can help
    assert asked == [4]
