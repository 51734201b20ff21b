"""Interrupts at the worst moments: MLflow has every round once, with the seconds of one computation."""

import pytest
from mlflow import MlflowClient

from fl_lightning import experiment
from fl_lightning.runs import checkpoint, files
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.open_run import RunOptions
from fl_lightning.runs.tracking import live_copy
from fl_lightning.runs.tracking.live_copy import LiveCopy
from fl_lightning.runs.tracking.store import store_uri
from fl_lightning.runs.tracking.sync import EXPERIMENT
from tests.support.workers import SETTINGS

pytestmark = pytest.mark.system


CONFIG = configure({**SETTINGS, "federation.rounds": 3})


@pytest.fixture(autouse=True)
def _send_at_once(monkeypatch):
    monkeypatch.setattr(live_copy, "SYNC_EVERY_SECONDS", -1)


def check(out, result):
    client = MlflowClient(store_uri(out))
    (run,) = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])
    assert (run.info.run_id, run.info.status) == (result.run_id, "FINISHED")
    for name in result.final:
        points = client.get_metric_history(run.info.run_id, name)
        assert [(p.step, p.value) for p in points] == [
            (number, measurement.metrics[name]) for number, measurement in enumerate(result.history, start=1)
        ]
    assert "rounds.parquet" in {item.path for item in client.list_artifacts(run.info.run_id)}


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_ctrl_c_between_measuring_and_checkpoint(out, monkeypatch):
    original = checkpoint.write

    def interrupted(folder, key, snapshot):
        if snapshot.round == 2:
            raise KeyboardInterrupt
        original(folder, key, snapshot)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            experiment.run(CONFIG, out)
    check(out, experiment.run(CONFIG, out))


@pytest.mark.parametrize("place", [(files, "write"), (LiveCopy, "close")])
def test_an_end_between_the_last_round_and_the_result(out, monkeypatch, place):
    slim = RunOptions(pictures=False, checkpoint=False)
    with monkeypatch.context() as patch:
        patch.setattr(*place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            experiment.complete(CONFIG, out, slim)
    check(out, experiment.complete(CONFIG, out, slim))


def test_a_run_stopped_after_its_last_round_goes_on_with_its_numbers(out):
    slim = RunOptions(pictures=False, checkpoint=False)
    progress = experiment.rounds(CONFIG, out, slim)
    known = [next(progress)[1] for _ in range(3)]
    progress.close()
    result = experiment.complete(CONFIG, out, slim)
    assert result.history == known
    check(out, result)
