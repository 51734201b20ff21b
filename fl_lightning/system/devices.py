"""The devices of this machine, whichever maker's they are: what torch says of its accelerator."""

import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from fl_lightning.errors import UserError, require
from fl_lightning.system import activity

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


def given(share: float) -> torch.device:
    """The accelerator of which Ray has given this process a part, and shows no other by CUDA_VISIBLE_DEVICES.

    The process is held to that part of its memory where torch can: Ray counts parts, but checks none.
    """
    device = accelerator()
    if device is None:
        raise UserError(
            f"a process on {socket.gethostname()} was given GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}, but torch "
            "sees none there; install a CUDA build of torch, or leave out --resources.gpu"
        )
    hold_to(share)
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
    known = capacity(device)
    return None if known is None else min(known, int(torch.get_device_module(device).mem_get_info(device)[0]))


def capacity(device: torch.device) -> int | None:
    """Bytes of an accelerator that this process may have, whatever is free just now; None where torch does not say."""
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    share = getattr(module, "get_per_process_memory_fraction", lambda device: 1.0)(device)
    return int(share * module.mem_get_info(device)[1])


def product_name(device: torch.device) -> str:
    """What the maker calls an accelerator."""
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if ask is None else str(ask(device))


# What is asked and set so that processors without working matrix tiles (AMX) do not use them.
CPUS = Path("/proc/cpuinfo")
TILES_VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_TILES = "AVX512_CORE_FP16"  # oneDNN's name for all that comes before them
PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); (x @ x).sum().item()"


@cache
def avoid_broken_tiles() -> None:
    """Let oneDNN do without matrix tiles (AMX), here and in later processes, where a trial dies of them.

    Virtual machines may announce tiles without what belongs to them. The first product of bfloat16 numbers then ends
    the process with SIGILL, without a word. oneDNN can do without, but must know before its first product.

    Where the user has set the variable, or no tiles are announced, nothing is tried.
    """
    if TILES_VARIABLE not in os.environ and _announced() and not _survives(PRODUCT):
        os.environ[TILES_VARIABLE] = WITHOUT_TILES
        activity.note("this CPU announces matrix tiles (AMX) but cannot use them; bfloat16 is computed without them")


def _announced() -> bool:
    try:
        return "amx_tile" in CPUS.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no Linux
        return False


def _survives(program: str) -> bool:
    """Whether Python runs it to its end, and is not killed; a program that fails in other ways has survived."""
    quiet = subprocess.DEVNULL
    return subprocess.run([sys.executable, "-c", program], stdout=quiet, stderr=quiet, check=False).returncode >= 0
