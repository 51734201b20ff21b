"""Ctrl-C and SIGTERM: both stop the program, neither gets lost."""

import os
import signal
import subprocess
import sys

import pytest

from fl_lightning.system import interrupts
from tests.support.clusters import tracked, wait_for_rounds

pytestmark = pytest.mark.system


@pytest.fixture
def installed():
    before = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    interrupts.install()
    yield
    interrupts._installed = False
    interrupts._heard = signal.SIGINT
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_an_interrupt_that_was_swallowed_is_raised_later(installed, number):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)  # as if a garbage-collection callback had dropped it
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
    interrupts.check()  # heard: not raised again
    assert interrupts.exit_code() == 128 + number


def test_signals_are_taken_back_only_by_who_had_them(installed):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupts.restore()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
    interrupts._installed = False
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupts.restore()
    signal.raise_signal(signal.SIGTERM)  # still ignored


class Swallowing:
    """As objects are whose death Python takes note of in the middle of anything: what is raised there is dropped."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def stop_as_ray_does():
    with interrupts.insistent():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # what `ray.init` does
        dropped = Swallowing()
        del dropped


def test_a_signal_that_ray_has_taken_and_python_has_dropped_is_heard(installed, capfd):
    with pytest.raises(KeyboardInterrupt):
        stop_as_ray_does()
    assert interrupts.exit_code() == 128 + signal.SIGTERM
    assert capfd.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)  # ours again
    interrupts._pending.clear()


@pytest.mark.parametrize("engine", ["functional", "lightning"])
@pytest.mark.parametrize("number", interrupts.SIGNALS)
def test_a_stopped_run_says_so_and_is_recorded_as_killed(out, engine, number):
    settings = ["--data.clients", "5", "--model.hidden", "[8]", "--federation.rounds", "100000", "--engine", engine]
    command = [sys.executable, "-m", "fl_lightning", "run", *settings, "--runs", str(out), "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for_rounds(out, 3, process)
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert errors.strip() == "fl-lightning: stopped; finished rounds are saved, the same command goes on"
    (run,) = tracked(out)[1]
    assert run.info.status == "KILLED"
