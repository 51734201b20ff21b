"""A tracking server that dies in the middle of a run: the run goes on, and the same command sends what is missing."""

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from fl_lightning import experiment
from fl_lightning.config import configure
from fl_lightning.errors import UserError
from fl_lightning.runs import outbox, recording
from fl_lightning.runs.outbox import Outbox
from tests.faults.workers import SETTINGS
from tests.servers import free_port, wait_for

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
    monkeypatch.setattr(recording, "SEND_EVERY_SECONDS", -1)  # after every round
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
    with pytest.raises(UserError, match=r"no MLflow server answers|the same command resumes"):
        experiment.run(CONFIG, local)

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


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_what_was_kept_is_sent_in_order_when_the_server_is_back(monkeypatch, capsys):
    monkeypatch.setattr(outbox, "RETRY_SECONDS", 0.0)
    port = free_port()
    box, written = Outbox(f"http://127.0.0.1:{port}"), []
    for number in range(3):
        box.send(lambda number=number: written.append(number))
    assert written == []
    assert not box.flush()
    with ThreadingHTTPServer(("127.0.0.1", port), Healthy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        box.send(lambda: written.append(3))
        assert written == [0, 1, 2, 3]
        assert box.flush()
        server.shutdown()
    first, second = capsys.readouterr().err.splitlines()
    assert "does not answer; the computation goes on" in first
    assert "answers again" in second


def test_a_refusal_is_not_repeated(tmp_path):
    def refused():
        raise MlflowException("no such run", error_code=1)

    with pytest.raises(UserError, match="cannot write to the MLflow store"):
        Outbox(f"sqlite:///{tmp_path / 'mlflow.db'}").send(refused)
