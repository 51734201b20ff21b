"""Sweeps of small studies in this process, without Ray, into a folder of their own."""

import shutil
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

STUDIES = (
    "demo",
    "mnist_first_round",
    "mnist_curves",
    "cifar_epochs",
    "cifar_heterogeneity",
    "cifar_table",
    "ablation_prior",
    "ablation_online_offline",
    "laplace",
    "ae_lf",
    "calibration",
    "structured",
    "personal",
)
TINY = {
    "data": "digits",
    "data.clients": 4,
    "model.hidden": [8],
    "engine": "functional",
    "federation.rounds": 3,
    "training.epochs": 1,
}


@contextmanager
def new_store(folder, empty_store):
    """A folder for runs, which is where they go in this block."""
    out = folder / "runs"
    out.mkdir()
    shutil.copy(empty_store, out / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield out


def sweep_here(study, out, patch):
    """What `fl-lightning sweep` does, in this process instead of a cluster; a name stands for a study at smoke."""
    from tune.study_file import load
    from tune.sweep import Options, sweep

    without_ray(patch)
    outcome = sweep(load(study, "smoke") if isinstance(study, str) else study, Options(out), lambda _: None)
    assert not outcome.failures
    return outcome


def without_ray(patch):
    """Sweeps compute in this process, and measure there; a task of Ray would start a cluster that outlives the test."""
    from tune.estimate import measure_here
    from tune.work import one_after_the_other

    def fit(runner, space, instructions, count, work):
        for pack in work:
            for status in one_after_the_other(pack, instructions):
                assert not status.failures
        return []

    patch.setattr("tune.sweep._Runner._fit", fit)
    patch.setattr("tune.sweep._ray", lambda: SimpleNamespace(grid_search=list))
    patch.setattr("tune.sweep.connected", lambda *_: nullcontext(1))
    patch.setattr("tune.sweep.measure_apart", lambda *_: measure_here)
