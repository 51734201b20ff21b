"""A run from settings to files and MLflow, on embedded data."""

import json
import os

import filelock
import pandas as pd
import pytest
import torch
from mlflow import MlflowClient

from fl_lightning import experiment, load_model
from fl_lightning.errors import UserError
from fl_lightning.loop import federate
from fl_lightning.metrics import ridge_scan
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.runs import checkpoint, evaluator
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity
from fl_lightning.runs.open_run import RunOptions
from fl_lightning.runs.problem import problem_of
from fl_lightning.runs.tracking import live_copy
from fl_lightning.runs.tracking.store import store_uri
from fl_lightning.runs.tracking.sync import EXPERIMENT

SETTINGS = {
    "method": "fola",
    "data": "digits",
    "data.subset": 0.2,
    "data.clients": 4,
    "model": "softmax",
    "training.lr": 0.1,
    "federation.rounds": 4,
    "engine": "functional",
    "engine.chunk": 1,
}


def config(**changes):
    return configure({**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}})


def mlflow_runs(out):
    client = MlflowClient(store_uri(out))
    return client, client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])


def numbers(result):
    """The metrics that do not depend on the clock."""
    return [timeless(measurement) for measurement in result.history]


def timeless(measurement):
    return {k: v for k, v in measurement.metrics.items() if not k.startswith("seconds")}


def undisturbed(config):
    """The same numbers straight from the loop, without files or MLflow."""
    problem = problem_of(config)
    records = federate(config.method, problem, config.training, config.federation, config.engine)
    return [timeless(measure(config.method, problem.task, problem.dataset, record)) for record in records]


@pytest.mark.slow
def test_a_run_leaves_everything_that_is_needed_to_repeat_it(out):
    rounds = []
    result = experiment.run(config(), out, watch=lambda number, _: rounds.append(number))
    assert rounds == [1, 2, 3, 4]
    names = {path.name for path in result.folder.iterdir()}
    assert {"config.yaml", "rounds.parquet", "clients.parquet", "curves.png", "partition.png", "result.json"} <= names
    table = pd.read_parquet(result.folder / "rounds.parquet")
    assert table["round"].tolist() == [1, 2, 3, 4]
    assert table["GA"].tolist() == [m.metrics["GA"] for m in result.history]
    clients = pd.read_parquet(result.folder / "clients.parquet")
    assert {"round", "client", "samples", "accuracy", "precision_share"} <= set(clients.columns)

    client, (run,) = mlflow_runs(out)
    assert run.info.run_id == result.run_id
    assert run.info.status == "FINISHED"
    flat = config().flat()
    assert run.data.params.keys() == flat.keys()
    assert run.data.params["method.strength"] == "100.0"
    assert run.data.params["training.clip_norm"] == "null"
    assert {"method", "data", "partition", "seed", "mlflow.source.git.commit"} <= run.data.tags.keys()
    for metric in result.history[0].metrics:
        history = client.get_metric_history(result.run_id, metric)
        assert [point.step for point in history] == [1, 2, 3, 4]
        assert [point.value for point in history] == [m.metrics[metric] for m in result.history]
    stored = {item.path for item in client.list_artifacts(result.run_id)}
    pictures = {"curves.png", "partition.png"}
    assert stored == {"config.yaml", "rounds.parquet", "clients.parquet", "model.safetensors", *pictures}


@pytest.mark.slow
def test_a_finished_run_is_not_repeated_unless_asked(out):
    first = experiment.run(config(), out)
    again = experiment.run(config(), out)
    assert again.run_id == first.run_id
    assert again.history == first.history  # even the seconds
    fresh = experiment.run(config(), out, fresh=True)
    assert fresh.run_id != first.run_id
    assert numbers(fresh) == numbers(first)


def test_where_the_data_lie_does_not_change_the_identity():
    assert identity(config(data="mnist", data__root="x")) == identity(config(data="mnist"))
    assert identity(config()) != identity(config(seed=1))
    assert identity(config()) != identity(config(training__lr=0.2))


