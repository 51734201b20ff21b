"""Reading: tidy tables with real types, filters, nothing silently dropped, one line for every mistake."""

import shutil
import sqlite3

import pandas as pd
import pytest
import yaml

from analysis import runs
from analysis.runs import studies
from fl_lightning import experiment
from fl_lightning.errors import UserError
from fl_lightning.runs import known_run
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.tracking.store import sqlite_uri
from fl_lightning.system import checksums
from tests.support.servers import free_port, serving, wait_for
from tests.support.small_studies import TINY, sweep_here

pytestmark = pytest.mark.system


def test_one_row_per_run_with_types(smoke_store):
    table = runs.load(smoke_store, study="demo").runs
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
    study = runs.load(smoke_store, study="demo")
    table, curves = study.runs, study.rounds
    assert len(curves) == 18
    for _, run in table.iterrows():
        history = pd.read_parquet(study.file(run["run_id"], "rounds.parquet"))
        mine = curves.loc[curves["run_id"] == run["run_id"]]
        assert list(mine["round"]) == [1, 2, 3]
        for metric in ("GA", "LA", "NLL", "bytes_up"):
            assert mine[metric].to_list() == pytest.approx(history[metric].to_list())
        assert run["GA"] == pytest.approx(history["GA"].iloc[-1])
        assert run["best_GA"] == pytest.approx(history["GA"].max())


def test_filters(smoke_store):
    everything = runs.load(smoke_store).runs
    some = runs.load(smoke_store, where={"data.alpha": 0.01, "method": ["fola", "fedavg"]}).runs
    assert 0 < len(some) < len(everything)
    assert set(some["method"]) == {"fola", "fedavg"}
    assert set(some["data.alpha"]) == {0.01}
    assert set(runs.load(smoke_store, tags={"method": "scaffold"}).runs["case"]) == {"SCAFFOLD"}
    hidden = runs.load(smoke_store, where={"model.hidden": (64,)}).runs
    assert set(hidden["study"]) == {"demo"}


def test_a_run_of_two_studies_is_in_both_under_its_own_name_there(smoke_store):
    """cifar_heterogeneity finds runs of cifar_epochs, whose tags stay those of the first."""
    first, second = (runs.load(smoke_store, study=name).runs for name in ("cifar_epochs", "cifar_heterogeneity"))
    assert set(first["run_id"]) & set(second["run_id"])
    assert len(second) == 12
    assert set(second["case"]) == {"FedAvg", "FOLA"}


def test_endings_are_told_apart(odd_store):
    study = runs.load(odd_store)
    table = study.runs
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
    remarks = " ".join(study.remarks)
    for word in ("diverged", "stopped", "failed"):
        assert word in remarks
    assert (table.loc[table["status"] == "finished"].groupby(["case", "seed"]).size() == 1).all()


def test_variants_without_a_study_have_names(odd_store):
    assert set(runs.load(odd_store).runs["case"]) == {"FedAvg", "FOLA", "FOLA curvature=offline"}


def test_a_running_run_is_seen(out):
    from fl_lightning import experiment
    from fl_lightning.runs.config.run_config import configure
    from tests.support.small_studies import TINY

    progress = experiment.rounds(configure({**TINY, "method": "fedavg"}), out)
    next(progress)
    experiment_run = runs.load(out)
    assert list(experiment_run.runs["status"]) == ["running"]
    assert not experiment_run.runs["ended"].any()
    assert "not ended yet" in experiment_run.remarks[0]
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
    assert len(runs.load(odd_store, study="demo", absent="empty").runs) == 0
    with pytest.raises(UserError, match="unknown study"):
        runs.load(odd_store, study="dem", absent="empty")


def test_places_without_runs(tmp_path, out):
    with pytest.raises(UserError, match=r"no runs in .*fl-lightning demo"):
        runs.load(tmp_path / "nothing")
    with pytest.raises(runs.NoRuns, match="holds no runs yet"):
        runs.load(out)
    with pytest.raises(UserError, match="no MLflow server answers"):
        runs.load("http://127.0.0.1:9")


def test_a_store_of_another_experiment(tmp_path, empty_store):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    with pytest.raises(UserError, match="no experiment called fl_lightning, but no experiment at all"):
        runs.load(sqlite_uri(tmp_path / "mlflow.db"))
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("UPDATE experiments SET name = 'cats and dogs'")
    with pytest.raises(UserError, match="no experiment called fl_lightning, but cats and dogs"):
        runs.load(sqlite_uri(tmp_path / "mlflow.db"))


