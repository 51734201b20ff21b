"""How much memory there is, for settings that are refused before they run out of it."""

import os
from pathlib import Path

import torch

from fl_lightning.errors import require
from fl_lightning.system import devices

UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def available(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where the system does not say."""
    if device.type != "cpu":
        return devices.free_memory(device)
    limits = [limit for limit in (_free_of_machine(), _free_of_container()) if limit is not None]
    return min(limits) if limits else None


def require_room(what: str, needed: int, device: torch.device, remedy: str) -> None:
    """Refuse what would take more bytes than there are."""
    free = available(device)
    require(
        free is None or needed <= free,
        f"{what} would take {in_words(needed)} of memory, and {in_words(free or 0)} are free; {remedy}",
    )


def require_room_for_data(what: str, needed: int) -> None:
    """Refuse to hold so many bytes of samples where this machine has fewer left."""
    require_room(what, needed, torch.device("cpu"), "use fewer or smaller samples, or a machine with more")


def in_words(number: float) -> str:
    """A number of bytes in words.

    >>> in_words(7850**2 * 4), in_words(545810**2 * 4)
    ('246 MB', '1.2 TB')
    """
    unit = 0
    while number >= 999.5 and unit < len(UNITS) - 1:
        number /= 1000
        unit += 1
    return f"{number:.0f} {UNITS[unit]}" if number >= 10 or unit == 0 else f"{number:.1f} {UNITS[unit]}"


def _free_of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # macOS: all there is, for want of better
    except (AttributeError, OSError, ValueError):
        return None


def _free_of_container() -> int | None:
    """What the control group of this process leaves; containers are limited by it, not by the machine."""
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text(encoding="ascii")) - int(
            (folder / "memory.current").read_text(encoding="ascii")
        )
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return None