class StopError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_run_goes_on_in_the_same_mlflow_run(out, after):
    def stop(number, _):
        if number == after:
            raise StopError

    with pytest.raises(StopError):
        experiment.run(config(), out, watch=stop)
    _, (stopped,) = mlflow_runs(out)
    assert stopped.info.status == "FAILED"
    computed = []
    result = experiment.run(config(), out, watch=lambda number, _: computed.append(number))
    assert computed == [1, 2, 3, 4]
    assert numbers(result) == undisturbed(config())
    client, runs = mlflow_runs(out)
    assert [run.info.run_id for run in runs] == [result.run_id]
    assert [point.step for point in client.get_metric_history(result.run_id, "seconds")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_round_that_mlflow_missed_is_sent_on_resume(out, monkeypatch):
    original = live_copy.sync

    def dies_in_round_two(account, place, copy):
        if len(account.rounds) == 2:
            raise StopError
        original(account, place, copy)

    with monkeypatch.context() as patch:
        patch.setattr(live_copy, "sync", dies_in_round_two)
        patch.setattr(live_copy, "SYNC_EVERY_SECONDS", -1)  # after every round
        with pytest.raises(StopError):
            experiment.run(config(), out)
    result = experiment.run(config(), out)
    client, runs = mlflow_runs(out)
    assert len(runs) == 1
    assert [point.step for point in client.get_metric_history(result.run_id, "GA")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_divergence_is_a_recorded_end(out):
    wild = config(training__lr=1e30, model="mlp")
    result = experiment.run(wild, out)
    assert result.status == "diverged"
    assert "round" in result.message
    assert "training.lr" in result.message
    assert experiment.run(wild, out).run_id == result.run_id
    _, (run,) = mlflow_runs(out)
    assert run.data.tags["status"] == "diverged"
    assert "round 1" in run.data.tags["diverged"]


@pytest.mark.slow
def test_divergence_keeps_earlier_rounds(out):
    late = config(method__strength=1e6, training__epochs=5)  # the prior's step explodes once there is a prior
    result = experiment.run(late, out)
    assert result.status == "diverged"
    assert len(result.history) >= 1
    assert len(pd.read_parquet(result.folder / "rounds.parquet")) == len(result.history)


@pytest.mark.slow
def test_a_foreign_checkpoint_is_never_continued(out):
    result = experiment.run(config(), out)
    (result.folder / "result.json").unlink()
    other = experiment.run(config(seed=1), out)
    (other.folder / checkpoint.CURRENT).rename(result.folder / checkpoint.CURRENT)
    with pytest.raises(UserError, match="another configuration"):
        experiment.run(config(), out)
    assert numbers(experiment.run(config(), out, fresh=True)) == numbers(result)


@pytest.mark.slow
def test_a_truncated_checkpoint_never_gives_a_wrong_result(out):
    progress = experiment.rounds(config(), out)
    assert [next(progress)[0] for _ in range(3)] == [1, 2, 3]
    progress.close()
    path = run_folder.folder_of(config(), out) / checkpoint.CURRENT
    path.write_bytes(path.read_bytes()[:-100])
    assert numbers(experiment.run(config(), out)) == undisturbed(config())


@pytest.mark.slow
def test_two_processes_do_not_share_a_run(out):
    folder = run_folder.folder_of(config(), out)
    folder.mkdir()
    with filelock.FileLock(folder / "lock"), pytest.raises(UserError, match="another process"):
        run_folder.forget(config(), out)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match="choose another folder with --runs"):
        experiment.run(config(), tmp_path / "locked" / "runs")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match="choose another folder with --runs"):
        experiment.run(config(), tmp_path / "runs")


@pytest.mark.slow
def test_the_summary_is_json(out):
    result = experiment.run(config(), out)
    summary = json.loads(json.dumps(result.summary()))
    assert summary["GA"] == result.history[-1].metrics["GA"]
    assert (summary["round"], summary["run_id"]) == (4, result.run_id)


@pytest.mark.slow
def test_more_rounds_go_on_where_fewer_ended(out, monkeypatch):
    short = experiment.run(config(federation__rounds=2), out)
    trained = []
    monkeypatch.setattr(evaluator, "measure", lambda *args: (trained.append(args[3].round), measure(*args))[1])
    long = experiment.run(config(federation__rounds=4), out)
    assert trained == [3, 4]
    assert numbers(long)[:2] == numbers(short)
    assert numbers(long) == undisturbed(config(federation__rounds=4))
    assert long.run_id != short.run_id
    trained.clear()
    middle = experiment.run(config(federation__rounds=3), out)
    assert trained == []
    assert numbers(middle) == numbers(long)[:3]


