"""Remedies for the environment, applied once when the package is imported."""

import os
from importlib.util import find_spec
from pathlib import Path

import torch

_kept_alive: list[torch.library.Library] = []


def declare_torchvision_operators() -> None:
    """Make `import torchvision` work beside a CPU-only torch.

    torchvision's Linux wheel on PyPI is linked against CUDA. Where its C++ operators cannot load, importing it fails
    with "operator torchvision::nms does not exist", and so does importing Lightning, whose torchmetrics imports
    torchvision. We use only datasets and transforms, which need no such operator, so a declaration without an
    implementation is enough. Where the operators do load, nothing is declared.
    """
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


def _operators_load() -> bool:
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return True  # nothing to mend
    for extension in Path(found.origin).parent.glob("_C.*"):
        try:
            torch.ops.load_library(extension)  # type: ignore[no-untyped-call]
        except OSError:
            return False
    return hasattr(torch.ops.torchvision, "nms")
