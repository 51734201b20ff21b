"""Remedies for the environment, applied once when the package is imported."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

# The declarations of operators last as long as their library object.
_kept_alive: list[Any] = []


class _MendTorchvision(MetaPathFinder):
    """Finds nothing; but when torchvision is imported, its operators are declared first."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_torchvision_operators()


def repair_torchvision_when_imported() -> None:
    """Declare the operators of torchvision when it is imported: until then, commands need not wait for torch."""
    if "torchvision" not in sys.modules and not any(isinstance(one, _MendTorchvision) for one in sys.meta_path):
        sys.meta_path.insert(0, _MendTorchvision())


def declare_torchvision_operators() -> None:
    """Make `import torchvision` work beside a CPU-only torch.

    torchvision's Linux wheel on PyPI is linked against CUDA. Where its C++ operators cannot load, importing it fails
    with "operator torchvision::nms does not exist", and so does importing Lightning, whose torchmetrics imports
    torchvision. We use only datasets and transforms, which need no such operator, so a declaration without an
    implementation is enough. Where the operators do load, nothing is declared.
    """
    import torch

    if _kept_alive or torch.version.cuda is not None or _operators_load():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)  # type: ignore[no-untyped-call]
    _kept_alive.append(library)


def silence_telemetry() -> None:
    """Nothing leaves the machine: the opt-outs of MLflow and Ray, set before either is imported."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def keep_servers_lean() -> None:
    """No workers beside the MLflow UI: it starts several for jobs on language models, which it has none of here."""
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")


def _operators_load() -> bool:
    import torch

    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return True  # nothing to repair
    for extension in Path(found.origin).parent.glob("_C.*"):
        try:
            torch.ops.load_library(extension)  # type: ignore[no-untyped-call]
        except OSError:
            return False
    return hasattr(torch.ops.torchvision, "nms")
