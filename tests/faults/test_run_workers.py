"""One run in several workers: workers, nodes and drivers that die, and Ctrl-C."""

import json
import os
import signal
import time

import pytest

from fl_lightning import experiment
from fl_lightning.loop import initial
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of
from fl_lightning.runs.resume import saved_rounds
from tests.support.clusters import Driver, alone, cluster, timeless, wait_for_rounds

pytestmark = pytest.mark.system


SETTINGS = {
    "method": "scaffold",
    "data": "digits",
    "data.subset": 0.5,
    "data.clients": 6,
    "model": "mlp",
    "model.hidden": [16],
    "training.lr": 0.1,
    "federation.rounds": 80,
    "engine": "functional",
    "engine.chunk": 1,
}
FLAGS = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in SETTINGS.items()]


@pytest.fixture
def drive(out):
    drivers = []

    def start(*arguments, **environment):
        drivers.append(Driver(out, *FLAGS, *arguments, command="run", **environment))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run that nothing disturbs."""
    return timeless(alone(configure(SETTINGS), tmp_path_factory.mktemp("undisturbed")))


def workers_of(driver):
    return [pid for pid, command in driver.family().items() if command.startswith("ray::Worker")]


def known(out):
    """The rounds that are saved."""
    config = configure(SETTINGS)
    problem = problem_of(config)
    start = initial(config.method, problem.task, len(problem.clients), problem.dataset)
    saved = saved_rounds(config, out, start, fresh=False)
    return list(saved.history) if saved else []


def test_workers_and_drivers_that_die_lose_nothing(out, drive, undisturbed):
    config = configure(SETTINGS)
    interrupted = drive("--workers", "2")
    wait_for_rounds(out, 3)
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.wait(60) == 130
    assert interrupted.errors.strip() == "fl-lightning: stopped; finished rounds are saved, the same command goes on"
    assert interrupted.wait_until_gone(10) == {}
    assert os.listdir(interrupted.temporary) == []
    first = known(out)
    assert 3 <= len(first) < 80

    killed = drive("--workers", "2")
    wait_for_rounds(out, 3)
    deadline = time.monotonic() + 30
    while not (workers := workers_of(killed)) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(workers[0], signal.SIGKILL)
    wait_for_rounds(out, 3)
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.wait()
    second = known(out)
    assert len(first) < len(second) < 80
    assert second[: len(first)] == first

    result = experiment.run(config, out)  # here, without workers
    assert result.history[: len(second)] == second
    assert timeless(result) == undisturbed


def test_a_lost_node_is_survived(out, drive, undisturbed):
    """The driver's folder and store are its own business: the other nodes need not see them."""
    with cluster(0, 1, 1) as made:
        driver = drive("--workers", "2", "--address", made.address)
        wait_for_rounds(out, 3)
        made.remove_node(made.list_all_nodes()[1], allow_graceful=False)
        assert driver.wait() == 0, driver.errors
    config = configure(SETTINGS)
    assert timeless(run_folder.finished(config, out)) == undisturbed
