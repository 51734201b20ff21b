"""A plug-in that raises, leaves or crashes fails alone: the sweep goes on, and names the case."""

import pytest
import yaml

from tests.support.clusters import Driver
from tests.support.processes import fl_lightning

pytestmark = pytest.mark.system


PLUGIN = '''
"""FedAvg with a fault."""

import ctypes
import sys
from dataclasses import dataclass

from fl_lightning.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Faulty(FedAvg):
    """FedAvg that does not get far.

    Attributes:
        fault: What it does.
    """

    fault: str = "none"

    def aggregate(self, state, cohort, reports):
        if self.fault == "raises":
            raise RuntimeError("the plug-in is broken")
        if self.fault == "leaves":
            sys.exit(0)
        if self.fault == "crashes":
            ctypes.string_at(0)
        return super().aggregate(state, cohort, reports)
'''
STUDY = {
    "base": {
        "data": "digits",
        "data.subset": 0.2,
        "data.clients": 3,
        "model": "softmax",
        "federation.rounds": 1,
        "engine": "functional",
        "engine.chunk": 1,
    },
    "cases": [
        "fedavg",
        *({"label": f"It {one}", "method": "faulty", "method.fault": one} for one in ("raises", "leaves")),
    ],
    "seeds": 12,  # so many that runs share a trial, for which their time is measured
}


@pytest.fixture
def plugins(tmp_path):
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "faulty.py").write_text(PLUGIN)
    return str(folder)


def write(folder, **changes):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}))
    return str(path)


def swept(out, study, plugins):
    driver = Driver(out, study, FL_LIGHTNING_PLUGINS=plugins)
    try:
        assert driver.wait() == 1, driver.errors
    finally:
        driver.end()
    return driver.summary


def test_what_a_plug_in_raises_fails_alone_with_its_case(out, tmp_path, plugins):
    summary = swept(out, write(tmp_path), plugins)
    assert summary["runs"] == 12
    reasons = {name.partition(" (")[0]: reason for name, reason in summary["failures"].items()}
    words = {"raises": "RuntimeError: the plug-in is broken", "leaves": "SystemExit: 0"}
    assert reasons.keys() == {f"It {fault} seed {seed}" for fault in words for seed in range(12)}
    for name, reason in reasons.items():
        assert reason.endswith(f"in Faulty.aggregate: {words[name.split()[1]]}; fix the plug-in")


def test_a_crash_fails_alone_after_two_tries(out, tmp_path, plugins):
    """The seeds of FedAvg and of what crashes share their trial, and their first round."""
    cases = ["fedavg", {"label": "Mine", "method": "faulty", "method.fault": "crashes"}]
    summary = swept(out, write(tmp_path, cases=cases, seeds=1), plugins)
    assert summary["runs"] == 1
    ((name, reason),) = summary["failures"].items()
    assert name.startswith("Mine seed 0 (")
    assert reason.startswith("its process died 2 times (a segmentation fault of a plug-in, ")


def test_a_dry_run_names_what_cannot_be_measured(out, tmp_path, plugins):
    for fault, words in {"raises": "RuntimeError: the plug-in is broken", "leaves": "SystemExit: 0"}.items():
        study = write(tmp_path, cases=[{"label": "Mine", "method": "faulty", "method.fault": fault}])
        done = fl_lightning("sweep", study, "--dry-run", "--runs", out, FL_LIGHTNING_PLUGINS=plugins)
        assert done.returncode == 1
        assert done.stderr.endswith(f"in Faulty.aggregate: {words}; fix the plug-in\n")
        assert "Traceback" not in done.stderr
