"""Reports know which version of the code made a run."""

import json

import pandas as pd
import pytest

from analysis import runs, study_records
from fl_lightning import experiment
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.runs.config.run_config import configure

SETTINGS = {"method": "fedavg", "model": "softmax", "data.subset": 0.1, "federation.rounds": 1, "engine": "functional"}


def table(*rows):
    frame = pd.DataFrame(rows, columns=["method", "settings", "versions", "start"])
    frame["versions"] = [json.dumps(version) if version else None for version in frame["versions"]]
    return frame.assign(ended=True, **{"federation.rounds": 1})


def test_the_newest_version_of_a_setting_counts():
    found = table(
        ("fola", "a", {"method": 1}, 1),
        ("fola", "a", {"method": 2}, 2),
        ("fola", "b", {"method": 1}, 3),
        ("fola", None, None, 4),
    )
    assert study_records.superseded(found).tolist() == [True, False, False, False]


def test_of_runs_that_a_server_holds_twice_the_newest_counts():
    found = table(*(("fola", None, None, start) for start in (1, 3, 2))).assign(identity=["same", "same", "other"])
    kept, remarks = runs._newest(found)
    assert kept["start"].tolist() == [3, 2]
    assert remarks == ["1 runs were repeated with --fresh; only the newest of each counts"]


def test_mixed_versions_are_named_by_part():
    found = table(
        ("fola", "a", {"method": 2, "loop": 1}, 1),
        ("fola", "b", {"method": 1, "loop": 1}, 2),
        ("fedavg", "c", {"method": 1, "loop": 1}, 3),
    )
    assert study_records.mixed(found) == [
        "runs of several versions of the code are mixed: method fola version 1 (1 runs), 2 (1 runs); sweep again"
    ]
    assert study_records.mixed(found.iloc[1:]) == []
    assert study_records.mixed(found.drop(columns="versions")) == []


@pytest.mark.slow
def test_a_store_with_two_versions(out, monkeypatch):
    for seed in (0, 1):
        experiment.run(configure({**SETTINGS, "seed": seed}), out)
    monkeypatch.setattr(FedAvg, "version", 2)
    newer = experiment.run(configure({**SETTINGS, "seed": 0}), out)
    found = runs.load(out)
    assert len(found.runs) == 2
    assert newer.run_id in set(found.runs["run_id"])
    first, second = found.remarks
    assert first == "1 runs were made by an older version of the code and computed again since"
    assert "method fedavg version 1 (1 runs), 2 (1 runs)" in second
