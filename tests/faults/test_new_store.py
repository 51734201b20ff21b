"""The birth of an MLflow database: kills, crowds, and what earlier versions of the program have left half made."""

import os
import shutil
import signal
import sqlite3
from contextlib import closing
from threading import Event, Thread

import filelock
import pytest
from mlflow import MlflowClient

from fl_lightning import experiment
from fl_lightning.errors import UserError
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.folder import finished, folder_of
from fl_lightning.runs.tracking.live_copy import LiveCopy
from fl_lightning.runs.tracking.store import database_of, ensure, store_uri, why_broken
from fl_lightning.runs.tracking.sync import EXPERIMENT, Account
from tests.support import workers
from tests.support.processes import fl_lightning

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def _no_server(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def runs_in(out):
    client = MlflowClient(store_uri(out))
    return client, client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])


KILLS = [
    *((workers.killed_after, statements) for statements in (1, 30, 300, 800, 1300)),  # of about 1700
    (workers.killed_at_the_name, False),
    (workers.killed_at_the_name, True),
]


def test_kills_during_creation_leave_a_whole_store_or_none(tmp_path):
    """Each process finds what those before it have left."""
    for kill, moment in KILLS:
        assert not (tmp_path / "mlflow.db").exists()
        process = workers.started(kill, moment, workers.open_store, str(tmp_path))
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert why_broken(tmp_path / "mlflow.db") is None
    process = workers.started(workers.open_store, str(tmp_path))
    process.join()
    assert process.exitcode == 0
    assert {one.name for one in tmp_path.iterdir()} <= {"mlflow.db", "mlflow.db.lock", "mlflow.db-wal", "mlflow.db-shm"}


