"""bfloat16 on processors that announce more than they can do."""

import os
import subprocess
import sys

import pytest

from fl_lightning.system import devices

pytestmark = pytest.mark.system


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not looked yet, on a machine with tiles."""
    monkeypatch.setattr(devices, "CPUS", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags: fpu amx_bf16 amx_tile\n")
    monkeypatch.setenv(devices.TILES_VARIABLE, "")
    monkeypatch.delenv(devices.TILES_VARIABLE)
    devices.avoid_broken_tiles.cache_clear()
    yield monkeypatch
    devices.avoid_broken_tiles.cache_clear()


def test_tiles_that_kill_are_not_used(fresh):
    fresh.setattr(devices, "PRODUCT", KILLED)
    devices.avoid_broken_tiles()
    assert os.environ[devices.TILES_VARIABLE] == devices.WITHOUT_TILES


def test_tiles_that_work_are_used(fresh):
    fresh.setattr(devices, "PRODUCT", "pass")
    devices.avoid_broken_tiles()
    assert devices.TILES_VARIABLE not in os.environ


@pytest.mark.parametrize("content", ["flags: fpu avx2\n", None])
def test_where_none_are_announced_nothing_is_tried(fresh, content):
    fresh.setattr(devices, "_survives", lambda program: pytest.fail("tried"))
    devices.CPUS.write_text(content) if content else devices.CPUS.unlink()
    devices.avoid_broken_tiles()
    assert devices.TILES_VARIABLE not in os.environ


def test_what_the_user_says_stands(fresh):
    fresh.setattr(devices, "_survives", lambda program: pytest.fail("tried"))
    fresh.setenv(devices.TILES_VARIABLE, "AVX2")
    devices.avoid_broken_tiles()
    assert os.environ[devices.TILES_VARIABLE] == "AVX2"


def test_a_run_in_bf16_comes_to_its_end_on_this_machine(tmp_path):
    words = "run --data.clients 2 --compute.precision bf16-mixed --compute.device cpu --federation.rounds 1"
    environment = {name: value for name, value in os.environ.items() if name != devices.TILES_VARIABLE}
    command = [sys.executable, "-m", "fl_lightning", *words.split(), "--runs", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "GA" in done.stdout
