"""Disks that are full, and folders that can only be read."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from fl_lightning import experiment
from fl_lightning.__main__ import main
from fl_lightning.engines.parallel import ray_session
from fl_lightning.errors import UserError
from fl_lightning.runs import files
from fl_lightning.runs.config.run_config import configure
from tests.support.clusters import Driver
from tests.support.servers import free_port, wait_for
from tests.support.workers import SETTINGS

pytestmark = pytest.mark.system


MEGABYTE = 1_000_000


@pytest.fixture
def disk(tmp_path, empty_store, monkeypatch):
    """A small file system of its own, with an empty store; it can be mounted again with other options."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if mount is None or os.getuid() or subprocess.run([mount, *options], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        shutil.copy(empty_store, folder / "mlflow.db")
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk):
    with open(disk / "filler", "wb", buffering=0) as filler:
        for size in (MEGABYTE, 4096, 1):
            try:
                while filler.write(b"x" * size) == size:
                    pass
            except OSError:
                pass


@pytest.mark.parametrize("moment", ["rounds_table", "clients_table"])
def test_a_full_disk_while_tables_are_written(disk, monkeypatch, moment):
    config = configure(SETTINGS)
    original = getattr(files, moment)

    def table(history):
        fill(disk)
        return original(history)

    with monkeypatch.context() as patch:
        patch.setattr(files, moment, table)
        with pytest.raises(UserError, match=r"cannot write .*\.parquet: No space left on device; earlier rounds are"):
            experiment.run(config, disk)
    assert not list(disk.rglob("*.part"))
    (disk / "filler").unlink()
    result = experiment.run(config, disk)
    assert (result.status, len(result.history)) == ("finished", 2)


FILLING = '''
import os
from fl_lightning.methods.fedavg import FedAvg


class Filling(FedAvg):
    """FedAvg that fills a disk."""

    def aggregate(self, state, cohort, reports):
        if cohort.round == 2 and os.path.exists(os.environ["FULL"]):
            with open(os.environ["FULL"], "ab", buffering=0) as file:
                for size in (10**6, 4096, 1):
                    try:
                        while file.write(bytes(size)) == size:
                            pass
                    except OSError:
                        pass
        return super().aggregate(state, cohort, reports)
'''


# By the run whose round cannot be saved, or by Ray, whose notes lie on the same disk: who writes first is chance.
FULL = ("No space left on device; earlier rounds are safe", "make room there; the same command goes on")


def test_a_disk_that_fills_ends_a_sweep_in_one_line(disk, tmp_path, empty_store):
    """Each of its runs would fail, be tried again, and leave a temporary folder; Ray's own files would not be whole.

    The store lies elsewhere: whether it would warn, too, depends on what SQLite writes at that moment.
    """
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    (tmp_path / "filling.py").write_text(FILLING)
    full, study = disk / "full", tmp_path / "mine.yaml"
    study.write_text(json.dumps({"base": SETTINGS, "cases": ["filling"], "seeds": 4}))
    full.touch()
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    variables = {"FL_LIGHTNING_PLUGINS": str(tmp_path), "FULL": str(full), "MLFLOW_TRACKING_URI": store}
    for code in (2, 0):
        driver = Driver(disk, str(study), "--max-concurrent", "1", **variables)
        try:
            assert driver.wait() == code, driver.errors
            assert os.listdir(driver.temporary) == []
        finally:
            driver.end()
        if code:
            (line,) = driver.errors.splitlines()
            assert line.endswith(FULL)
            full.unlink()
    assert (driver.summary["runs"], driver.summary["failures"]) == (4, {})


def test_a_full_folder_for_temporary_files_is_named(disk, monkeypatch):
    """Before Ray starts, which would wait for a minute, and blame the cluster or the folder of runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    fill(disk)
    expected = rf"expected 20 MB for temporary files in {disk}, got 0\.0 MB; make room there, or set TMPDIR"
    with pytest.raises(UserError, match=expected), ray_session.session():
        pass
    assert not list(disk.glob(f"{ray_session.PREFIX}*"))


def test_a_folder_that_can_only_be_read_is_shown(disk, tmp_path, capsys):
    flags = [f"--{key}={value}" for key, value in SETTINGS.items()]
    command = [sys.executable, "-m", "fl_lightning", "run", *flags, "--runs", str(disk), "--quiet"]
    subprocess.run(command, check=True)  # a process of its own, so that nobody holds the database open
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert main(["run", *flags, "--runs", str(disk), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["round"] == 2
    assert main(["report", "--runs", str(disk), "--out", str(tmp_path / "report"), "--quiet"]) == 0
    assert (tmp_path / "report" / "index.html").exists()
    port = free_port()
    show = [sys.executable, "-m", "fl_lightning", "ui", "--runs", str(disk), "--port", str(port)]
    with subprocess.Popen(show, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as ui:
        try:
            assert wait_for(f"http://127.0.0.1:{port}/health") == "OK"
            question = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/get-by-name?experiment_name=fl_lightning"
            assert json.loads(wait_for(question))["experiment"]["name"] == "fl_lightning"
        finally:
            os.killpg(ui.pid, signal.SIGKILL)
