"""The tutorial is carried out: every command and every line of Python, at a small scale."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from fl_lightning.__main__ import main
from tests.support.small_studies import without_ray

pytestmark = pytest.mark.system  # all of a user's first hour
PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
# What makes it small; everything else is as it stands there.
SMALLER = {
    "demo": "demo --scale smoke",
    "--seeds 3": "--seeds 2",
    "--federation.rounds 20": "--federation.rounds 2",
    "--training.epochs 5": "--training.epochs 1",
}


def fenced(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_from_the_demo_to_a_paper(tmp_path, empty_store, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    shutil.copy(empty_store, "runs/mlflow.db")
    without_ray(monkeypatch)
    commands = [line for block in fenced("bash") for line in block.splitlines()]
    assert [command.split()[1] for command in commands] == ["demo", "partition", "compare", "report", "table"]
    for command in commands:
        for long, short in SMALLER.items():
            command = command.replace(f" {long}", f" {short}")
        assert main(shlex.split(command)[1:]) == 0, command
    printed = capsys.readouterr().out
    for name in re.findall(r"`((?:runs|report)/\S+\.\w+)`", PAGE.read_text()):
        assert Path(name).stat().st_size > 1000, name
        assert name in printed
    (block,) = fenced("python")
    exec(compile(block, PAGE.name, "exec"), {})
    assert capsys.readouterr().out == "[]\n"
    (paper,) = fenced("latex")
    for target in re.findall(r"\\input{(\w+)}", paper):
        assert Path(f"{target}.tex").exists()
    for target in re.findall(r"\\includegraphics\[.*\]{(\w+)}", paper):
        assert Path(f"{target}.pdf").read_bytes().startswith(b"%PDF")
    labels = set(re.findall(r"\\label{([^}]+)}", paper + Path("table.tex").read_text()))
    assert set(re.findall(r"\\ref{([^}]+)}", paper)) == labels


def test_the_readme_leads_to_it():
    assert "](docs/tutorial.md)" in (PAGE.parents[1] / "README.md").read_text()
