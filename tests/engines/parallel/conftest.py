"""One small Ray cluster and a few long-lived workers for all tests of this folder."""

import copy
import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from fl_lightning.engines.parallel.pool import Pool
from fl_lightning.engines.parallel.ray_cluster import Resources
from tests.support.clusters import ENVIRONMENT


@pytest.fixture(scope="package")
def ray_here():
    """Ray on this machine with three CPUs, and two GPUs that are none."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, for the sockets in it
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        import ray

        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.CRITICAL}
        ray.init(num_cpus=3, num_gpus=2, _temp_dir=folder, object_store_memory=200_000_000, **quiet)
        try:
            yield ray
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def three(ray_here):
    """Three workers."""
    pool = Pool(3, Resources(cpu=0.5))
    yield pool
    pool.close()


@pytest.fixture(scope="package")
def two(three):
    """Two of the three."""
    pool = copy.copy(three)
    pool._actors, pool._calls, pool.number = three._actors[:2], {}, 2
    return pool


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """A folder of plug-ins."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.setenv("FL_LIGHTNING_PLUGINS", str(folder))
    return Path(os.fspath(folder))
