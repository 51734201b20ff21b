"""A tracking server that is away, fails or is slow: the run goes on, and the same command sends what is missing."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from threading import Event

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from fl_lightning import experiment
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.tracking import live_copy, store
from fl_lightning.runs.tracking.live_copy import LiveCopy
from fl_lightning.runs.tracking.sync import Account
from tests.support.servers import free_port, wait_for
from tests.support.web import QuietHandler, serving
from tests.support.workers import SETTINGS

pytestmark = pytest.mark.system


CONFIG = configure({**SETTINGS, "federation.rounds": 8})


class Server:
    """An MLflow server that can be killed and started again."""

    def __init__(self, database, artifacts):
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        flags = ["--backend-store-uri", f"sqlite:///{database}", "--artifacts-destination", str(artifacts)]
        self._command = [sys.executable, "-m", "mlflow", "server", *flags, "--port", str(self.port), "--workers", "1"]

    def start(self):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(self._command, start_new_session=True, **quiet)
        wait_for(f"{self.address}/health")

    def kill(self):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture
def server(out, tmp_path, monkeypatch):
    it = Server(out / "mlflow.db", tmp_path / "served")
    it.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", it.address)
    monkeypatch.setattr(live_copy, "SYNC_EVERY_SECONDS", -1)  # after every round
    yield it
    it.kill()


def test_a_run_survives_its_server(server, tmp_path, capsys):
    local = tmp_path / "local"

    def killed_then_interrupted(number, _):
        if number == 2:
            server.kill()
        if number == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.run(CONFIG, local, watch=killed_then_interrupted)
    words = capsys.readouterr().err
    assert words.count("does not answer; the computation goes on") == 1
    with pytest.raises(KeyboardInterrupt):  # it is away from the start
        experiment.run(CONFIG, local, watch=killed_then_interrupted)
    assert capsys.readouterr().err.count("does not answer; the computation goes on") == 1

    server.start()
    result = experiment.run(CONFIG, local, watch=lambda number, _: server.kill() if number == 6 else None)
    assert (result.status, result.unsent, len(result.history)) == ("finished", True, 8)
    words = capsys.readouterr().err
    assert words.count("the same command sends the rest") == 1
    again = experiment.run(CONFIG, local)  # it is still away
    assert (again.reused, again.unsent, again.history) == (True, True, result.history)
    assert "the same command sends the rest" in capsys.readouterr().err

    server.start()
    sent = experiment.run(CONFIG, local)
    assert (sent.reused, sent.unsent, sent.history) == (True, False, result.history)
    client = MlflowClient(server.address)
    (run,) = client.search_runs([client.get_experiment_by_name("fl_lightning").experiment_id])
    assert (run.info.run_id, run.info.status, run.data.tags["status"]) == (result.run_id, "FINISHED", "finished")
    for name in ("GA", "seconds"):
        points = client.get_metric_history(run.info.run_id, name)
        assert [(p.step, p.value) for p in points] == [(i, m.metrics[name]) for i, m in enumerate(result.history, 1)]
    assert "rounds.parquet" in {item.path for item in client.list_artifacts(run.info.run_id)}


class Failing(QuietHandler):
    """Answers 500 to everything, or nothing at all for as long as the test takes."""

    def do_GET(self):  # noqa: N802 - as the standard library calls it
        if self.server.silent:
            self.server.over.wait()
        self.send_response(500)
        self.end_headers()

    do_POST = do_GET  # noqa: N815 - as the standard library calls it


@pytest.mark.parametrize("kind", ["failing", "silent", "refusing connections"])
def test_a_run_starts_and_ends_without_its_server(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 0.2)
    config = replace(CONFIG, federation=replace(CONFIG.federation, rounds=2))
    with serving(Failing) as server:
        server.silent, server.over = kind == "silent", Event()
        port = free_port() if kind == "refusing connections" else server.server_port
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        result = experiment.run(config, tmp_path)
        server.over.set()
    assert (result.status, result.unsent, result.run_id, len(result.history)) == ("finished", True, "", 2)
    words = capsys.readouterr().err.splitlines()
    assert [("the computation goes on" in line, "sends the rest" in line) for line in words] == [
        (True, False),
        (False, True),
    ]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # the folder is the truth: another store learns all of it
    told = experiment.run(config, tmp_path)
    assert (told.reused, told.unsent, told.history) == (True, False, result.history)
    assert told.run_id


class SlowStore:
    """Takes an account when it is allowed to."""

    def __init__(self, monkeypatch):
        self.begun, self.answers, self.written = Event(), Event(), []
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        monkeypatch.setattr(live_copy, "open_place", lambda *_: None)
        monkeypatch.setattr(live_copy, "sync", self.write)
        monkeypatch.setattr(live_copy, "SYNC_EVERY_SECONDS", -1)

    def write(self, account, *_):
        self.begun.set()
        self.answers.wait()
        self.written.append(len(account.rounds))


def after(rounds):
    return Account("a", "n", {}, {}, [{"GA": 0.5}] * rounds)


def test_nothing_waits_for_a_slow_server_which_gets_many_rounds_at_once(tmp_path, monkeypatch):
    server = SlowStore(monkeypatch)
    copy = LiveCopy(tmp_path, after(0), seconds=0.01)
    server.begun.wait()
    for number in range(1, 4):
        copy.update(after(number))
    assert not copy.flush(after(4), 0.01)
    assert server.written == []
    server.answers.set()
    assert copy.flush(after(5))
    assert server.written == [0, 5]


def test_what_is_given_up_is_not_written_any_more(tmp_path, monkeypatch):
    server = SlowStore(monkeypatch)
    copy = LiveCopy(tmp_path, after(0), seconds=0.01)
    server.begun.wait()
    assert not copy.close(after(1), 0.01)
    thread = copy._thread
    server.answers.set()
    thread.join()
    assert server.written == [0]


def wait_until(is_so):
    deadline = time.monotonic() + 30
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_so()


class Healthy(QuietHandler):
    def do_GET(self):  # noqa: N802 - as the standard library calls it
        self.send_response(200)
        self.end_headers()


def test_what_was_kept_is_sent_when_the_server_is_back(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(live_copy, "RETRY_SECONDS", 0.05)
    port, written = free_port(), []
    uri = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(live_copy, "open_place", lambda *_: store.check_reachable(uri))
    monkeypatch.setattr(live_copy, "sync", lambda account, *_: written.append(len(account.rounds)))
    copy = LiveCopy(tmp_path, after(0))
    assert not copy.flush(after(3))
    assert written == []
    with serving(Healthy, port):
        wait_until(lambda: written == [3])
        assert copy.flush(after(4))
        assert written == [3, 4]
    first, second = capsys.readouterr().err.splitlines()
    assert "does not answer; the computation goes on" in first
    assert "answers again" in second


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "http://127.0.0.1:9"])
def test_a_refusal_is_not_repeated(tmp_path, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(live_copy, "open_place", lambda *_: None)
    refuses = [False, True, False]

    def refused(*_):
        if refuses.pop(0):
            raise MlflowException("no such run", error_code=INVALID_PARAMETER_VALUE)

    monkeypatch.setattr(live_copy, "sync", refused)
    copy = LiveCopy(tmp_path, after(0))
    with pytest.raises(UserError, match="cannot write to the MLflow store"):
        copy.flush(after(1))
    assert copy.flush(after(2))
    assert refuses == []
