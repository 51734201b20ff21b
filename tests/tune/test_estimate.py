"""Forecasts of time and disk: in proportion to the work, from one measured round of each kind."""

import pytest

from fl_lightning import experiment
from fl_lightning.discovery import PLUGINS
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.open_run import RunOptions
from fl_lightning.runs.problem import problem_of
from fl_lightning.runs.resume import known_rounds
from tune import estimate
from tune.estimate import Cost, Estimate, forecast

BASE = {
    "data": "digits",
    "data.clients": 5,
    "model": "mlp",
    "model.hidden": [16],
    "engine": "functional",
    "engine.chunk": 1,
}


def run(**changes):
    return configure({**BASE, **{key.replace("__", "."): value for key, value in changes.items()}})


@pytest.fixture
def known(monkeypatch):
    """One second per sample and epoch, nothing else; and what was measured."""
    measured = []

    def measure(config):
        measured.append(config)
        return Cost(train=1.0, evaluate=0.25, samples=100, server=0.0, fixed=7.0, state=1000, tables=10)

    monkeypatch.setattr(estimate, "_measure", measure)
    return measured


def test_time_follows_samples_epochs_rounds_and_evaluations(known):
    seconds = Estimate().seconds
    assert seconds(run(training__epochs=2, federation__rounds=3)) == 7 + 3 * (200 + 6 * 0.25)
    half = run(training__epochs=2, federation__rounds=3, federation__fraction=0.5)
    assert seconds(half) == 7 + 3 * (100 + 3.5 * 0.25)


def test_what_is_not_measured_takes_no_time(known):
    seconds, trained = Estimate().seconds, 7 + 3 * 100
    three = {"training__epochs": 1, "federation__rounds": 3}
    assert seconds(run(**three, evaluation__local_share=0.2)) == pytest.approx(trained + 3 * (1 + 5 * 0.2) * 0.25)
    assert seconds(run(**three, evaluation__local=False)) == trained + 3 * 0.25
    assert seconds(run(**three, evaluation__every=2)) == trained + 2 * 6 * 0.25  # rounds 2 and 3


@pytest.mark.slow
def test_rounds_that_are_there_take_no_time(known, out):
    short = {"training__epochs": 1, "data__alpha": 1, "method": "fedavg"}
    experiment.complete(run(**short, federation__rounds=3), out, RunOptions(pictures=False))
    each = 100 + 6 * 0.25

    def expected(rounds, **changes):
        return forecast([run(**short, federation__rounds=rounds, **changes)], 1, False, out).seconds

    assert expected(5) == 7 + 2 * each  # goes on from its checkpoint
    assert expected(2) == 7  # read off it
    assert expected(5, seed=1) == 7 + 5 * each
    assert forecast([run(**short, federation__rounds=5)], 1, False).seconds == 7 + 5 * each


@pytest.mark.slow
def test_rounds_of_a_run_that_was_interrupted_take_no_time(known, out):
    config = run(federation__rounds=4, data__alpha=1)
    progress = experiment.rounds(config, out, RunOptions(pictures=False))
    for _ in range(2):
        next(progress)
    progress.close()
    assert known_rounds(config, out) == 2


def test_disk_follows_rounds_and_kept_checkpoints(known):
    size = Estimate().bytes
    assert size(run(federation__rounds=5), True) == 3 * 10 * 1.5 + 2000
    assert size(run(federation__rounds=5), False) == 3 * 10 * 1.5
    assert size(run(federation__rounds=1), True) == 3 * 10 * 1.1 + 1000


def test_one_measurement_serves_all_runs_of_a_kind(known):
    one = Estimate()
    for changes in ({"seed": 1}, {"training__lr": 1}, {"training__epochs": 9}, {"federation__rounds": 9}):
        one.seconds(run(**changes))
    assert len(known) == 1
    for changes in ({"method": "fedavg"}, {"training__batch_size": 8}, {"model__hidden": [8]}):
        one.seconds(run(**changes))
    assert len(known) == 4


@pytest.mark.slow
def test_what_is_measured_has_the_size_of_a_run(out):
    config = run(method="fola", training__epochs=3, federation__rounds=4, data__alpha=1)
    result = experiment.complete(config, out, RunOptions(pictures=False))
    cost = Estimate().cost(config)
    assert min(cost.train, cost.evaluate, cost.server, cost.fixed) > 0
    assert cost.samples == sum(len(part) for part in problem_of(config).clients)
    saved = (result.folder / "checkpoint.safetensors").stat().st_size
    assert 0.5 * saved < cost.state < 1.5 * saved
    assert cost.tables > 0


CRASH = """
import os
import signal
from dataclasses import dataclass

from fl_lightning.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Crash(FedAvg):
    def report(self, local, context):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.slow
def test_a_plugin_that_ends_its_process_is_named(tmp_path, monkeypatch):
    (tmp_path / "crash.py").write_text(CRASH)
    monkeypatch.setenv(PLUGINS, str(tmp_path))
    with pytest.raises(UserError, match="one round of crash to measure its time, got an end of its process; a sweep"):
        forecast([run(method="crash")], 1, False)