@pytest.mark.slow
def test_a_run_that_is_left_is_recorded_as_stopped_and_can_be_resumed(out):
    progress = experiment.rounds(config(), out, RunOptions({"study": "mine"}, pictures=False))
    assert [next(progress)[0], next(progress)[0]] == [1, 2]
    progress.close()
    client, (stopped,) = mlflow_runs(out)
    assert (stopped.info.status, stopped.data.tags["status"], stopped.data.tags["study"]) == (
        "KILLED",
        "stopped",
        "mine",
    )
    assert [point.step for point in client.get_metric_history(stopped.info.run_id, "GA")] == [1, 2]
    result = experiment.run(config(), out)
    assert result.run_id == stopped.info.run_id
    assert numbers(result) == undisturbed(config())


@pytest.mark.slow
def test_a_run_may_leave_nothing_but_its_numbers(out):
    slim = RunOptions(pictures=False, checkpoint=False)
    result = experiment.complete(config(), out, slim)
    names = {path.name for path in result.folder.iterdir()}
    assert names == {
        *("attempt.json", "config.yaml", "settings.json", "rounds.parquet", "clients.parquet", "result.json", "lock"),
        "rounds.jsonl",
    }
    assert experiment.run(config(), out).reused


@pytest.mark.slow
def test_a_run_may_start_where_another_ended(out):
    first = experiment.run(config(method="fedavg", federation__rounds=2), out)
    second = config(method="fedavg", federation__rounds=1, federation__start=str(first.folder), training__lr=0.0)
    result = experiment.run(second, out)
    assert result.final["GA"] == first.final["GA"]  # with a learning rate of zero it stays there
    known_by = identity(second)
    assert known_by != identity(config(method="fedavg", federation__rounds=1, training__lr=0.0))
    moved = out / "moved"
    first.folder.rename(moved)
    where = {"method": "fedavg", "federation__rounds": 1, "training__lr": 0.0, "federation__start": str(moved)}
    assert identity(config(**where)) == known_by
    with pytest.raises(UserError, match=r"federation\.start .* another model"):
        experiment.check(config(method="fedavg", model="mlp", federation__start=str(moved)))
    with pytest.raises(UserError, match="no such folder"):
        experiment.run(config(federation__start="nowhere"), out)


@pytest.mark.slow
def test_the_model_of_a_finished_run_is_what_was_measured(out):
    mine = config(**{"compute.precision": "float64"})
    result = experiment.run(mine, out)
    model = load_model(result.folder)
    dataset = mine.source.load()
    with torch.no_grad():
        logits = model(dataset.inputs(dataset.test_x, torch.float64))
    assert float((logits.argmax(1) == dataset.test_y).double().mean()) == pytest.approx(result.history[-1]["GA"])
    assert not model.training


@pytest.mark.slow
def test_a_model_that_was_not_kept_says_why(out):
    without = experiment.complete(config(), out, RunOptions(checkpoint=False))
    with pytest.raises(UserError, match="without keeping its checkpoint"):
        load_model(without.folder)
    with pytest.raises(UserError, match="no such folder"):
        load_model(out / "nowhere")


@pytest.mark.slow
def test_ae_and_lf_are_logged_against_a_saved_run(out):
    saved = experiment.run(config(method="centralised", training__epochs=20), out)
    result = experiment.run(config(probe__reference=str(saved.folder)), out)
    distances = [m.metrics["AE"] for m in result.history]
    assert all(value > 0 for value in distances)
    assert distances[-1] < distances[0]
    assert all(m.metrics["LF"] > 0 for m in result.history)


@pytest.mark.slow
def test_ridge_rounds_leave_their_arrays(out):
    settings = {"data__clients": 2, "data__partition": "class_blocks", "probe__ridge_rounds": [1, 3]}
    result = experiment.run(config(**settings), out)
    arrays = ridge_scan.read(result.folder)
    assert {"r1_share", "r1_ridge", "r1_line", "r3_ridge"} <= arrays.keys()
    client, (run,) = mlflow_runs(out)
    assert "laplace.npz" in {item.path for item in client.list_artifacts(run.info.run_id)}
