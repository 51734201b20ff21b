"""The host waits for the device a few times per client and round, and never in a step: exact numbers.

docs/scaling.md has them in a table.
"""

import pytest

from tests.device.waits import ENGINES, METHODS, cost

# Of a round of four clients, and what one more client adds. Steps and tensors add nothing.
TRAINING = {
    "FedAvg": {"loop": (9, 2), "vmap": (7, 1), "lightning": (9, 2)},
    "FedProx": {"loop": (13, 3), "vmap": (11, 2), "lightning": (13, 3)},
    "SCAFFOLD": {"loop": (13, 3), "vmap": (11, 2), "lightning": (13, 3)},
    "FOLA": {"loop": (14, 3), "vmap": (12, 2), "lightning": (14, 3)},
}
MEASURING = {"FedAvg": (4, 0), "FedProx": (4, 0), "SCAFFOLD": (5, 0), "FOLA": (13, 0)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS)
def test_waits(method, engine):
    training, measuring = cost(METHODS[method], ENGINES[engine])
    assert (training["step"], training["layer"]) == (0, 0)
    assert (measuring["step"], measuring["layer"]) == (0, 0)
    assert (training["round"], training["client"]) == TRAINING[method][engine]
    assert (measuring["round"], measuring["client"]) == MEASURING[method]
