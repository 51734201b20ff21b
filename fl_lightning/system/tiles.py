"""Processors that announce matrix tiles (AMX) which they cannot use.

Virtual machines may hand down the announcement without what belongs to it; the first product of bfloat16 numbers then
ends the process with SIGILL, without a word. oneDNN can be told to do without tiles, but only before it computes for
the first time in a process.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from fl_lightning.system import activity

CPUS = Path("/proc/cpuinfo")
VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_TILES = "AVX512_CORE_FP16"  # oneDNN's name for all that comes before them
PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); (x @ x).sum().item()"


@cache
def avoid_broken() -> None:
    """Let oneDNN do without tiles, here and in processes that start later, if a trial in another process dies of them.

    Where somebody has set the variable already, or no tiles are announced, nothing is tried.
    """
    if VARIABLE not in os.environ and _announced() and not _survives(PRODUCT):
        os.environ[VARIABLE] = WITHOUT_TILES
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
