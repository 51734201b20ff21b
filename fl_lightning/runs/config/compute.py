"""The network that clients train, as the settings name it, and where and in which precision it computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fl_lightning.errors import UserError, require
from fl_lightning.models.tuning import Lora, Tuning
from fl_lightning.system import devices


@dataclass(frozen=True)
class Compute:
    """Where and in which precision to compute.

    Attributes:
        device: auto takes a GPU if there is one; otherwise cpu, cuda, cuda:1 or another device that torch knows.
        precision: Floating point type of parameters and inputs; the mixed ones keep them in float32 and compute the
            network in shorter numbers while it trains, 16-mixed on a GPU alone.
        threads: CPU threads of torch; more than 1 may change the last bits from machine to machine.
        tf32: Whether a GPU rounds the factors of float32 products to TF32, 10 bits instead of 23: faster, but then the
            CPU, vmap and the plain loop agree to about 1e-3 only.
        keep_features: Compute features of the frozen network once and reuse them; numbers are the same up to rounding.
    """

    device: str = "auto"
    precision: Literal["float32", "float64", "bf16-mixed", "16-mixed"] = "float32"
    threads: int = 1
    tf32: bool = False
    keep_features: bool = True

    def __post_init__(self) -> None:
        require(self.threads >= 1, f"compute.threads must be at least 1, got {self.threads}")

    def apply(self) -> None:
        """What torch knows for the whole process: threads, and TF32 in products and convolutions."""
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters, gradients, curvature and sums."""
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def mixed(self) -> torch.dtype | None:
        """Of what the network computes while it trains, if that is another type."""
        require(
            self.precision != "16-mixed" or self.torch_device.type != "cpu",
            "compute.precision 16-mixed is for a GPU, got compute.device cpu; use --compute.precision bf16-mixed",
        )
        require(
            not self.precision.endswith("mixed") or torch.amp.is_autocast_available(self.torch_device.type),
            f"compute.precision {self.precision} is not there on {self.torch_device}; use --compute.precision float32",
        )
        if self.precision == "bf16-mixed" and self.torch_device.type == "cpu":
            devices.avoid_broken_tiles()
        return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.precision)

    @property
    def unmixed(self) -> Literal["float32", "float64"]:
        """The precision of parameters, in which models are evaluated."""
        return "float64" if self.precision == "float64" else "float32"

    @property
    def is_here(self) -> bool:
        """Whether this machine has the device and, on it, the precision."""
        try:
            _ = self.mixed, self.torch_device
        except UserError:
            return False
        return True

    @property
    def torch_device(self) -> torch.device:
        """The device, or an error if this machine has none such."""
        return devices.named(self.device)


@dataclass(frozen=True)
class Model:
    """A discovered model with its own settings; shape and classes follow the data."""

    name: str = "mlp"
    options: Mapping[str, Any] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=Tuning)
    lora: Lora = field(default_factory=Lora)
