"""Reports know which version of the code made a run."""

import json

import pandas as pd

from analysis import runs, versions
from fl_lightning import experiment
from fl_lightning.config import configure
from fl_lightning.methods.fedavg import FedAvg

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
    assert versions.superseded(found).tolist() == [True, False, False, False]


def test_mixed_versions_are_named_by_part():
    found = table(
        ("fola", "a", {"method": 2, "loop": 1}, 1),
        ("fola", "b", {"method": 1, "loop": 1}, 2),
        ("fedavg", "c", {"method": 1, "loop": 1}, 3),
    )
    assert versions.mixed(found) == [
        "runs of several versions of the code are mixed: method fola version 1 (1 runs), 2 (1 runs); sweep again"
    ]
    assert versions.mixed(found.iloc[1:]) == []
    assert versions.mixed(found.drop(columns="versions")) == []


def test_a_store_with_two_versions(out, monkeypatch):
    for seed in (0, 1):
        experiment.run(configure({**SETTINGS, "seed": seed}), out)
    monkeypatch.setattr(FedAvg, "version", 2)
    newer = experiment.run(configure({**SETTINGS, "seed": 0}), out)
    found = runs.load(out)
    assert len(found) == 2
    assert newer.run_id in set(found["run_id"])
    first, second = found.attrs["remarks"]
    assert first == "1 runs were made by an older version of the code and computed again since"
    assert "method fedavg version 1 (1 runs), 2 (1 runs)" in second
