"""Flags and fixtures of all tests."""

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import filelock
import pytest

from fl_lightning.system import devices
from tests.support.drawn_once import drawn_once

os.environ["OMP_NUM_THREADS"] = "1"  # several workers share few cores; inherited by the processes that tests start
devices.avoid_broken_tiles()  # before anything is computed in this process, or in those that it starts


def pytest_addoption(parser):
    parser.addoption("--choice-seed", type=int, help="draw the same choices of settings again; see tests/README.md")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """The seed is drawn before workers start; they inherit it with the environment."""
    drawn = os.environ.setdefault("CHOICE_SEED", str(random.SystemRandom().randrange(10_000)))
    if config.option.choice_seed is None:
        config.option.choice_seed = int(drawn)


def pytest_collection_modifyitems(items):
    for item in items:
        if mark := item.get_closest_marker("exhaustive"):
            item.user_properties.append(("covers", mark.args[0]))


def pytest_terminal_summary(terminalreporter, config):
    """The seed of all draws, and what the exhaustive tests have covered."""
    terminalreporter.write_line(f"choices of settings are those of --choice-seed {config.option.choice_seed}")
    for outcome in ("passed", "skipped", "failed"):
        reports = [one for one in terminalreporter.getreports(outcome) if one.when == "call" or one.skipped]
        covers = Counter(text for one in reports for key, text in one.user_properties if key == "covers")
        for text, number in sorted(covers.items()):
            terminalreporter.write_line(f"{outcome:<8} {number:>5}  {text}")


@pytest.fixture(scope="session", autouse=True)
def _pictures_are_drawn_once():
    with drawn_once():
        yield


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """An MLflow database with its tables and nothing in them: to create one takes seconds, to copy it nothing."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # of all workers, but of this session alone
    path = shared / "empty-mlflow.db"
    with filelock.FileLock(shared / "empty-mlflow.lock"):
        if not path.exists():
            from mlflow import MlflowClient

            MlflowClient(f"sqlite:///{path}.part").search_experiments()
            Path(f"{path}.part").rename(path)
    return path


@pytest.fixture
def out(tmp_path, empty_store, monkeypatch):
    """A folder for runs with an empty store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "runs"
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder
