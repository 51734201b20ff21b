"""Reading: tidy tables with real types, filters, nothing silently dropped, one line for every mistake."""

import json
import shutil
import sqlite3

import pandas as pd
import pytest
import yaml

from analysis import runs
from analysis.parts import parts
from fl_lightning import experiment
from fl_lightning.config import configure
from fl_lightning.errors import UserError
from tests.analysis.conftest import TINY, sweep_here
from tests.servers import free_port, serving, wait_for


def test_one_row_per_run_with_types(smoke_store):
    table = runs.load(smoke_store, study="demo")
    assert len(table) == 6
    assert table["data.alpha"].dtype == float
    assert (table["data.alpha"] == 0.01).all()
    assert table["seed"].dtype.kind == "i"
    assert table["model.hidden"].iloc[0] == (64,)
    assert set(table["case"]) == {"FedAvg", "FOLA", "centralised"}
    assert (table["rounds"] == 3).all()
    assert table["ended"].all()
    assert (table["best_GA"] >= table["GA"]).all()
    assert "cases" not in table  # a param of the sweep itself


def test_the_numbers_are_those_of_the_runs(smoke_store):
    table = runs.load(smoke_store, study="demo")
    curves = runs.rounds(smoke_store, study="demo")
    assert len(curves) == 18
    for _, run in table.iterrows():
        history = pd.read_parquet(runs.Runs(smoke_store).artifact(run["run_id"], "rounds.parquet"))
        mine = curves.loc[curves["run_id"] == run["run_id"]]
        assert list(mine["round"]) == [1, 2, 3]
        for metric in ("GA", "LA", "NLL", "bytes_up"):
            assert mine[metric].to_list() == pytest.approx(history[metric].to_list())
        assert run["GA"] == pytest.approx(history["GA"].iloc[-1])
        assert run["best_GA"] == pytest.approx(history["GA"].max())


def test_filters(smoke_store):
    everything = runs.load(smoke_store)
    some = runs.load(smoke_store, where={"data.alpha": 0.01, "method": ["fola", "fedavg"]})
    assert 0 < len(some) < len(everything)
    assert set(some["method"]) == {"fola", "fedavg"}
    assert set(some["data.alpha"]) == {0.01}
    assert set(runs.load(smoke_store, tags={"method": "scaffold"})["case"]) == {"SCAFFOLD"}
    hidden = runs.load(smoke_store, where={"model.hidden": (64,)})
    assert set(hidden["study"]) == {"demo"}
    assert list(runs.rounds(smoke_store, study="demo", metrics=["GA"]).columns.intersection(["GA", "LA"])) == ["GA"]


def test_a_run_of_two_studies_is_in_both_under_its_own_name_there(smoke_store):
    """cifar_heterogeneity finds runs of cifar_epochs, whose tags stay those of the first."""
    first, second = (runs.load(smoke_store, study=name) for name in ("cifar_epochs", "cifar_heterogeneity"))
    assert set(first["run_id"]) & set(second["run_id"])
    assert len(second) == 12
    assert set(second["case"]) == {"FedAvg", "FOLA"}


def test_endings_are_told_apart(odd_store):
    table = runs.load(odd_store)
    by_seed = table.loc[table["case"].isin(["FedAvg", "FOLA"])].set_index(["method", "seed"])["status"]
    assert by_seed["fedavg", 2] == "diverged"
    assert by_seed["fedavg", 3] == "stopped"
    assert by_seed["fola", 4] == "failed"
    assert by_seed["fola", 0] == "finished"
    assert table.set_index("status")["ended"].groupby(level=0).all().to_dict() == {
        "diverged": False,
        "failed": False,
        "finished": True,
        "stopped": False,
    }
    remarks = " ".join(table.attrs["remarks"])
    for word in ("diverged", "stopped", "failed", "--fresh"):
        assert word in remarks
    assert (table.loc[table["status"] == "finished"].groupby(["case", "seed"]).size() == 1).all()


def test_variants_without_a_study_have_names(odd_store):
    assert set(runs.load(odd_store)["case"]) == {"FedAvg", "FOLA", "FOLA curvature=offline"}


