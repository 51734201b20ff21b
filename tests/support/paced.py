"""A method that takes its time when a test says so: what a test does to a run then happens in the middle of it."""

import time
from pathlib import Path

import pytest

from tests.support.clusters import rounds_in

PLUGIN = '''
"""FOLA whose clients take half a second each, once a folder of runs holds so many rounds."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fl_lightning.methods.fola_extended import FolaExtended

UNTIL = Path(os.environ["PACE"])


@dataclass(frozen=True)
class Paced(FolaExtended):
    """Numbers of FOLA."""

    def report(self, local, context):
        with suppress(FileNotFoundError):
            mark, until, out = UNTIL.read_text().split("\\n")
            if sum(path.read_bytes().count(b"\\n") for path in Path(out).glob("*/rounds.jsonl")) >= int(until):
                UNTIL.with_name(f"{mark}-{os.getpid()}").touch()
                time.sleep(0.5)
        return super().report(local, context)
'''


class Pace:
    """When the clients of the method `paced` are slow, here and in all processes that are started from here.

    Args:
        folder: Of the plug-in, and of the files by which it and the test signal each other.
        patch: Of the environment.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        (folder / "paced.py").write_text(PLUGIN)
        self.until, self.times = folder / "until", 0
        patch.setenv("FL_LIGHTNING_PLUGINS", str(folder))
        patch.setenv("PACE", str(self.until))

    def slow_after(self, number: int, out: Path) -> None:
        """Let clients be slow when so many more rounds are saved."""
        self.times += 1
        part = self.until.with_suffix(".part")
        part.write_text(f"{self.times}\n{rounds_in(out) + number}\n{out}")
        part.replace(self.until)

    def reached(self, driver, seconds: float = 300) -> int:
        """Wait until they are; a process that computes them."""
        deadline = time.monotonic() + seconds
        while not (found := list(self.until.parent.glob(f"{self.times}-*"))):
            assert driver.process.poll() is None, driver.errors
            assert time.monotonic() < deadline, "it does not get on"
            time.sleep(0.01)
        return int(found[0].name.partition("-")[2])

    def hurry(self) -> None:
        """No client is slow any more."""
        self.until.unlink(missing_ok=True)
