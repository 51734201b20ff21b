"""Tracking on a real MLflow server, as several machines would share it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient

from fl_lightning import experiment
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.tracking.live_copy import LiveCopy
from fl_lightning.runs.tracking.store import store_uri
from fl_lightning.runs.tracking.sync import EXPERIMENT, Account, Copy, Place, sync
from tests.support.servers import free_port, serving, wait_for

pytestmark = pytest.mark.system


SETTINGS = {"data": "digits", "data.subset": 0.2, "data.clients": 3, "model": "softmax", "federation.rounds": 2}


def test_a_tracking_server_gets_everything(out, tmp_path, monkeypatch):
    address = f"http://127.0.0.1:{(port := free_port())}"
    store, artifacts = f"sqlite:///{out / 'mlflow.db'}", tmp_path / "served"
    flags = ["--backend-store-uri", store, "--artifacts-destination", str(artifacts), "--port", str(port)]
    with serving("mlflow", "server", *flags, "--workers", "1"):
        wait_for(f"{address}/health")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        result = experiment.run(configure({**SETTINGS, "engine": "functional"}), tmp_path / "local")
        client = MlflowClient(address)
        assert [point.step for point in client.get_metric_history(result.run_id, "GA")] == [1, 2]
        assert {item.path for item in client.list_artifacts(result.run_id)} >= {"config.yaml", "rounds.parquet"}
    assert not (tmp_path / "local" / "mlflow.db").exists()
    assert any(artifacts.rglob("curves.png"))


def account(**changes):
    return Account("a", "n", {"method.strength": 1.0}, {"method": "fola"})._replace(**changes)


def test_the_same_attempt_continues_its_run(out):
    first, again, other = (LiveCopy(out, account(attempt=attempt)) for attempt in ("a", "a", "b"))
    assert first.run_id == again.run_id != other.run_id


def test_repeating_a_sync_changes_nothing(out):
    rounds = [{"GA": 0.5, "seconds": 1.25}, {"GA": 0.75, "seconds": 1.5}]
    for _ in range(3):
        copy = LiveCopy(out, account(rounds=rounds[:1]))
        for _ in range(2):
            copy.flush(account(rounds=rounds))
    client = MlflowClient(store_uri(out))
    assert [(p.step, p.value) for p in client.get_metric_history(copy.run_id, "GA")] == [(1, 0.5), (2, 0.75)]
    assert client.get_run(copy.run_id).data.params == {"method.strength": "1.0"}


def test_a_sync_sends_what_is_new_alone(out):
    sent = []

    class Store:
        def create_run(self, *_, **__):
            return SimpleNamespace(info=SimpleNamespace(run_id="r", start_time=0))

        def log_batch(self, run_id, metrics=(), tags=(), params=()):
            sent.extend([(one.key, one.step) for one in metrics] + [one.key for one in (*tags, *params)])

        def log_artifact(self, run_id, path):
            sent.append(path)

        def set_terminated(self, run_id, status):
            sent.append(status)

    copy = Copy(is_new=True)
    last = account(rounds=[{"GA": 1.0}] * 3, tags={"method": "fola", "note": "x"}, files=[Path("f")], status="FINISHED")
    for one in (account(), account(rounds=[{"GA": 1.0}]), account(rounds=[{"GA": 1.0}] * 3), last, last):
        sync(one, Place(Store(), "1"), copy)
    assert sent == ["method.strength", ("GA", 1), ("GA", 2), ("GA", 3), "note", "f", "FINISHED"]


def test_many_params_and_metrics_go_in_batches(out):
    rounds = [{f"m{i}": float(i) for i in range(30)} for _ in range(100)]
    copy = LiveCopy(out, account(params={f"p{i}": i for i in range(250)}, rounds=rounds))
    client = MlflowClient(store_uri(out))
    assert len(client.get_run(copy.run_id).data.params) == 250
    assert len(client.get_metric_history(copy.run_id, "m7")) == 100


def test_our_experiment_shows_charts_first(out):
    LiveCopy(out, account())
    experiment = MlflowClient(store_uri(out)).get_experiment_by_name(EXPERIMENT)
    assert experiment.experiment_id == "1"  # the address that `fl-lightning ui` prints
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_the_view_puts_results_before_everything_else(out):
    LiveCopy(out, account())
    tags = MlflowClient(store_uri(out)).get_experiment_by_name(EXPERIMENT).tags
    view = json.loads(tags["mlflow.sharedViewState.fl_lightning"])
    assert [chart["metricKey"] for chart in view["compareRunCharts"]][:3] == ["GA", "LA", "NLL"]
    (section,) = view["compareRunSections"]
    assert {chart["metricSectionId"] for chart in view["compareRunCharts"]} == {section["uuid"]}
    assert "params.`method.strength`" in view["selectedColumns"]
