"""docs/uncertainty.md is executed: its examples in Python, and its commands."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fl_lightning.__main__ import main
from fl_lightning.data.batches import ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.metrics.uncertainty import posterior_file
from fl_lightning.metrics.uncertainty.posterior import build
from fl_lightning.metrics.uncertainty.sample_curvature import final_round
from fl_lightning.models.task import Task

PAGE = (Path(__file__).parents[2] / "docs" / "uncertainty.md").read_text(encoding="utf-8")
QUICK = ["--method", "fedavg", "--engine", "functional", "--model.hidden", "[8]", "--federation.rounds", "2", "--quiet"]


@pytest.mark.slow
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


def test_a_draw_without_this_package_knows_layers_without_bias(tmp_path):
    """The last example, on a network of which one layer has a bias and one has none."""
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)).double())
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.arange(9) % 2
    data = ClientData(0, Dataset(x, y, x, y, 2), torch.arange(9), torch.float64)
    pooled = final_round(task, task.initial, [data], "kron", "exact")
    posterior_file.save(
        build(task, task.initial, "kron", pooled, x[:1]).with_prior(1e12), tmp_path / posterior_file.FILE
    )
    save_file(task.model.state_dict(), tmp_path / "model.safetensors")
    example = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[2]
    namespace = {"result": SimpleNamespace(folder=tmp_path)}
    exec(compile(example, "docs/uncertainty.md", "exec"), namespace)
    drawn, mean = namespace["state"], task.model.state_dict()
    assert drawn.keys() == mean.keys()
    for name, value in mean.items():
        assert 0 < (drawn[name] - value).abs().max() < 1e-4  # the prior leaves no more than 1e-6 of deviation


@pytest.mark.slow
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
