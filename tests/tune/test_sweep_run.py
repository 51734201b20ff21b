"""The record of a sweep: its folder, which two sweeps of one study share."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from mlflow import MlflowClient

from fl_lightning.runs.tracking.store import store_uri
from tune.study_file import load
from tune.sweep_run import SweepRecord


@pytest.mark.slow
def test_two_sweeps_of_a_study_write_the_same_files_at_once(out, tmp_path):
    study, folder = load("demo", "smoke"), tmp_path / "sweep"
    records = [SweepRecord(study, out, folder) for _ in range(2)]

    def write_often(record):
        for _ in range(100):
            record._write_state(ended=False)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write_often, records))  # raises what a thread has raised
    for record in records:
        record.close(study, [], {})
    assert '"ended": true' in (folder / "sweep.json").read_text()
    assert records[0].run_id == records[1].run_id
    client = MlflowClient(store_uri(out))
    assert [one.step for one in client.get_metric_history(records[0].run_id, "runs")] == [0]
