"""The section on own data in docs/extending.md is executed: its scripts, then its commands."""

import re
import shlex
from pathlib import Path

import pytest

from fl_lightning.cli import run

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
SECTION = PAGE.read_text().partition("\n## Your own data\n")[2].partition("\n## ")[0]
LINES = re.MULTILINE | re.DOTALL
SCRIPTS = re.findall(r"^(?:    |```python\n)# (\w+\.py)\n(.*?)(?=^    fl-lightning|^```$)", SECTION, LINES)
COMMANDS = re.findall(r"^    fl-lightning (run .*?[^\\])\n", SECTION, LINES)


def test_the_section_has_what_it_should():
    assert [name for name, _ in SCRIPTS] == ["make_arrays.py", "make_images.py", "make_table.py", "my_data.py"]
    assert len(COMMANDS) == 5


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files of all scripts, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    for name, text in SCRIPTS:
        lines = [line.removeprefix("    ") if name != "my_data.py" else line for line in text.splitlines()]
        Path(name).write_text("\n".join(lines))
        exec(compile(Path(name).read_text(), name, "exec"), {})
    return tmp_path


@pytest.mark.slow
def test_the_commands_work(files, out, capsys):
    scores = []
    for command in COMMANDS:
        words = shlex.split(command.replace("\\\n", " "))[1:]
        quick = ["--engine", "functional", "--method", "fedavg", "--training.lr", "0.1", "--federation.rounds", "3"]
        assert run.main([*words, *quick, "--training.epochs", "2", "--runs", str(out), "--json", "--quiet"]) == 0
        scores.append(capsys.readouterr().out)
    assert all('"status": "finished"' in score for score in scores)
    assert {path.name for path in files.iterdir()} >= {"my.npz", "photos", "patients.parquet"}
