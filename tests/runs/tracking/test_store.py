"""Eight processes write to one MLflow store: nothing is lost, nothing is there twice, resumed runs stay one run."""

import os

import pytest
from mlflow import MlflowClient

from fl_lightning.runs.tracking.live_copy import LiveCopy
from fl_lightning.runs.tracking.sync import EXPERIMENT, Account
from tests.support.processes import started
from tests.support.servers import free_port, serving, wait_for

pytestmark = pytest.mark.system


WRITERS, ROUNDS = 8, 24


def metrics(writer, number):
    return {"GA": writer + number / 100, "LA": writer - number / 100, "seconds": 0.5}


def write(out, store, writer, last):
    """Two runs at once, round by round, as far as this; then the process ends without a word, as if killed."""
    if store is not None:
        os.environ["MLFLOW_TRACKING_URI"] = store
    params = {f"method.p{i}": i for i in range(40)}
    tags = {"writer": str(writer)}
    accounts = [
        Account(f"attempt {writer} {which}", f"run {writer}", {**params, "which": which}, tags) for which in (0, 1)
    ]
    copies = [LiveCopy(out, account) for account in accounts]
    for number in range(1, last + 1, 2):  # what an earlier process has written is written again
        rounds = [metrics(writer, r) for r in range(1, number + 2)]
        for copy, account in zip(copies, accounts, strict=True):
            copy.flush(account._replace(rounds=rounds))
    if last == ROUNDS:
        for copy, account in zip(copies, accounts, strict=True):
            copy.close(account._replace(rounds=rounds, status="FINISHED"))
    os._exit(0)


def together(out, store, last):
    processes = [started(write, out, store, writer, last) for writer in range(WRITERS)]
    for process in processes:
        process.join(180)
    assert [process.exitcode for process in processes] == [0] * WRITERS


def check(client, status):
    found = client.get_experiment_by_name(EXPERIMENT)
    runs = client.search_runs([found.experiment_id])
    assert len(runs) == 2 * WRITERS
    assert {run.info.status for run in runs} == {status}
    return {(int(run.data.tags["writer"]), run.data.params["which"]): run.info.run_id for run in runs}


def check_store(out, store, uri):
    client = MlflowClient(uri)
    together(out, store, ROUNDS // 2)
    first = check(client, "RUNNING")
    together(out, store, ROUNDS)
    second = check(client, "FINISHED")
    assert first == second
    assert len(second) == 2 * WRITERS
    for (writer, _), run_id in second.items():
        assert len(client.get_run(run_id).data.params) == 41
        for name in ("GA", "LA"):
            points = client.get_metric_history(run_id, name)
            expected = [(number, metrics(writer, number)[name]) for number in range(1, ROUNDS + 1)]
            assert sorted((point.step, point.value) for point in points) == expected


def test_a_database_on_one_machine(out):
    check_store(out, None, f"sqlite:///{out / 'mlflow.db'}")


def test_a_tracking_server_for_several_machines(out, tmp_path):
    address = f"http://127.0.0.1:{(port := free_port())}"
    flags = ["--backend-store-uri", f"sqlite:///{out / 'mlflow.db'}", "--port", str(port), "--workers", "1"]
    with serving("mlflow", "server", *flags, "--artifacts-destination", str(tmp_path / "served")):
        wait_for(f"{address}/health")
        check_store(tmp_path / "local", address, address)
