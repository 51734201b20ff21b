"""The devices of this machine, whichever maker's they are: what torch says of its accelerator."""

from types import ModuleType

import torch

from fl_lightning.errors import UserError, require

# Sums over clients are formed in float64, which these lack.
WITHOUT_FLOAT64 = frozenset({"mps"})


def accelerator() -> torch.device | None:
    """The accelerator of this machine; None where torch sees none that has float64."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None or device.type in WITHOUT_FLOAT64 else device


def count() -> int:
    """How many accelerators this process sees."""
    return 0 if accelerator() is None else torch.accelerator.device_count()


def named(name: str) -> torch.device:
    """The device that `compute.device` names; auto is the accelerator if there is one.

    Raises:
        UserError: If this machine has none such.
    """
    if name == "auto":
        return accelerator() or torch.device("cpu")
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
    except RuntimeError:
        raise UserError(
            f"compute.device must be auto, cpu, cuda, cuda:1 or another device that torch knows, got {name!r}"
        ) from None
    number = module.device_count() if module.is_available() else 0
    remedy = "use --compute.device cpu"
    require(number > 0, f"compute.device is {name!r}, but torch sees no {words(device)} here; {remedy}")
    require(
        (device.index or 0) < number,
        f"compute.device is {name!r}, but torch sees only {', '.join(f'{device.type}:{i}' for i in range(number))} "
        f"here; use --compute.device {device.type}:{number - 1}",
    )
    require(
        device.type not in WITHOUT_FLOAT64,
        f"compute.device is {name!r}, which lacks float64, the type of all sums over clients; {remedy}",
    )
    return device


def words(device: torch.device) -> str:
    """What a device is called in a message."""
    return "GPU" if device.type == "cuda" else f"device of type {device.type}"


def in_use() -> ModuleType | None:
    """Torch's module of the accelerator, once this process has computed on it; asking for more would start CUDA."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    started = getattr(module, "is_initialized", module.is_available)
    return module if started() else None


def hold_to(share: float) -> None:
    """Hold this process to a part of its accelerator's memory, where torch can: Ray counts parts, but checks none."""
    limit = getattr(torch.get_device_module(accelerator() or "cpu"), "set_per_process_memory_fraction", None)
    if limit is not None:
        limit(min(share, 1.0))


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on an accelerator for this process; None where torch does not say."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free, total = module.mem_get_info(device)
    share = getattr(module, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    return int(min(free, share * total))


def product_name(device: torch.device) -> str:
    """What the maker calls an accelerator."""
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if ask is None else str(ask(device))
