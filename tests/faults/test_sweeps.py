"""Killed drivers, workers and nodes, Ctrl-C, full disks: the same command again, and nothing is lost or done twice."""

import os
import signal

import pytest
import yaml

from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.identity import identity
from tests.support.clusters import Driver, alone, check_complete, cluster, tracked
from tests.support.paced import Pace
from tune.grid import cells
from tune.study_file import load

pytestmark = pytest.mark.system


STUDY = {
    "base": {
        "data": "digits",
        "data.subset": 0.5,
        "data.clients": 5,
        "model": "mlp",
        "model.hidden": [16],
        "training.lr": 0.1,
        "federation.rounds": 30,
        "engine": "functional",
        "engine.chunk": 1,
    },
    "cases": [{"label": "FOLA", "method": "paced"}, {"label": "cavity", "method": "paced", "method.cavity": True}],
    "seeds": 3,
}


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "crash.yaml"
    path.write_text(yaml.safe_dump(STUDY))
    return path


@pytest.fixture(scope="module")
def pace(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield Pace(tmp_path_factory.mktemp("pace"), patch)


@pytest.fixture
def drive(out, study, pace):
    """Starts drivers, and leaves nothing of them behind."""
    drivers = []

    def start(*arguments, **environment):
        drivers.append(Driver(out, str(study), *arguments, **environment))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()
    pace.hurry()


def configs_of(study):
    return [config for cell in cells(load(str(study))) for config in cell.configs]


def known_rounds(configs, out):
    """How far each run is, with its clock: what was computed before is never computed again."""
    return {identity(c): result.history for c in configs if (result := run_folder.latest(c, out)) is not None}


def check_kept(before, configs, out):
    for config in configs:
        if identity(config) in before:
            history = run_folder.finished(config, out).history
            assert history[: len(before[identity(config)])] == before[identity(config)], "computed again"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Where the runs that nothing disturbs are computed, once for all tests."""
    return tmp_path_factory.mktemp("undisturbed")


def check_interrupted(drive, pace, number, out):
    """In the middle of its runs; what it leaves behind is in order."""
    pace.slow_after(40, out)
    interrupted = drive("--max-concurrent", "1")
    pace.reached(interrupted)
    os.kill(interrupted.process.pid, number)
    assert interrupted.wait() == 128 + number
    assert interrupted.errors.strip() == "fl-lightning: stopped; finished rounds are saved, the same command goes on"
    assert interrupted.wait_until_gone() == {}
    assert os.listdir(interrupted.temporary) == []
    (parent,) = [run for run in tracked(out)[1] if run.data.tags.get("kind") == "sweep"]
    assert parent.info.status == "KILLED"
    assert not [run for run in tracked(out)[1] if run.info.status == "RUNNING"]


def test_a_terminated_driver_leaves_all_in_order(out, drive, pace):
    check_interrupted(drive, pace, signal.SIGTERM, out)


def test_an_interrupted_and_a_killed_driver_lose_nothing(out, study, drive, pace, undisturbed):
    configs = configs_of(study)
    check_interrupted(drive, pace, signal.SIGINT, out)
    first = known_rounds(configs, out)
    assert 0 < len(first) < len(configs)

    pace.slow_after(40, out)
    killed = drive("--max-concurrent", "1")
    pace.reached(killed)
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.wait()
    second = known_rounds(configs, out)
    assert len(first) < len(second) < len(configs)

    pace.hurry()
    # At once, while the killed one's trials still live; in its temporary folder, so that it finds what that has left.
    assert any(name.startswith("fl-ray-") for name in os.listdir(killed.temporary))
    last = drive("--max-concurrent", "1", TMPDIR=killed.temporary)
    assert last.wait() == 0, last.errors
    assert killed.wait_until_gone() == {}, "processes of a killed driver live on"
    assert os.listdir(killed.temporary) == []
    assert (last.summary["runs"], last.summary["failures"]) == (len(configs), {})
    check_complete(configs, out, undisturbed)
    check_kept(first, configs, out)
    check_kept(second, configs, out)


def test_a_killed_worker_is_replaced(out, study, drive, pace, undisturbed):
    pace.slow_after(40, out)
    driver = drive("--max-concurrent", "1")
    worker = pace.reached(driver)
    pace.hurry()
    os.kill(worker, signal.SIGKILL)
    assert driver.wait() == 0, driver.errors
    assert driver.summary["failures"] == {}
    check_complete(configs_of(study), out, undisturbed)
    assert driver.wait_until_gone() == {}


def test_a_lost_node_is_survived(out, study, drive, pace, undisturbed):
    configs = configs_of(study)
    pace.slow_after(40, out)
    with cluster(0, 1, 1) as made:
        driver = drive("--address", made.address)
        pace.reached(driver)
        lost = made.list_all_nodes()[1]
        made.remove_node(lost, allow_graceful=False)
        pace.hurry()
        assert driver.wait() == 0, driver.errors
        assert (driver.summary["failures"], driver.summary["runs"]) == ({}, len(configs))
    check_complete(configs, out, undisturbed)


PLUGIN = '''
"""FedAvg in a process that can write no large files, while a file says so."""

import os
import resource
from dataclasses import dataclass

from fl_lightning.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Full(FedAvg):
    """Fills the disk after three rounds."""

    def aggregate(self, state, cohort, reports):
        if cohort.round == 4 and os.path.exists(os.environ["FULL"]):
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        return super().aggregate(state, cohort, reports)
'''


def test_a_full_disk_is_told_and_the_same_command_goes_on(out, study, drive, tmp_path, undisturbed):
    plugins, full = tmp_path / "plugins", tmp_path / "full"
    plugins.mkdir()
    (plugins / "full.py").write_text(PLUGIN)
    full.touch()
    study.write_text(yaml.safe_dump({**STUDY, "cases": ["full"], "seeds": 2}))
    variables = {"FL_LIGHTNING_PLUGINS": str(plugins), "FULL": str(full)}
    driver = drive("--max-concurrent", "1", **variables)
    assert driver.wait() == 1
    failures = driver.summary["failures"]
    assert len(failures) == 2
    assert all("cannot write" in reason for reason in failures.values())
    assert any("earlier rounds are safe" in reason for reason in failures.values())
    assert "Traceback" not in driver.errors
    full.unlink()
    again = drive("--max-concurrent", "1", **variables)
    assert again.wait() == 0, again.errors
    assert (again.summary["failures"], again.summary["runs"]) == ({}, 2)
    client, runs = tracked(out)
    children = [run for run in runs if "identity" in run.data.tags]
    assert len(children) == 2
    for run in children:
        assert [point.step for point in client.get_metric_history(run.info.run_id, "GA")] == list(range(1, 31))
    # FedAvg by another name.
    study.write_text(yaml.safe_dump({**STUDY, "cases": ["fedavg"], "seeds": 2}))
    expected = [alone(config, undisturbed).final["GA"] for config in configs_of(study)]
    assert sorted(run.data.metrics["GA"] for run in children) == sorted(expected)
