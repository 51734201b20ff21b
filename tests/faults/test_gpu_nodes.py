"""Nodes with GPUs, that join late and leave: Ray's GPUs are only numbers here, each is the simulated device."""

import json
from pathlib import Path

import pytest
import yaml

from fl_lightning import experiment
from fl_lightning.engines.parallel.executor import Workers
from fl_lightning.engines.parallel.ray_cluster import Resources
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import configure
from tests.device import simulated
from tests.support.clusters import alone, cluster, timeless
from tune.study_file import load
from tune.sweep import Options, sweep

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(simulated.missing()), reason=simulated.missing()),
]

ROOT = Path(__file__).parents[2]
PLUGIN = '''
"""FedAvg that notes where clients are trained, and waits there while a test says so."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch

from fl_lightning.methods.fedavg import FedAvg

FOLDER = Path(os.environ["NOTES"])


@dataclass(frozen=True)
class Noting(FedAvg):
    """Numbers of FedAvg."""

    def report(self, local, context):
        node = ray.get_runtime_context().get_node_id()
        gpu, share = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.sim.get_per_process_memory_fraction()
        note = {"node": node, "gpu": gpu, "share": share, "device": local.task.device.type}
        part = FOLDER / f"{os.getpid()}.part"
        part.write_text(json.dumps(note))
        part.rename(part.with_suffix(".json"))
        hold, together = FOLDER / f"hold-{node}", FOLDER / "together"
        while hold.exists() or len(list(FOLDER.glob("*.json"))) < int(together.read_text()):
            time.sleep(0.02)
        return super().report(local, context)
'''
SMALL = {
    "method": "noting",
    "data": "digits",
    "data.subset": 0.2,
    "data.clients": 6,
    "model": "mlp",
    "model.hidden": [8],
    "training.lr": 0.1,
    "federation.rounds": 5,
    "engine": "functional",
    "engine.chunk": 1,
}
FREE = 4_000_000  # bytes of each process on its device


def fedavg(seed):
    """The run that notes nothing, for this process."""
    return configure({**SMALL, "method": "fedavg", "seed": seed})


def small_device():
    """What every worker of Ray does first."""
    simulated.register()
    simulated.limit(FREE)


class Notes:
    """What the workers have noted so far, one note for each process; and what they wait for."""

    def __init__(self, folder):
        self.folder = folder
        self.wait_for(0)

    def wait_for(self, number):
        """Let clients wait until so many processes have made their notes."""
        part = self.folder / "together.part"
        part.write_text(str(number))
        part.rename(self.folder / "together")

    def hold(self, node):
        """Let the clients of a node wait until it is lost."""
        (self.folder / f"hold-{node.node_id}").touch()

    def read(self):
        return {path.stem: json.loads(path.read_text()) for path in self.folder.glob("*.json")}

    def of(self, node):
        return [note for note in self.read().values() if note["node"] == node.node_id]


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    return Notes(tmp_path_factory.mktemp("notes"))


@pytest.fixture(scope="module")
def nodes(notes, tmp_path_factory):
    """A cluster of a head without CPUs and a node with one GPU, whose workers have the simulated device."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "noting.py").write_text(PLUGIN)
    variables = {"FL_LIGHTNING_PLUGINS": str(folder), "NOTES": str(notes.folder)}
    with pytest.MonkeyPatch.context() as patch, cluster(0, {"num_cpus": 2, "num_gpus": 1}) as made:
        for name, value in variables.items():
            patch.setenv(name, value)
        import ray

        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        there = {"env_vars": {**variables, "PYTHONPATH": str(ROOT)}, "worker_process_setup_hook": small_device}
        ray.init(made.address, runtime_env=there, **quiet)
        yield made


def test_a_sweep_on_parts_of_gpus_of_nodes_that_come_and_go(out, tmp_path, nodes, notes):
    """Two trials share the GPU of one node; another node joins late, is used, and leaves with its trial."""
    path = tmp_path / "parts.yaml"
    cases = [{"label": "small", "method": "noting"}, {"label": "large", "method": "noting", "model.hidden": [20_000]}]
    path.write_text(yaml.safe_dump({"base": SMALL, "cases": cases, "seeds": 3}))
    study, first, joined = load(str(path)), nodes.list_all_nodes()[1], []
    notes.wait_for(3)

    def watch(status):
        if not joined and len(notes.of(first)) == 2:
            joined.append(nodes.add_node(num_cpus=1, num_gpus=2, object_store_memory=100_000_000))
            notes.hold(joined[0])
        elif len(joined) == 1 and notes.of(joined[0]):
            nodes.remove_node(joined[0], allow_graceful=False)
            joined.append("and left")

    with pytest.raises(UserError, match=r"no node of the cluster can offer 1 CPU and 2 GPU to one process \("):
        sweep(study, Options(out, nodes.address, Resources(1, 2)), watch)
    outcome = sweep(study, Options(out, nodes.address, Resources(1, 0.5)), watch)
    small, large = outcome.cells
    assert len(large.runs) == 0
    assert len(outcome.failures) == 3
    for name, reason in outcome.failures.items():
        assert name.startswith("large seed ")
        assert reason.startswith("the device has not as much memory as this process needs; give it a larger part")
    assert len(small.runs) == 3
    for config, result in small.runs:
        assert timeless(result) == timeless(alone(fedavg(config.seed), tmp_path / "alone"))
    assert {(note["device"], note["share"]) for note in notes.read().values()} == {("sim", 0.5)}
    assert {note["gpu"] for note in notes.of(first)} == {"0"}
    assert [note["gpu"] in ("0", "1") for note in notes.of(joined[0])] == [True]


def test_trials_with_whole_gpus_of_one_node_see_different_ones(out, tmp_path, nodes, notes):
    path, before = tmp_path / "whole.yaml", set(notes.read())
    path.write_text(yaml.safe_dump({"base": SMALL, "cases": ["noting"], "seeds": 3}))
    node = nodes.add_node(num_cpus=2, num_gpus=2, object_store_memory=100_000_000)
    notes.wait_for(len(before) + 3)
    outcome = sweep(load(str(path)), Options(out, nodes.address, Resources(1, 1)), lambda status: None)
    assert outcome.failures == {}
    assert sorted(note["gpu"] for note in notes.of(node)) == ["0", "1"]
    assert {note["share"] for process, note in notes.read().items() if process not in before} == {1.0}
    nodes.remove_node(node, allow_graceful=False)


def test_the_workers_of_a_run_on_the_gpus_of_two_nodes(out, tmp_path, nodes, notes):
    """One of the nodes leaves in round 2, another joins in round 3, and no number changes."""
    first, gone = nodes.list_all_nodes()[1], nodes.add_node(num_cpus=1, num_gpus=1, object_store_memory=100_000_000)
    before, joined = set(notes.read()), []
    notes.wait_for(len(before) + 2)

    def watch(number, measurement):
        if number == 2:
            nodes.remove_node(gone, allow_graceful=False)
        elif number == 3:
            joined.append(nodes.add_node(num_cpus=1, num_gpus=1, object_store_memory=100_000_000))
            notes.wait_for(len(before) + 3)

    config = configure(SMALL)
    result = experiment.run(config, out, watch=watch, workers=Workers(2, resources=Resources(0.5, 1)))
    assert timeless(result) == timeless(alone(fedavg(config.seed), tmp_path))
    new = [note for process, note in notes.read().items() if process not in before]
    assert {note["node"] for note in new} == {node.node_id for node in (first, gone, *joined)}
    assert {(note["device"], note["share"], note["gpu"]) for note in new} == {("sim", 1.0, "0")}
