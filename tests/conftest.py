"""Settings for all tests."""

import inspect
import os
import shutil
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # several workers share few cores; inherited by the processes that tests start

import filelock
import pytest
import torch

import fl_lightning  # noqa: F401 - before Lightning: it mends torchvision beside a CPU-only torch

torch.set_num_threads(1)

# What takes seconds: processes of their own, clusters, browsers, notebooks, and the store of runs.
SLOW_MODULES = {"multiprocessing", "nbclient", "ray", "selenium", "subprocess"}
SLOW_HELPERS = {"tests.servers", "tests.tune.clusters"}
SLOW_FIXTURES = {"empty_store"}


def pytest_collection_modifyitems(items):
    """Mark tests as slow by what they use, beside those that say so themselves; `make quick` runs the others."""
    for item in items:
        names = vars(getattr(item, "module", None) or object).values()
        uses = {getattr(value, "__name__", "").partition(".")[0] for value in names if inspect.ismodule(value)}
        helpers = {getattr(value, "__module__", None) for value in names}
        fixtures = set(getattr(item, "fixturenames", ()))
        if uses & SLOW_MODULES or helpers & SLOW_HELPERS or fixtures & SLOW_FIXTURES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """An MLflow database with its tables and nothing in them: creating one takes seconds, copying it nothing."""
    from mlflow import MlflowClient

    shared = tmp_path_factory.getbasetemp().parent  # of all workers
    path = shared / "empty-mlflow.db"
    with filelock.FileLock(shared / "empty-mlflow.lock"):
        if not path.exists():
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
