"""docs/uncertainty.md is executed: its examples in Python, and its commands."""

import re
import shlex
from pathlib import Path

from fl_lightning.__main__ import main

PAGE = (Path(__file__).parent.parent.parent / "docs" / "uncertainty.md").read_text(encoding="utf-8")
QUICK = ["--method", "fedavg", "--engine", "functional", "--model.hidden", "[8]", "--federation.rounds", "2", "--quiet"]


def test_the_examples_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    namespace = {}
    for block in blocks:
        exec(compile(block, "docs/uncertainty.md", "exec"), namespace)
    drawn, model = namespace["state"], namespace["model"]
    assert {name: value.shape for name, value in drawn.items()} == {n: v.shape for n, v in model.state_dict().items()}
    model.load_state_dict(drawn)


def test_the_commands_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = [
        shlex.split(line.replace("\\\n", " "))
        for line in re.findall(r"^    fl-lightning (.*?[^\\])\n", PAGE, re.M | re.S)
    ]
    assert [command[0] for command in commands] == ["run", "uncertainty", "run", "run"]
    assert main([*commands[0], *QUICK]) == 0
    (folder,) = (path.parent for path in (tmp_path / "runs").glob("*/result.json"))
    assert main([str(folder) if word == "RUN" else word for word in commands[1]]) == 0
    assert "nn" in capsys.readouterr().out
    assert main([*commands[2], *QUICK[2:]]) == 0  # of a method that keeps a posterior
    assert main([*commands[3], *QUICK]) == 0
