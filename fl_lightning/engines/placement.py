"""Where Lightning computes: a Fabric or a Trainer on the device of the task, whichever device of torch it is."""

from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.accelerators import Accelerator
from typing_extensions import override

# Those that Lightning knows by name.
BY_NAME = frozenset({"cpu", "cuda", "mps"})


def placement(device: torch.device, strategy: Callable[[torch.device], Any]) -> dict[str, Any]:
    """The arguments of a Fabric or a Trainer that say where it computes.

    Args:
        device: Of the task.
        strategy: The `SingleDeviceStrategy` of the Fabric or the Trainer.
    """
    if device.type in BY_NAME:
        return {"accelerator": device.type, "devices": 1 if device.index is None else [device.index]}
    return {"accelerator": OneDevice(), "devices": 1, "strategy": strategy(device)}


class OneDevice(Accelerator):
    """Any other device of torch; which one it is the strategy says."""

    @override
    def setup_device(self, device: torch.device) -> None:
        """Nothing: tensors say where they are."""

    @override
    def teardown(self) -> None:
        """Nothing was set up."""

    @staticmethod
    @override
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    @override
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return []

    @staticmethod
    @override
    def auto_device_count() -> int:
        return 1

    @staticmethod
    @override
    def is_available() -> bool:
        return True

    @staticmethod
    @override
    def name() -> str:
        return "one_device"
