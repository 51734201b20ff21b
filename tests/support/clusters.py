"""Ray clusters and sweeps for tests: real ones, on this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from mlflow import MlflowClient

from fl_lightning import experiment
from fl_lightning.engines.parallel.ray_cluster import SETTINGS
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs import rounds_file
from fl_lightning.runs.identity import identity
from fl_lightning.runs.open_run import RunOptions
from fl_lightning.runs.tracking.store import store_uri
from fl_lightning.runs.tracking.sync import EXPERIMENT

ENVIRONMENT = {**SETTINGS, "OMP_NUM_THREADS": "1"}

# What a round has cost, and who has computed it.
NOT_COMPARED = ("seconds", "workers")


@contextmanager
def cluster(*nodes: int | dict[str, int]):
    """A cluster of several nodes on this machine; each has so many CPUs, or what is said. The first is the head."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, for the sockets in it
    variables = {**ENVIRONMENT, "RAY_TMPDIR": folder}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    import ray
    from ray.cluster_utils import Cluster

    Path(folder, "ray").mkdir()
    quiet = {"include_dashboard": False, "object_store_memory": 100_000_000}
    head, *others = ({"num_cpus": node} if isinstance(node, int) else node for node in nodes)
    made = Cluster(initialize_head=True, head_node_args={**head, **quiet})
    try:
        for node in others:
            made.add_node(**node, object_store_memory=100_000_000)
        made.wait_for_nodes()
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def timeless(result):
    """Everything that was measured, but for the clock."""
    rounds = [
        ({k: v for k, v in m.metrics.items() if not k.startswith(NOT_COMPARED)}, m.clients) for m in result.history
    ]
    return result.status, result.message, rounds


def alone(config, out):
    """The run by itself, in this process."""
    return experiment.complete(config, out, RunOptions(pictures=False))


def tracked(out):
    """The client of the store and all runs in it."""
    client = MlflowClient(store_uri(out))
    found = client.get_experiment_by_name(EXPERIMENT)
    return client, list(client.search_runs([found.experiment_id], max_results=1000)) if found else []


def check_complete(configs, out, reference):
    """All runs are there once, in their folders and in MLflow, with the numbers of runs that nothing disturbed."""
    client, runs = tracked(out)
    children = [run for run in runs if run.data.tags.get("kind") != "sweep"]
    by_identity = {run.data.tags["identity"]: run for run in children}
    assert len(by_identity) == len(children), "a run is in MLflow twice"
    assert set(by_identity) == {identity(config) for config in configs}
    parents = [run for run in runs if run.data.tags.get("kind") == "sweep"]
    assert len(parents) == 1
    for config in configs:
        expected = alone(config, reference)
        result = run_folder.finished(config, out)
        assert timeless(result) == timeless(expected)
        run = by_identity[identity(config)]
        assert (run.info.run_id, run.info.status) == (result.run_id, "FINISHED")
        assert run.data.tags["mlflow.parentRunId"] == parents[0].info.run_id
        assert run.data.params == {k: v if isinstance(v, str) else json.dumps(v) for k, v in config.flat().items()}
        for metric in ("GA", "LA"):
            points = client.get_metric_history(result.run_id, metric)
            assert [(p.step, p.value) for p in points] == [
                (number, m.metrics[metric]) for number, m in enumerate(expected.history, start=1)
            ]
    return by_identity, parents[0]


class Driver:
    """The program in a process of its own, whose temporary files and children can be told from others'."""

    def __init__(self, out: Path, *arguments: str, command: str = "sweep", **environment: str) -> None:
        self.temporary = tempfile.mkdtemp(prefix="t", dir="/tmp")
        self.log = out.parent / f"driver-{time.time_ns()}.log"
        program = [sys.executable, "-m", "fl_lightning", command, *arguments, "--runs", str(out), "--quiet", "--json"]
        variables = {**os.environ, **ENVIRONMENT, "TMPDIR": self.temporary, **environment}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                program, env=variables, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )

    def wait(self, seconds: float = 300) -> int:
        self.output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode

    @property
    def errors(self) -> str:
        """What it has said of failures, to a reader and to a program."""
        return self.log.read_text() + getattr(self, "output", "")

    @property
    def summary(self):
        return json.loads(self.output.splitlines()[-1])

    def family(self) -> dict[int, str]:
        """The living processes that come from this driver, by their temporary folder."""
        found = {}
        mark = f"TMPDIR={self.temporary}".encode()
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:  # it has ended
                continue
        return {pid: command for pid, command in found.items() if command}

    def wait_until_gone(self, seconds: float = 300) -> dict[int, str]:
        deadline = time.monotonic() + seconds
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def end(self) -> None:
        """Leave nothing behind, whatever has happened."""
        for pid in [self.process.pid, *self.family()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)


def rounds_in(out: Path) -> int:
    """How many rounds are saved in a folder of runs."""
    return sum(path.read_bytes().count(b"\n") for path in out.glob(f"*/{rounds_file.NAME}"))


def wait_for_rounds(out: Path, number: int, process: subprocess.Popen, seconds: float = 300) -> None:
    """Until so many rounds are saved: the process is in the middle of its runs."""
    deadline = time.monotonic() + seconds
    while (found := rounds_in(out)) < number:
        assert process.poll() is None, f"it has ended after {found} rounds"
        assert time.monotonic() < deadline, f"it does not get on: {found} rounds"
        time.sleep(0.005)