def test_a_moved_folder_keeps_its_files(smoke_store, tmp_path):
    shutil.copytree(smoke_store, tmp_path / "moved")
    study = runs.load(tmp_path / "moved", "demo")
    run_id = study.runs["run_id"].iloc[0]
    assert study.file(run_id, "rounds.parquet").is_relative_to(tmp_path / "moved")
    assert study.file(run_id, "nothing.npz") is None


def test_a_damaged_result_is_not_believed(out):
    folder = experiment.run(configure({**TINY, "federation.rounds": 1}), out).folder
    result = folder / "result.json"
    result.write_bytes(result.read_bytes()[:-9])
    (run,) = known_run.known_runs(out)
    assert run.status == "stopped"
    assert "GA" in run.rounds[0]  # from its checkpoint


def test_a_run_whose_process_was_killed_is_stopped(out):
    progress = experiment.rounds(configure({**TINY, "method": "fedavg"}), out)
    next(progress)
    (folder,) = out.glob("fedavg-*")
    shutil.copytree(folder, out / "copy")  # whose lock no process holds
    statuses = {run.folder.name: (run.status, len(run.rounds)) for run in known_run.known_runs(out)}
    assert statuses == {folder.name: ("running", 1), "copy": ("stopped", 1)}
    progress.close()


def test_a_study_is_what_it_was_when_last_swept(tmp_path, empty_store, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    out, path = tmp_path / "runs", tmp_path / "mine.yaml"
    out.mkdir()
    shutil.copy(empty_store, out / "mlflow.db")
    study = {"base": {**TINY, "federation.rounds": 1}, "cases": ["fedavg", "fola"], "scales": {"smoke": {}}}
    for rates in ([0.1, 0.01], [0.1, 0.2]):
        path.write_text(yaml.safe_dump({**study, "space": {"training.lr": rates}}))
        sweep_here(str(path), out, monkeypatch)
        found = runs.load(out, study="mine")
        assert set(found.runs["training.lr"]) == set(rates)
        assert len(found.runs) == 4
    assert found.remarks == ("2 runs of an earlier form of the study are left out",)
    assert len(runs.load(out).runs) == 6


def test_runs_without_a_study_are_taken_apart_by_what_they_learn(tmp_path, empty_store, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    for settings in ({}, {"seed": 1}, {"model": "softmax"}):
        own = {key: value for key, value in TINY.items() if not (settings.get("model") and key == "model.hidden")}
        experiment.run(configure({**own, "federation.rounds": 1, **settings}), tmp_path)
    found = {part.title: len(part.runs) for part in studies(tmp_path)}
    assert found == {"runs without a study: digits, mlp": 2, "runs without a study: digits, softmax": 1}


def test_nothing_is_written(smoke_store):
    before = {path: path.stat().st_mtime_ns for path in smoke_store.rglob("*.*")}
    runs.load(smoke_store)
    assert before == {path: path.stat().st_mtime_ns for path in smoke_store.rglob("*.*")}


def test_a_server_gives_the_same_tables(smoke_store, tmp_path, monkeypatch):
    shutil.copytree(smoke_store, tmp_path / "runs")
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    backend = f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    with serving("mlflow", "server", "--backend-store-uri", backend, "--port", str(port), "--workers", "1"):
        wait_for(f"{uri}/health")
        there, here = runs.load(study="demo"), runs.load(smoke_store, study="demo")
        tables = [one.runs.drop(columns=["start", "end"]) for one in (there, here)]
        pd.testing.assert_frame_equal(*tables, check_like=True)
        assert there.spec == here.spec
        curves = [one.rounds[["run_id", "round", "GA", "LA"]] for one in (there, here)]
        pd.testing.assert_frame_equal(*(c.sort_values(["run_id", "round"]).reset_index(drop=True) for c in curves))


def test_many_runs(smoke_store, tmp_path):
    """Copies of one folder, each of which counts as a run of its own."""
    pattern = next(smoke_store.glob("fola-digits-*"))
    content = checksums.read(pattern / "result.json", None)
    for number in range(300):
        (tmp_path / f"run-{number}").mkdir()
        copy = {**content, "run_id": f"{number:032x}", "tags": {**content["tags"], "identity": f"{number}"}}
        checksums.write(tmp_path / f"run-{number}" / "result.json", content["identity"], copy)
        shutil.copy(pattern / "rounds.jsonl", tmp_path / f"run-{number}")
    study = runs.load(tmp_path)
    assert len(study.runs) == 300
    assert len(study.rounds) == 300 * content["rounds"]
