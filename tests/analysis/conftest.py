"""A store with the runs of the smoke studies, made once for all tests, in one process and without Ray."""

import os
import shutil
from contextlib import suppress

import filelock
import pytest

from fl_lightning import experiment
from fl_lightning.runs.config.run_config import configure
from tests.support.small_studies import STUDIES, TINY, new_store, sweep_here


@pytest.fixture(scope="session")
def smoke_store(tmp_path_factory, empty_store):
    """The folder of runs; nobody may write to it.

    Nobody keeps it open either: whoever copies the files of an open database loses its locks on them, and the next
    process that opens it may cut short what the first one has mapped.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # of all workers, but of this session alone
    out = shared / "smoke-runs"
    with pytest.MonkeyPatch.context() as session:
        session.setenv("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
        with filelock.FileLock(shared / "smoke-runs.lock"), pytest.MonkeyPatch.context() as patch:
            patch.delenv("MLFLOW_TRACKING_URI", raising=False)
            if not (out / "done").exists():
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
                shutil.copy(empty_store, out / "mlflow.db")
                for name in STUDIES:
                    sweep_here(name, out, patch)
                (out / "done").touch()
        yield out


@pytest.fixture(scope="session")
def odd_store(tmp_path_factory, empty_store):
    """Runs without a study: finished, diverged, stopped, begun, and repeated with --fresh."""
    with new_store(tmp_path_factory.mktemp("odd"), empty_store) as out:
        for seed in (0, 1):
            for method in ("fedavg", "fola"):
                experiment.run(configure({**TINY, "method": method, "seed": seed}), out)
        experiment.run(configure({**TINY, "method": "fola", "method.curvature": "offline"}), out)
        experiment.run(configure({**TINY, "method": "fola", "seed": 1}), out, fresh=True)
        experiment.run(configure({**TINY, "method": "fedavg", "training.lr": 1e20, "seed": 2}), out)
        stopped = experiment.rounds(configure({**TINY, "method": "fedavg", "seed": 3}), out)
        next(stopped)
        stopped.close()
        failed = experiment.rounds(configure({**TINY, "method": "fola", "seed": 4}), out)
        next(failed)
        with suppress(RuntimeError):
            failed.throw(RuntimeError("a bug"))
    return out