def test_eight_runs_at_once_share_a_new_store(tmp_path):
    out = tmp_path / "runs"
    processes = [workers.started(workers.run, str(out), seed) for seed in range(8)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    _, runs = runs_in(out)
    assert sorted(run.data.params["seed"] for run in runs) == [str(seed) for seed in range(8)]
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_the_same_command_finishes_after_a_kill_in_the_creation(tmp_path):
    out = tmp_path / "runs"
    flags = [f"--{key}={value}" for key, value in workers.SETTINGS.items()]
    command = ["run", *flags, "--runs", str(out), "--quiet"]
    process = workers.started(workers.killed_after, 300, workers.command, *command)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert {path.name for path in out.glob("mlflow.db*")} >= {"mlflow.db.new", "mlflow.db.lock"}
    done = fl_lightning(*command)
    assert (done.returncode, done.stderr) == (0, "")


def half_made(path):
    """As a kill among MLflow's migrations leaves it."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE experiments (experiment_id INTEGER, name TEXT)")
        database.execute("CREATE TABLE _alembic_tmp_trace_info (request_id TEXT)")
        database.commit()


def half_migrated(path):
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE _alembic_tmp_runs (run_uuid TEXT)")
        database.commit()


def truncated(path):
    path.write_bytes(path.read_bytes()[:50_000])


def emptied(path):
    path.write_bytes(b"")


def no_database(path):
    path.write_bytes(b"this is no database" * 100)


@pytest.mark.parametrize("damage", [half_made, half_migrated, truncated, emptied, no_database])
def test_a_broken_store_is_set_aside_with_a_word(out, empty_store, damage, capsys):
    if damage is half_made:
        (out / "mlflow.db").unlink()
    damage(out / "mlflow.db")
    (out / "mlflow.db-wal").write_bytes(b"of the broken one")
    broken = (out / "mlflow.db").read_bytes()

    def fill(uri):
        shutil.copy(empty_store, database_of(uri))

    ensure(out / "mlflow.db", fill)
    assert why_broken(out / "mlflow.db") is None
    (aside,) = out.glob("mlflow.broken-*.db")
    assert aside.read_bytes() == broken
    words = capsys.readouterr().err
    assert words.startswith(f"fl-lightning: the MLflow database {out / 'mlflow.db'} is broken (")
    assert aside.name in words
    assert words.count("\n") == 1


def test_a_database_gets_its_name_when_nothing_else_is_left(out, empty_store, monkeypatch):
    """What a kill after that left behind would stay for ever: the next process finds a whole database."""
    (out / "mlflow.db").unlink()
    replace, seen = os.replace, []

    def named(source, target):
        seen.extend(path.name for path in out.glob("mlflow.db.*"))
        replace(source, target)

    monkeypatch.setattr(os, "replace", named)
    ensure(out / "mlflow.db", lambda uri: shutil.copy(empty_store, database_of(uri)))
    assert sorted(seen) == ["mlflow.db.lock", "mlflow.db.part"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlflow.db", "mlflow.db is a link to itself; remove it"),
        ("mlflow.db-shm", "mlflow.db-shm, got a folder; move it away"),
        ("mlflow.db-wal", "mlflow.db-wal, got a folder; move it away"),
    ],
)
def test_what_cannot_be_a_store_is_one_clear_line(tmp_path, empty_store, name, message):
    if name == "mlflow.db":
        (tmp_path / name).symlink_to(name)
    else:
        shutil.copy(empty_store, tmp_path / "mlflow.db")
        (tmp_path / name).mkdir()
    with pytest.raises(UserError) as told:
        workers.open_store(str(tmp_path))
    assert str(told.value).endswith(message)


def test_a_store_that_is_in_use_is_not_broken(out):
    with closing(sqlite3.connect(out / "mlflow.db")) as database:
        database.execute("BEGIN EXCLUSIVE")
        database.execute("CREATE TABLE mine (x)")
        assert why_broken(out / "mlflow.db") is None


@pytest.mark.parametrize("name", ["what?", "#1", "50%20", "a b", "ä&b=c"])
def test_the_store_lies_in_its_folder_whatever_that_is_called(tmp_path, empty_store, name):
    out = tmp_path / name
    out.mkdir()
    shutil.copy(empty_store, out / "mlflow.db")
    assert database_of(store_uri(out)) == out / "mlflow.db"
    (tmp_path / "file.txt").write_text("x")
    files = [tmp_path / "file.txt"]
    copy = LiveCopy(out, Account("a", "n", {"method": "fola"}, {"method": "fola"}, files=files))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [name]
    assert list((out / "artifacts").rglob("file.txt"))
    with closing(sqlite3.connect(out / "mlflow.db")) as database:
        assert database.execute("SELECT run_uuid FROM runs").fetchall() == [(copy.run_id,)]


def test_other_stores_are_no_database_files():
    assert database_of("http://127.0.0.1:5000") is None
    assert database_of("sqlite-runs") is None
    assert database_of("sqlite://") is None
    assert database_of("sqlite:///runs/mlflow.db").as_posix() == "runs/mlflow.db"


@pytest.mark.parametrize("loss", ["broken", "deleted"])
def test_a_new_store_is_told_what_the_folders_know(tmp_path, empty_store, loss):
    out = tmp_path / "runs"
    out.mkdir()
    shutil.copy(empty_store, out / "mlflow.db")
    for seed in (0, 1):
        workers.started(workers.run, str(out), seed).join()
    if loss == "broken":
        truncated(out / "mlflow.db")
    else:
        (out / "mlflow.db").unlink()
    process = workers.started(workers.run, str(out), 2)
    process.join()
    assert process.exitcode == 0
    client, runs = runs_in(out)
    known = {run.info.run_id: run for run in runs}
    assert len(known) == 3
    for seed in range(3):
        result = finished(configure({**workers.SETTINGS, "seed": seed}), out)
        run = known[result.run_id]
        assert (run.info.status, run.data.tags["status"], run.data.params["seed"]) == (
            "FINISHED",
            "finished",
            str(seed),
        )
        points = client.get_metric_history(result.run_id, "seconds")
        assert [(p.step, p.value) for p in points] == [
            (i, m.metrics["seconds"]) for i, m in enumerate(result.history, 1)
        ]
        assert "rounds.parquet" in {item.path for item in client.list_artifacts(result.run_id)}


def test_a_run_that_another_process_computes_is_waited_for(out, monkeypatch):
    config = configure(workers.SETTINGS)
    folder = folder_of(config, out)
    folder.mkdir()
    held, warned, words = Event(), Event(), []

    def warn(text):
        words.append(text)
        warned.set()

    def other():
        with filelock.FileLock(folder / "lock"):
            held.set()
            warned.wait()

    monkeypatch.setattr(run_folder.activity, "warn", warn)
    Thread(target=other, daemon=True).start()
    held.wait()
    assert experiment.run(config, out).status == "finished"
    assert words[0].startswith("another process is computing this run")


def test_a_process_does_not_wait_for_itself(out):
    config = configure(workers.SETTINGS)
    first, second = experiment.rounds(config, out), experiment.rounds(config, out)
    next(first)
    with pytest.raises(UserError, match="this process is computing the run"):
        next(second)
    first.close()
