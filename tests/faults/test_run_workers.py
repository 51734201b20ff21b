"""One run in several workers: workers, nodes and drivers that die, and Ctrl-C."""

import json
import os
import signal

import pytest

from fl_lightning import experiment
from fl_lightning.loop import initial
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of
from fl_lightning.runs.resume import saved_rounds
from tests.support.clusters import Driver, alone, cluster, timeless
from tests.support.paced import Pace

pytestmark = pytest.mark.system


SETTINGS = {
    "method": "paced",
    "method.cavity": True,
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


@pytest.fixture(scope="module")
def pace(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield Pace(tmp_path_factory.mktemp("pace"), patch)


@pytest.fixture
def drive(out, pace):
    drivers = []

    def start(*arguments, **environment):
        drivers.append(Driver(out, *FLAGS, *arguments, command="run", **environment))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()
    pace.hurry()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run that nothing disturbs."""
    return timeless(alone(configure({**SETTINGS, "method": "fola_extended"}), tmp_path_factory.mktemp("undisturbed")))


def known(out):
    """The rounds that are saved."""
    config = configure(SETTINGS)
    problem = problem_of(config)
    start = initial(config.method, problem.task, len(problem.clients), problem.dataset)
    saved = saved_rounds(config, out, start, fresh=False)
    return list(saved.history) if saved else []


def test_workers_and_drivers_that_die_lose_nothing(out, drive, pace, undisturbed):
    config = configure(SETTINGS)
    pace.slow_after(3, out)
    interrupted = drive("--workers", "2")
    pace.reached(interrupted)
    interrupted.process.send_signal(signal.SIGINT)
    assert interrupted.wait() == 130
    assert interrupted.errors.strip() == "fl-lightning: stopped; finished rounds are saved, the same command goes on"
    assert interrupted.wait_until_gone() == {}
    assert os.listdir(interrupted.temporary) == []
    first = known(out)
    assert 3 <= len(first) < 80

    pace.slow_after(3, out)
    killed = drive("--workers", "2")
    worker = pace.reached(killed)
    pace.slow_after(3, out)
    os.kill(worker, signal.SIGKILL)
    pace.reached(killed)
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.wait()
    second = known(out)
    assert len(first) + 6 <= len(second) < 80
    assert second[: len(first)] == first

    pace.hurry()
    result = experiment.run(config, out)  # here, without workers
    assert result.history[: len(second)] == second
    assert timeless(result) == undisturbed


def test_a_lost_node_is_survived(out, drive, pace, undisturbed):
    """The driver's folder and store are its own business: the other nodes need not see them."""
    pace.slow_after(3, out)
    with cluster(0, 1, 1) as made:
        driver = drive("--workers", "2", "--address", made.address)
        pace.reached(driver)
        made.remove_node(made.list_all_nodes()[1], allow_graceful=False)
        pace.hurry()
        assert driver.wait() == 0, driver.errors
    config = configure(SETTINGS)
    assert timeless(run_folder.finished(config, out)) == undisturbed
