"""--data function: a Python function in one file."""

import pytest

from fl_lightning.data.sources.function import Function
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity

ARRAYS = """
import numpy as np

def load():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)
    x = rng.normal(size=(60, 4)) + y[:, None]
    return RETURNED
"""
WAYS = {
    "a dict": "{'train_x': x, 'train_y': y}",
    "four arrays": "x[:40], y[:40], x[40:], y[40:]",
    "a dict with owners": "{'train_x': x, 'train_y': y, 'owners': ['b', 'a'] * 30}",
}


@pytest.fixture
def write(tmp_path):
    def write(text):
        (tmp_path / "my_data.py").write_text(text)
        return str(tmp_path / "my_data.py")

    return write


@pytest.mark.parametrize("way", WAYS)
def test_what_it_may_return(write, way):
    data = Function(path=write(ARRAYS.replace("RETURNED", WAYS[way]))).load()
    assert len(data.train_x) + len(data.test_x) == 60
    assert data.shape == (4,)
    assert data.num_classes == 3
    assert (data.owners is not None) == (way == "a dict with owners")


def test_it_may_return_a_dataset(write):
    text = """
from dataclasses import dataclass
import torch
from fl_lightning import Dataset

@dataclass
class Size:
    samples: int = 6

def load():
    x, y = torch.zeros(Size().samples, 3, 8, 8, dtype=torch.uint8), torch.arange(6) % 2
    return Dataset(x, y, x, y, num_classes=2, AUGMENT)
"""
    assert Function(path=write(text.replace("AUGMENT", "")), augment="paper").load().augment == "paper"
    assert Function(path=write(text.replace("AUGMENT", "augment='standard'"))).load().augment == "standard"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def lod(): pass", r"expected a function load\(\) in this file"),
        ("load = 3", r"expected a function load\(\)"),
        ("def load(): return 3", r"load\(\) must return a Dataset, .* got int"),
        ("def load():\n    return 1 / 0", "line 2: ZeroDivisionError"),
        ("def load():\n\n    import nothing_of_this_name", "line 3: ModuleNotFoundError"),
        ("def load()\n    pass", "line 1: SyntaxError"),
        ("def load(name): pass", "TypeError"),
        ("def load(): return {'train_x': [[1.0], [2.0, 3.0]], 'train_y': [0, 1]}", "train_x must be an array"),
        (ARRAYS.replace("RETURNED", "{'train_x': x * np.nan, 'train_y': y}"), "got nan in sample 0"),
        (ARRAYS.replace("RETURNED", "{'train_x': x, 'labels': y}"), "unknown array 'labels'"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ],
)
def test_mistakes_are_named_in_one_line(write, text, message):
    path = write(text)
    with pytest.raises(UserError, match=message) as caught:
        Function(path=path).load()
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none.py: No such file"):
        Function(path=str(tmp_path / "none.py")).load()
    with pytest.raises(UserError, match=r"data.path is missing"):
        Function()


def test_the_file_and_what_it_returns_make_the_run(write, tmp_path):
    def known_by(text):
        return identity(configure({"data": "function", "data.path": write(text)}))

    first = known_by(ARRAYS.replace("RETURNED", WAYS["a dict"]))
    assert known_by(ARRAYS.replace("RETURNED", WAYS["a dict"])) == first
    assert known_by(ARRAYS.replace("RETURNED", WAYS["a dict"]) + "# edited") != first
    reads = "{'train_x': np.loadtxt('FILE')[:, None], 'train_y': y}".replace("FILE", str(tmp_path / "numbers"))
    text = ARRAYS.replace("RETURNED", reads)
    (tmp_path / "numbers").write_text("1\n" * 60)
    one = known_by(text)
    known_by(ARRAYS.replace("RETURNED", WAYS["a dict"]))  # another file in between: only the last one is kept
    (tmp_path / "numbers").write_text("2\n" * 60)
    assert known_by(text) != one, "a file that it reads was changed"


def test_it_is_called_once_for_the_data_and_the_name(write, tmp_path):
    count = f"with open({str(tmp_path / 'calls')!r}, 'a') as file:\n    file.write('x')\n"
    path = write(count + ARRAYS.replace("RETURNED", WAYS["a dict"]))
    config = configure({"data": "function", "data.path": path})
    assert identity(config) == identity(config)
    config.source.load()
    assert (tmp_path / "calls").read_text() == "x"
