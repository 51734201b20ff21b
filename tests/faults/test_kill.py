"""kill -9 at random moments, then the same command again: same numbers to the bit, one MLflow run, each round once."""

import contextlib
import json
import random
import time

import pytest
from mlflow import MlflowClient

from fl_lightning import discovery
from fl_lightning.__main__ import main
from fl_lightning.config import configure
from fl_lightning.experiment import build
from fl_lightning.loop import federate
from fl_lightning.probes.accuracy import measure
from fl_lightning.runs.track import EXPERIMENT, store_uri
from tests.faults import workers

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
    "fola": {"method.cavity": True},
    "data_sharing": {"method.warmup_epochs": 1},
}


def undisturbed(settings):
    config = configure(settings)
    dataset, clients, holdout, task = build(config)
    records = federate(
        config.method, task, dataset, clients, config.training, config.federation, config.engine, config.seed, holdout
    )
    return [measure(config.method, task, dataset, record).metrics for record in records]


def command(settings, out):
    flags = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    return ["run", *flags, "--out", str(out), "--json", "--quiet"]


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


# A named setting has the state of what it is made of.
METHODS = [name for name, cls in discovery.discover("methods").items() if discovery.inherited(cls) is None]


@pytest.mark.parametrize("name", METHODS)
def test_killed_runs_end_at_the_same_numbers(name, out, capsys):
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
