"""Tracking on a real MLflow server, as several machines would share it."""

import json

from mlflow import MlflowClient

from fl_lightning import experiment
from fl_lightning.config import configure
from fl_lightning.runs.track import EXPERIMENT, Tracker
from tests.servers import free_port, serving, wait_for

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


def tracker(out, **changes):
    arguments = {"attempt": "a", "name": "n", "params": {"method.strength": 1.0}, "tags": {"method": "fola"}}
    return Tracker(out, **{**arguments, **changes})


def test_the_same_attempt_continues_its_run(out):
    first, again, other = tracker(out), tracker(out), tracker(out, attempt="b")
    assert first.run_id == again.run_id != other.run_id


def test_repeating_a_round_adds_nothing(out):
    it = tracker(out)
    for _ in range(3):
        it.log_rounds([(1, {"GA": 0.5, "seconds": 1.25}), (2, {"GA": 0.75, "seconds": 1.5})])
    client = MlflowClient(it.uri)
    assert [(p.step, p.value) for p in client.get_metric_history(it.run_id, "GA")] == [(1, 0.5), (2, 0.75)]
    assert client.get_run(it.run_id).data.params == {"method.strength": "1.0"}


def test_many_params_and_metrics_go_in_batches(out):
    it = tracker(out, params={f"p{i}": i for i in range(250)})
    it.log_rounds((r, {f"m{i}": float(i) for i in range(30)}) for r in range(1, 101))
    client = MlflowClient(it.uri)
    assert len(client.get_run(it.run_id).data.params) == 250
    assert len(client.get_metric_history(it.run_id, "m7")) == 100


def test_our_experiment_shows_charts_first(out):
    it = tracker(out)
    experiment = MlflowClient(it.uri).get_experiment_by_name(EXPERIMENT)
    assert experiment.experiment_id == "1"  # the address that `fl-lightning ui` prints
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


def test_the_view_puts_results_before_everything_else(out):
    it = tracker(out)
    tags = MlflowClient(it.uri).get_experiment_by_name(EXPERIMENT).tags
    view = json.loads(tags["mlflow.sharedViewState.fl_lightning"])
    assert [chart["metricKey"] for chart in view["compareRunCharts"]][:3] == ["GA", "LA", "NLL"]
    (section,) = view["compareRunSections"]
    assert {chart["metricSectionId"] for chart in view["compareRunCharts"]} == {section["uuid"]}
    assert "params.`method.strength`" in view["selectedColumns"]
