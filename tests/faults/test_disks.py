"""Disks that are full, and folders that can only be read."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from fl_lightning import experiment
from fl_lightning.__main__ import main
from fl_lightning.config import configure
from fl_lightning.errors import UserError
from fl_lightning.runs import files
from tests.faults.workers import SETTINGS
from tests.servers import free_port, wait_for

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


def test_a_folder_that_can_only_be_read_is_shown(disk, tmp_path, capsys):
    flags = [f"--{key}={value}" for key, value in SETTINGS.items()]
    command = [sys.executable, "-m", "fl_lightning", "run", *flags, "--out", str(disk), "--quiet"]
    subprocess.run(command, check=True)  # a process of its own, so that nobody holds the database open
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert main(["run", *flags, "--out", str(disk), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["round"] == 2
    assert main(["report", "--runs", str(disk), "--out", str(tmp_path / "report"), "--quiet"]) == 0
    assert (tmp_path / "report" / "index.html").exists()
    port = free_port()
    show = [sys.executable, "-m", "fl_lightning", "ui", "--out", str(disk), "--port", str(port)]
    with subprocess.Popen(show, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as ui:
        try:
            assert wait_for(f"http://127.0.0.1:{port}/health") == "OK"
            question = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/get-by-name?experiment_name=fl_lightning"
            assert json.loads(wait_for(question))["experiment"]["name"] == "fl_lightning"
        finally:
            os.killpg(ui.pid, signal.SIGKILL)
