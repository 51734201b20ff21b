"""A pytest process of its own on the simulated device: a device that is registered stays so until the process ends."""

import os
import subprocess
import sys
from pathlib import Path

FILES = sorted(str(path) for path in Path(__file__).parent.glob("on_device_*.py"))
ROOT = Path(__file__).parents[2]


def on_the_device():
    """Run the files' tests; the end of what pytest says, and whether all have passed."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.device.simulated", "-p", "no:cacheprovider"]
    alone = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    done = subprocess.run([*command, *FILES], cwd=ROOT, env=alone, capture_output=True, text=True)
    return (done.stdout + done.stderr)[-6000:], done.returncode == 0
