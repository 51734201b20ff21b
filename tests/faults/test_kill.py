"""kill -9 at random moments, then the same command again: same numbers to the bit, one MLflow run, each round once."""

import contextlib
import json
import random
import time

import pytest
from mlflow import MlflowClient

from fl_lightning import discovery
from fl_lightning.__main__ import main
from fl_lightning.loop import federate
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of
from fl_lightning.runs.tracking.store import store_uri
from fl_lightning.runs.tracking.sync import EXPERIMENT
from tests.support import workers

pytestmark = pytest.mark.system


ROUNDS = 7
SETTINGS = {
    "data": "digits",
    "data.subset": 0.3,
    "data.clients": 6,
    "data.holdout": 0.1,
    "model": "mlp",
    "model.hidden": [16],
    "training.lr": 0.1,
    "training.epochs": 2,
    "federation.fraction": 0.5,
    "engine": "functional",
    "engine.chunk": 1,
}

# Options that give a method more state to keep.
STATEFUL = {
    "fednova": {"method.server_momentum": 0.9},
    "fedpa": {"method.server_momentum": 0.9},
    "fedcurv": {"method.memory": "all"},
    "fola_extended": {"method.cavity": True},
    "data_sharing": {"method.warmup_epochs": 1},
}


def undisturbed(settings):
    config = configure(settings)
    problem = problem_of(config)
    records = federate(config.method, problem, config.training, config.federation, config.engine)
    return [measure(config.method, problem.task, problem.dataset, record).metrics for record in records]


def command(settings, out):
    flags = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    return ["run", *flags, "--runs", str(out), "--json", "--quiet"]


def rounds_in_store(out):
    client = MlflowClient(store_uri(out))
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return client, client.search_runs([experiment.experiment_id]) if experiment else []


def kill_after_rounds(process, folder, number):
    """Wait until this many checkpoints were seen to change, then a random moment more, then kill."""
    seen, last = 0, None
    deadline = time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline:
        found = []
        with contextlib.suppress(FileNotFoundError):  # between its two renames the checkpoint has no name
            found = [path.stat().st_mtime_ns for path in folder.glob("*/checkpoint.safetensors")]
        if found and found[0] != last:
            seen, last = seen + 1, found[0]
            if seen > number:
                break
        time.sleep(0.0005)
    time.sleep(random.uniform(0, 0.03))
    process.kill()  # with -9
    process.join()


# A preset has the state of what it is made of.
METHODS = [name for name, cls in discovery.discover("methods").items() if discovery.inherited(cls) is None]
ALWAYS = ("fola", "fola_extended")


def pytest_generate_tests(metafunc):
    """FOLA, the clients' rows of its cavity, and two methods that are drawn; what a state keeps is in the contract."""
    if "name" in metafunc.fixturenames:
        others = [name for name in METHODS if name not in ALWAYS]
        drawn = random.Random(metafunc.config.option.choice_seed).sample(others, 2)
        is_exhaustive = metafunc.definition.get_closest_marker("exhaustive") is not None
        metafunc.parametrize("name", METHODS if is_exhaustive else [*ALWAYS, *drawn])


def test_killed_runs_end_at_the_same_numbers(name, out, capsys):
    check_killed_runs(name, out, capsys)


@pytest.mark.exhaustive("kill -9 at random moments: every method goes on to the same numbers")
def test_killed_runs_of_every_method_end_at_the_same_numbers(name, out, capsys):
    check_killed_runs(name, out, capsys)


def check_killed_runs(name, out, capsys):
    moments = (0, 1, 3, 0, 2) if name == "fola" else (0, 2)
    rounds = ROUNDS + sum(moments[2:])
    settings = {"method": name, **SETTINGS, **STATEFUL.get(name, {}), "federation.rounds": rounds}
    random.seed(name)
    for number in moments:
        kill_after_rounds(workers.started(workers.command, *command(settings, out)), out, number)
    assert main(command(settings, out)) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = undisturbed(settings)
    assert (summary["GA"], summary["LA"]) == (expected[-1]["GA"], expected[-1]["LA"])
    client, runs = rounds_in_store(out)
    assert [run.info.run_id for run in runs] == [summary["run_id"]]
    for metric in ("GA", "NLL", "seconds"):
        history = client.get_metric_history(summary["run_id"], metric)
        assert [point.step for point in history] == list(range(1, rounds + 1)), f"{metric} is not logged once per round"
        if metric != "seconds":
            assert [point.value for point in history] == [metrics[metric] for metrics in expected]
