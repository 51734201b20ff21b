"""Settings for all tests."""

import functools
import gc
import importlib
import inspect
import os
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import filelock
import pytest

from fl_lightning.system import tiles

os.environ["OMP_NUM_THREADS"] = "1"  # several workers share few cores; inherited by the processes that tests start
tiles.avoid_broken()  # before anything is computed in this process, or in those that it starts
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# What most tests import. xdist's workers do it at once, before lines are counted, which makes imports take twice as
# long; their controller imports nothing of it: the workers start after it.
LIBRARIES = (
    "hypothesis.strategies",  # first, since it looks for garbage
    "fl_lightning",  # before Lightning: it mends torchvision beside a CPU-only torch
    "torch",
    "pytorch_lightning",
    "matplotlib.backends.backend_agg",
    "mlflow.store.tracking.sqlalchemy_store",
    "pandas",
    "pyarrow.parquet",
    "ray.tune",
    "scipy.signal",
    "sklearn.datasets",
)
if IS_WORKER:
    gc.disable()  # the collection makes a million objects, and no garbage: to look for it takes seconds, every time
    for library in LIBRARIES:
        importlib.import_module(library)

LARGE_STORE = "smoke_store"
# Whole programs and studies, as a user has them: processes, clusters, servers, browsers, notebooks, reports. The store
# of all studies takes a minute to fill, which is spent once, where notebooks and browsers look at it.
SYSTEM_MODULES = {"multiprocessing", "nbclient", "ray", "selenium", "subprocess"}
SYSTEM_HELPERS = {"tests.processes", "tests.servers", "tests.tune.clusters"}
SYSTEM_FIXTURES = {"ray_here", LARGE_STORE}
SYSTEM_FOLDER = "tests/faults/"  # what is slow in it
# What takes seconds, too: the store of runs.
SLOW_FIXTURES = {"empty_store"}
COUNTED_CASES = 2
# All tests of a folder have one Ray; the many of a file have nothing in common.
SHARED_CLUSTER = "tests/workers/"
APART = {"tests/test_golden.py", "tests/faults/test_kill.py"}
# Those of one method are compared with the same runs.
BY_METHOD = "tests/methods/test_contract.py"


def pytest_collection_finish():
    """Garbage is what tests make; it is looked for now and then, and not among what was there before."""
    if IS_WORKER:
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)
        gc.enable()


def pytest_collection_modifyitems(items):
    """Mark tests by what they use, beside those that say it themselves, as those of the whole system and as slow.

    `make system` runs the former, `make test` all others, and counts lines in a few cases of those that are not slow,
    which `make quick` runs alone.

    In xdist's workers slow ones come first: the many that take no time fill up the end, where nobody shall wait. Of
    those that look at the store that takes longest to fill, one file comes first, and the others when it is there.
    """
    times = Counter()
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & SLOW_FIXTURES:
            item.add_marker(pytest.mark.slow)
        is_slow_fault = item.nodeid.startswith(SYSTEM_FOLDER) and item.get_closest_marker("slow")
        if starts_programs(getattr(item, "module", None)) or fixtures & SYSTEM_FIXTURES or is_slow_fault:
            item.add_marker(pytest.mark.system)
        if item.get_closest_marker("system"):
            item.add_marker(pytest.mark.slow)
        function = item.nodeid.partition("[")[0]
        times[function] += 1
        # Counting lines takes half as long again: those of slow tests are mostly of libraries, and the many cases of
        # one test run the same ones.
        if item.get_closest_marker("slow") or times[function] > COUNTED_CASES:
            item.add_marker(pytest.mark.no_cover)
    if IS_WORKER:
        items.sort(key=turn_of(items))


@functools.cache
def starts_programs(module):
    """Whether a file of tests imports what starts whole programs."""
    values = vars(module or object).values()
    uses = {getattr(value, "__name__", "").partition(".")[0] for value in values if inspect.ismodule(value)}
    helpers = {getattr(value, "__module__", None) for value in values}
    return bool(uses & SYSTEM_MODULES or helpers & SYSTEM_HELPERS)


def turn_of(items):
    """How early a test shall come."""
    look = {item: LARGE_STORE in getattr(item, "fixturenames", ()) for item in items}
    first = next((item.path for item in items if look[item]), None)

    def turn(item):
        if look[item]:
            return 0 if item.path == first else 2
        return 1 if item.get_closest_marker("slow") else 3

    return turn


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Lines are not counted in what is set up for slow tests either; pytest-cov itself leaves out the test alone."""
    plugin = item.config.pluginmanager.getplugin("_cov")
    counting = plugin and plugin.cov_controller
    if not counting or item.get_closest_marker("no_cover") is None:
        return (yield)
    counting.pause()
    try:
        return (yield)
    finally:
        if not counting.started:  # since no test was run
            counting.resume()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file stay together in one of xdist's workers, since they share clusters, servers and stores."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            if file.startswith(SHARED_CLUSTER):
                return SHARED_CLUSTER
            if file == BY_METHOD:
                return nodeid.partition(": ")[0]
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
    from fl_lightning.runs import store

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
    from fl_lightning.runs import files

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
