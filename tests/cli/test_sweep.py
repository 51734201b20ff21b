"""fl-lightning sweep as a user meets it."""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from fl_lightning.__main__ import main
from tests.support.clusters import ENVIRONMENT
from tests.tune.test_sweep import SMALL
from tune.sweep import fitting

pytestmark = pytest.mark.system  # Ray, in this process


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def write(folder, **content):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"base": {**SMALL, "federation.rounds": 2}, "cases": ["fedavg", "fola"], **content}))
    return str(path)


def refused(capsys, *arguments):
    """The one line with which a command is refused."""
    assert main(["sweep", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


def test_a_dry_run_counts_and_writes_nothing(out, capsys):
    before = sorted(out.iterdir())
    assert main(["sweep", "mnist_first_round", "--scale", "smoke", "--dry-run", "--runs", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "runs        32, of which 0 are there already" in printed
    assert "settings    16, each with 2 seeds" in printed
    assert re.search(r"time        about \d+ s with \d+ at once on this machine\n", printed)
    assert re.search(r"disk        about \d+\.\d MB in", printed)
    assert sorted(out.iterdir()) == before


def test_some_of_the_cases_alone(out, capsys):
    assert (
        main(["sweep", "cifar_table", "--scale", "smoke", "--cases", "FOLA, FedBE", "--dry-run", "--runs", str(out)])
        == 0
    )
    assert "runs        2, of which 0 are there already" in capsys.readouterr().out


def test_a_dry_run_of_a_search_says_its_budget(tmp_path, out, capsys):
    path = write(
        tmp_path,
        environments={"data.alpha": [0.1, 1]},
        space={"training.lr": {"uniform": [0.1, 1]}},
        search={"algorithm": "optuna", "samples": 5},
        seeds=3,
    )
    assert main(["sweep", path, "--dry-run", "--runs", str(out)]) == 0
    assert "20 settings in 4 comparisons, 60 runs at most" in capsys.readouterr().out


def test_a_dry_run_says_what_it_would_do_with_workers(tmp_path, out, capsys):
    search = {"space": {"training.lr": {"uniform": [0.1, 1]}}, "search": {"algorithm": "optuna", "samples": 5}}
    path = write(tmp_path, workers="auto", **search)
    assert main(["sweep", path, "--dry-run", "--runs", str(out)]) == 0
    assert "workers     auto: each trial gets what too few trials leave free" in capsys.readouterr().out
    assert main(["sweep", path, "--dry-run", "--runs", str(out), "--workers", "2"]) == 0
    assert "workers     2 in each trial" in capsys.readouterr().out
    assert "at most" in refused(capsys, write(tmp_path), "--dry-run", "--runs", str(out), "--workers", "5000")


def test_a_sweep_on_this_machine_prints_a_table_and_goes_on(tmp_path, out, capsys):
    path = write(tmp_path, seeds=2, thresholds=[0.1])
    arguments = ["sweep", path, "--runs", str(out), "--max-concurrent", "1"]
    assert main([*arguments, "--seed", "5", "--dry-run"]) == 0
    capsys.readouterr()
    assert main(arguments) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split() == ["case", "GA", "(%)", "LA", "(%)", "rounds", "to", "10%", "runs"]
    assert [line.split()[0] for line in lines[1:3]] == ["fedavg", "fola"]
    assert all(re.search(r"\d+\.\d\d ± \d+\.\d\d", line) for line in lines[1:3])
    assert "4 runs on seeds 0 and 1, 4 of them computed now" in printed.out
    assert "4/4" in printed.err
    assert "best GA" in printed.err
    assert not list(Path(tempfile.gettempdir()).glob(f"fl-ray-{os.getpid()}-*"))
    assert main([*arguments, "--json", "--quiet"]) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert printed.err == ""
    assert (summary["runs"], summary["computed"], summary["failures"]) == (4, 0, {})
    assert [row["case"] for row in summary["best"]] == ["fedavg", "fola"]
    kept = (Path(summary["folder"]) / "best.md").read_text().splitlines()
    assert [line.split()[1] for line in kept[2:4]] == ["fedavg", "fola"]
    assert main([*arguments, "--dry-run"]) == 0
    assert "4, of which 4 are there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demoo"], "unknown study 'demoo': did you mean 'demo'?"),
        (["nothing.yaml"], "no study at nothing.yaml"),
        (["demo", "--scale", "huge"], "unknown scale 'huge'"),
        (["demo", "--training.lrr", "1"], "unknown setting 'training.lrr': did you mean 'training.lr'?"),
        (["demo", "--training.lr", "fast"], "training.lr must be a number, got"),
        (["demo", "--training.lr"], "--training.lr needs a value"),
        (["demo", "--max-concurrent", "-1"], "--max-concurrent must be >= 0, got -1"),
        (["demo", "--max-concurrent", "two"], "--max-concurrent"),
        (["demo", "--cases", "FOLA,FedAgv"], "unknown case of study demo 'FedAgv': did you mean 'FedAvg'?"),
        (["demo", "--resources.cpu", "many"], "--resources.cpu"),
        (["demo", "--resources.cpu", "-1"], "--resources.cpu"),
        (["demo", "--address", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
        ([], "study"),
    ],
)
def test_mistakes_are_one_line(out, capsys, arguments, message):
    line = refused(capsys, *arguments, "--quiet", "--runs", str(out))
    assert message in line
    assert not list(out.glob("*-digits-*"))


def test_a_study_with_an_unknown_key_names_the_nearest(tmp_path, out, capsys):
    line = refused(capsys, write(tmp_path, space={"method.strenght": [1]}), "--runs", str(out))
    assert "study mine, case fedavg: unknown setting 'method.strenght'" in line


def test_studies_are_listed(capsys):
    assert main(["list", "studies"]) == 0
    printed = capsys.readouterr().out
    assert "mnist_first_round" in printed
    assert "Best GA over lr, E and B after one round" in printed


@pytest.mark.parametrize(
    ("free", "gigabytes", "expected"),
    [(4e9, 3, 1), (1e9, 3, 1), (10e9, 3, 3), (4e9, 0, sys.maxsize), (None, 3, sys.maxsize)],
)
def test_fewer_runs_at_once_where_memory_is_scarce(monkeypatch, free, gigabytes, expected):
    monkeypatch.setattr("fl_lightning.system.memory.available", lambda device: free)
    assert fitting(gigabytes) == expected
