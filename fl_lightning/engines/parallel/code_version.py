"""The code of a process: workers with other code would compute other numbers unnoticed."""

import hashlib
import socket
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch

import fl_lightning
from fl_lightning.errors import require


class Code(NamedTuple):
    """The versions of this package and of torch, and a hash of the package's files: a version has many states."""

    version: str
    files: str
    torch: str

    @classmethod
    def here(cls) -> "Code":
        """What this process computes with."""
        return cls(version("fl_lightning"), _files(), str(torch.__version__))

    def check(self) -> None:
        """Refuse to compute with anything else."""
        here = Code.here()
        require(
            here == self,
            f"expected {self} on {socket.gethostname()}, as where the run was started, got {here}; install the same "
            "on all nodes (docs/scaling.md)",
        )

    def __str__(self) -> str:
        return f"fl_lightning {self.version} (files {self.files}) and torch {self.torch}"


@cache
def _files() -> str:
    """A hash of the package's source, wherever it lies."""
    digest = hashlib.sha256()
    for root in map(Path, fl_lightning.__path__):
        for path in sorted(root.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:8]
