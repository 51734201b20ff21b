"""Everything on a device that is not the CPU: see `simulated.py`, and the files `on_device_*.py`."""

import pytest

from tests.device import simulated
from tests.device.process import on_the_device

pytestmark = pytest.mark.skipif(bool(simulated.missing()), reason=simulated.missing())


@pytest.mark.slow
def test_on_a_simulated_device():
    said, passed = on_the_device("not system")
    assert passed, said


@pytest.mark.system
def test_the_rest_on_a_simulated_device():
    said, passed = on_the_device("system")
    assert passed, said