def test_a_running_run_is_seen(out):
    from fl_lightning import experiment
    from fl_lightning.config import configure
    from tests.analysis.conftest import TINY

    progress = experiment.rounds(configure({**TINY, "method": "fedavg"}), out)
    next(progress)
    experiment_run = runs.load(out)
    assert list(experiment_run["status"]) == ["running"]
    assert not experiment_run["ended"].any()
    assert "not ended yet" in experiment_run.attrs["remarks"][0]
    progress.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"study": "dmo"}, "unknown study 'dmo': did you mean 'demo'"),
        ({"study": "demo", "scale": "smal"}, "unknown scale of demo 'smal'"),
        ({"where": {"data.alfa": 1}}, "no run has a column 'data.alfa'; did you mean 'data.alpha'?"),
        ({"where": {"zzz": 1}}, "columns are, for example"),
        ({"where": {"data.alpha": 77}}, "no run has data.alpha = 77"),
        ({"tags": {"metod": "x"}}, "did you mean 'method'"),
    ],
)
def test_mistakes_in_one_line(smoke_store, arguments, words):
    with pytest.raises(UserError) as caught:
        runs.load(smoke_store, **arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_known_study_without_runs_is_named_with_its_command(odd_store):
    with pytest.raises(runs.NoRuns, match="fl-lightning sweep demo"):
        runs.load(odd_store, study="demo")
    assert len(runs.load(odd_store, study="demo", absent="empty")) == 0
    with pytest.raises(UserError, match="unknown study"):
        runs.load(odd_store, study="dem", absent="empty")


def test_stores_that_are_none(tmp_path, out):
    with pytest.raises(UserError, match=r"no runs in .*fl-lightning demo"):
        runs.load(tmp_path / "nothing")
    with pytest.raises(UserError, match="no experiment called fl_lightning, but no experiment at all"):
        runs.load(out)
    text = tmp_path / "notes.db"
    text.write_text("this is no database, and it is long enough for a header" * 20)
    with pytest.raises(UserError, match="cannot be read as an MLflow database"):
        runs.load(text)
    with pytest.raises(UserError, match="no MLflow server answers"):
        runs.load("http://127.0.0.1:9")


def test_a_store_of_another_experiment_or_version(tmp_path, empty_store):
    for folder in ("experiment", "version"):
        (tmp_path / folder).mkdir()
        shutil.copy(empty_store, tmp_path / folder / "mlflow.db")
    with sqlite3.connect(tmp_path / "experiment" / "mlflow.db") as database:
        database.execute("UPDATE experiments SET name = 'cats and dogs'")
    with pytest.raises(UserError, match="no experiment called fl_lightning, but cats and dogs"):
        runs.load(tmp_path / "experiment")
    with sqlite3.connect(tmp_path / "version" / "mlflow.db") as database:
        database.execute("DROP TABLE latest_metrics")
    with pytest.raises(UserError, match="mlflow db upgrade"):
        runs.load(tmp_path / "version")


def test_an_experiment_without_runs(out):
    from fl_lightning import experiment
    from fl_lightning.config import configure
    from tests.analysis.conftest import TINY

    experiment.run(configure({**TINY, "federation.rounds": 1}), out)
    with sqlite3.connect(out / "mlflow.db") as database:
        database.execute("UPDATE runs SET lifecycle_stage = 'deleted'")
    with pytest.raises(runs.NoRuns, match="holds no runs yet"):
        runs.load(out)


def test_a_moved_folder_keeps_its_artifacts(smoke_store, tmp_path):
    shutil.copytree(smoke_store, tmp_path / "moved")
    with sqlite3.connect(tmp_path / "moved" / "mlflow.db") as database:
        database.execute("UPDATE runs SET artifact_uri = replace(artifact_uri, 'smoke-runs', 'gone')")
    moved = runs.Runs(tmp_path / "moved")
    table = moved.load("demo")
    assert moved.artifact(table["run_id"].iloc[0], "rounds.parquet") is not None
    assert moved.artifact(table["run_id"].iloc[0], "nothing.npz") is None


def test_a_study_is_what_it_was_when_last_swept(tmp_path, empty_store, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    out, path = tmp_path / "runs", tmp_path / "mine.yaml"
    out.mkdir()
    shutil.copy(empty_store, out / "mlflow.db")
    study = {"base": {**TINY, "federation.rounds": 1}, "cases": ["fedavg", "fola"], "scales": {"smoke": {}}}
    for rates in ([0.1, 0.01], [0.1, 0.2]):
        path.write_text(yaml.safe_dump({**study, "space": {"training.lr": rates}}))
        sweep_here(str(path), out, monkeypatch)
        table = runs.load(out, study="mine")
        assert set(table["training.lr"]) == set(rates)
        assert len(table) == 4
    assert table.attrs["remarks"] == ["2 runs of an earlier form of the study are left out"]
    assert len(runs.load(out)) == 6


def test_runs_without_a_study_are_taken_apart_by_what_they_learn(tmp_path, empty_store, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    for settings in ({}, {"seed": 1}, {"model": "softmax"}):
        own = {key: value for key, value in TINY.items() if not (settings.get("model") and key == "model.hidden")}
        experiment.run(configure({**own, "federation.rounds": 1, **settings}), tmp_path)
    found = {part.title: len(part.runs) for part in parts(tmp_path)}
    assert found == {"runs without a study: digits, mlp": 2, "runs without a study: digits, softmax": 1}


def test_nothing_is_written(smoke_store):
    before = {path: path.stat().st_mtime_ns for path in smoke_store.glob("mlflow.db")}
    runs.rounds(smoke_store)
    assert before == {path: path.stat().st_mtime_ns for path in smoke_store.glob("mlflow.db")}


def test_a_server_gives_the_same_tables(smoke_store, tmp_path, monkeypatch):
    shutil.copytree(smoke_store, tmp_path / "runs")
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    backend = f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    with serving("mlflow", "server", "--backend-store-uri", backend, "--port", str(port), "--workers", "1"):
        wait_for(f"{uri}/health")
        there, here = runs.Runs(), runs.Runs(smoke_store)
        pd.testing.assert_frame_equal(there.load("demo"), here.load("demo"), check_like=True)
        curves = [one.rounds(one.load("demo"))[["run_id", "round", "GA", "LA"]] for one in (there, here)]
        pd.testing.assert_frame_equal(*(c.sort_values(["run_id", "round"]).reset_index(drop=True) for c in curves))


def test_thousands_of_runs(smoke_store, tmp_path):
    """2,000 runs with 30 rounds of 4 metrics, cloned in SQL."""
    folder = tmp_path / "many"
    folder.mkdir()
    shutil.copy(smoke_store / "mlflow.db", folder / "mlflow.db")
    with sqlite3.connect(folder / "mlflow.db") as database:
        (pattern,) = database.execute("SELECT run_uuid FROM tags WHERE key = 'case' LIMIT 1").fetchone()
        (experiment_id,) = database.execute("SELECT experiment_id FROM runs LIMIT 1").fetchone()
        params = database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (pattern,)).fetchall()
        ids = [f"{i:032x}" for i in range(2000)]
        database.executemany(
            "INSERT INTO runs (run_uuid, name, status, start_time, end_time, lifecycle_stage, artifact_uri, "
            "experiment_id) VALUES (?, 'x', 'FINISHED', ?, 0, 'active', '', ?)",
            [(run_id, i, experiment_id) for i, run_id in enumerate(ids)],
        )
        database.executemany(
            "INSERT INTO params (run_uuid, key, value) VALUES (?, ?, ?)",
            [
                (run_id, key, json.dumps(i) if key == "seed" else value)
                for i, run_id in enumerate(ids)
                for key, value in params
            ],
        )
        database.executemany(
            "INSERT INTO metrics (run_uuid, key, value, timestamp, step, is_nan) VALUES (?, ?, ?, ?, ?, 0)",
            [
                (i, key, 0.5 + r / 100, r, r)
                for i in ids
                for key in ("GA", "LA", "NLL", "seconds")
                for r in range(1, 31)
            ],
        )
        database.executemany(
            "INSERT INTO latest_metrics (run_uuid, key, value, timestamp, step, is_nan) VALUES (?, ?, 0.8, 30, 30, 0)",
            [(run_id, key) for run_id in ids for key in ("GA", "LA", "NLL", "seconds")],
        )
    store = runs.Runs(folder)
    table = store.load(where={"seed": list(range(2000)), "name": "x"})
    curves = store.rounds(table)
    assert len(table) == 2000
    assert len(curves) == 60_000
