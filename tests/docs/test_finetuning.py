"""The tutorial on fine-tuning is carried out: every command and every line of Python, for fewer rounds."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from fl_lightning.__main__ import main
from tests.support.small_studies import without_ray
from tune.grid import cells
from tune.study_file import load

pytestmark = pytest.mark.system
PAGE = Path(__file__).parents[2] / "docs" / "finetuning.md"
SMALLER = {"--seeds 2": "--seeds 1", "--federation.rounds 5": "--federation.rounds 2"}


def test_from_a_pretrained_network_to_one_that_is_fine_tuned(tmp_path, empty_store, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    shutil.copy(empty_store, "runs/mlflow.db")
    without_ray(monkeypatch)
    blocks = re.findall(r"^```(python|bash|yaml)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "bash", "bash", "bash", "python", "yaml"]
    names = {}
    for language, text in blocks:
        if language == "python":
            exec(compile(text.replace('"federation.rounds": 20', '"federation.rounds": 3'), PAGE.name, "exec"), names)
        elif language == "bash":
            for long, short in SMALLER.items():
                text = text.replace(long, short)
            assert main(shlex.split(text)[1:]) == 0, text
        else:
            assert yaml.safe_load(text)["pretrain"]
            Path("mine.yaml").write_text(text)
            assert len(cells(load("mine.yaml"))) == 4
    printed = capsys.readouterr().out
    assert "pretrained: " in printed
    assert "numbers: the whole network" in printed
    assert Path("runs/comparison-head.png").stat().st_size > 1000
    assert len(list(Path("runs/frozen").iterdir())) == 1  # a comparison keeps no models


def test_the_readme_leads_to_it():
    assert "](docs/finetuning.md)" in (PAGE.parents[1] / "README.md").read_text()
