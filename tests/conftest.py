"""Settings for all tests."""

import inspect
import os
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # several workers share few cores; inherited by the processes that tests start

import filelock
import pytest
import torch

import fl_lightning  # noqa: F401 - before Lightning: it mends torchvision beside a CPU-only torch
from fl_lightning.runs import files, store
from fl_lightning.system import tiles

torch.set_num_threads(1)
tiles.avoid_broken()  # before anything is computed in this process

# Whole programs, as a user has them: processes, clusters, servers, browsers, notebooks.
SYSTEM_MODULES = {"multiprocessing", "nbclient", "ray", "selenium", "subprocess"}
SYSTEM_HELPERS = {"tests.processes", "tests.servers", "tests.tune.clusters"}
SYSTEM_FIXTURES = {"ray_here"}
SYSTEM_FOLDER = "tests/faults/"  # what is slow in it
# What takes seconds, too: the store of runs.
SLOW_FIXTURES = {"empty_store"}
COUNTED_CASES = 3
# All tests of a folder have one Ray; the many of a file have nothing in common.
SHARED_CLUSTER = "tests/workers/"
APART = {"tests/methods/test_contract.py", "tests/test_golden.py", "tests/faults/test_kill.py"}


def pytest_collection_modifyitems(items):
    """Mark tests by what they use, beside those that say it themselves, as those of the whole system and as slow.

    `make system` runs the former, `make test` all others, and counts lines in a few cases of those that are not slow,
    which `make quick` runs alone.

    In xdist's workers slow ones come first: the many that take no time fill up the end, where nobody shall wait.
    """
    times = Counter()
    for item in items:
        names = vars(getattr(item, "module", None) or object).values()
        uses = {getattr(value, "__name__", "").partition(".")[0] for value in names if inspect.ismodule(value)}
        helpers = {getattr(value, "__module__", None) for value in names}
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & SLOW_FIXTURES:
            item.add_marker(pytest.mark.slow)
        is_slow_fault = item.nodeid.startswith(SYSTEM_FOLDER) and item.get_closest_marker("slow")
        if uses & SYSTEM_MODULES or helpers & SYSTEM_HELPERS or fixtures & SYSTEM_FIXTURES or is_slow_fault:
            item.add_marker(pytest.mark.system)
        if item.get_closest_marker("system"):
            item.add_marker(pytest.mark.slow)
        function = item.nodeid.partition("[")[0]
        times[function] += 1
        # Counting lines takes half as long again: those of slow tests are mostly of libraries, and the many cases of
        # one test run the same ones.
        if item.get_closest_marker("slow") or times[function] > COUNTED_CASES:
            item.add_marker(pytest.mark.no_cover)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file stay together in one of xdist's workers, since they share clusters, servers and stores."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            if file.startswith(SHARED_CLUSTER):
                return SHARED_CLUSTER
            return nodeid if file in APART else file

    config.option.loadscopereorder = False  # the order is that of the collection
    return ByFile(config, log)


def made_once(tmp_path_factory):
    """An MLflow database with its tables and nothing in them: creating one takes seconds, copying it nothing."""
    shared = tmp_path_factory.getbasetemp().parent  # of all workers
    path = shared / "empty-mlflow.db"
    with filelock.FileLock(shared / "empty-mlflow.lock"):
        if not path.exists():
            from mlflow import MlflowClient

            MlflowClient(f"sqlite:///{path}.part").search_experiments()
            Path(f"{path}.part").rename(path)
    return path


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    return made_once(tmp_path_factory)


@pytest.fixture(scope="session", autouse=True)
def _new_stores_are_copies(tmp_path_factory):
    """New stores of this process have their tables already; how they are made is seen in tests/faults/test_new_store,
    in processes of their own.
    """

    def create(database, fill):
        def fill_copy(uri):
            shutil.copy(made_once(tmp_path_factory), store.database_of(uri))
            fill(uri)

        original(database, fill_copy)

    original = store._create
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_create", create)
        yield


@pytest.fixture(scope="session", autouse=True)
def _nobody_waits_for_the_disk():
    """What is written is there for all processes at once, and after any kill; only a machine that stops loses it."""
    from sqlalchemy import Engine, event

    def hurry(connection, record):
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", hurry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
    event.remove(Engine, "connect", hurry)


@pytest.fixture(scope="session", autouse=True)
def _pictures_are_drawn_once():
    """The two of a run take longer than all else of a small one: those of the first of its kind stand for others'."""
    drawn = {}

    def write(config, counts, history, folder, pictures):
        kind = config.names["method"], config.names["data"], len(history)
        if pictures and kind in drawn:
            made = original(config, counts, history, folder, pictures=False)
            for name, content in drawn[kind].items():
                (folder / name).write_bytes(content)
            return [*made, *(folder / name for name in drawn[kind])]
        made = original(config, counts, history, folder, pictures)
        if pictures:
            drawn[kind] = {path.name: path.read_bytes() for path in made if path.suffix == ".png"}
        return made

    original = files.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", write)
        yield


@pytest.fixture
def out(tmp_path, empty_store, monkeypatch):
    """A folder for runs with an empty store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "runs"
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder
