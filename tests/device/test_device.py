"""Everything on a device that is not the CPU: see `simulated.py`, and the files `on_device_*.py`."""

import pytest

from tests.device import simulated
from tests.device.process import on_the_device

pytestmark = [
    pytest.mark.system,  # a process of its own, and the first one compiles the device
    pytest.mark.skipif(bool(simulated.missing()), reason=simulated.missing()),
]


def test_on_a_simulated_device():
    said, passed = on_the_device()
    assert passed, said
