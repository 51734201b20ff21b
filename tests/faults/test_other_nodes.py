"""Nodes that lack what workers need, or have something else: one line before anything is trained."""

import contextlib
import shutil
from pathlib import Path

import pytest

import fl_lightning
from tests.support.clusters import Driver, cluster

pytestmark = pytest.mark.system


FLAGS = ["--data", "digits", "--model", "softmax", "--federation.rounds", "2", "--engine", "functional"]
PLUGIN = '''
"""FedAvg under another name."""

from dataclasses import dataclass

from fl_lightning.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    """FedAvg under another name."""
'''


@pytest.fixture
def folders(tmp_path):
    """Where the driver and the first node are, and where the second one is; plug-ins are named relative to them."""
    found = tmp_path / "first", tmp_path / "second"
    for folder in found:
        (folder / "plugins").mkdir(parents=True)
    (found[0] / "plugins" / "mine.py").write_text(PLUGIN)
    return found


def train(out, address, folder, *arguments):
    """The program in a folder: its result, and what it has said."""
    with contextlib.chdir(folder):
        driver = Driver(out, *FLAGS, *arguments, "--address", address, command="run", FL_LIGHTNING_PLUGINS="plugins")
    try:
        return driver.wait(), driver.errors
    finally:
        driver.end()


def check_refused(result, out, *words):
    code, errors = result
    assert code == 2, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("fl-lightning: ")]
    assert all(word in line for word in words), line
    assert not list(out.glob("*/checkpoint*")), "something was trained"


def test_plugins_that_a_node_lacks_or_has_otherwise(out, folders):
    first, second = folders
    with contextlib.chdir(first), cluster(1) as made:
        with contextlib.chdir(second):
            made.add_node(num_cpus=1, object_store_memory=100_000_000)
        made.wait_for_nodes()
        run = ("--method", "mine", "--workers", "2")
        words = "the plug-in mine.py is not visible to ", " in plugins; keep it where all nodes see it"
        check_refused(train(out, made.address, first, *run), out, *words)
        (second / "plugins" / "mine.py").write_text(PLUGIN + "# another state\n")
        words = "expected the plug-in mine.py on ", "got another one", "keep it where all nodes see it"
        check_refused(train(out, made.address, first, *run), out, *words)
        (second / "plugins" / "mine.py").write_text(PLUGIN)
        code, errors = train(out, made.address, first, *run)
        assert code == 0, errors


def test_a_node_with_other_code(out, tmp_path, folders, monkeypatch):
    there = tmp_path / "site"
    (source,) = map(Path, fl_lightning.__path__)
    shutil.copytree(source, there / "fl_lightning", ignore=shutil.ignore_patterns("__pycache__"))
    file = there / "fl_lightning" / "errors.py"
    file.write_text(f"{file.read_text()}# another state\n")
    with cluster(1) as made:
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", str(there))
            made.add_node(num_cpus=1, object_store_memory=100_000_000)
        made.wait_for_nodes()
        result = train(out, made.address, folders[0], "--method", "fedavg", "--workers", "2")
        check_refused(result, out, "expected fl_lightning ", "got fl_lightning ", "install the same on all nodes")
