"""Studies without runs: the paper's opening picture, computed from two Gaussian posteriors in the plane."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning.errors import require
from fl_lightning.gaussian.full import Full
from fl_lightning.gaussian.ridge import Landscape, landscape
from tune import record
from tune.picture import Picture

FORMATS = ("png", "svg", "pdf")


def draw(study: Picture, out: Path) -> tuple[Landscape, Path]:
    """Compute the landscape that a file describes, store its arrays and pictures in its folder and in MLflow."""
    scene = landscape(*_posteriors(study.draw), weight=_weight(study.draw))
    folder = out / "sweeps" / f"{study.name}-{study.scale or 'all'}-{study.identity}"
    parent = record.open_sweep(study, out, folder)
    from analysis.figures.landscape import landscape as plane  # imports matplotlib
    from analysis.figures.surface import surface

    arrays = {name: np.asarray(value) for name, value in scene._asdict().items() if name != "critical"}
    arrays["critical"] = np.array([point.place for point in scene.critical])
    np.savez_compressed(folder / "landscape.npz", allow_pickle=False, **arrays)
    paths = [folder / "landscape.npz"]
    for name, figure in (("ridge_surface", surface(scene)), ("ridge_plane", plane(scene))):
        for kind in FORMATS:
            paths.append(folder / f"{name}.{kind}")
            figure.savefig(paths[-1], dpi=200)
    parent.store(paths)
    parent.finish()
    return scene, folder


def rows(scene: Landscape) -> list[dict[str, str]]:
    """Where the points of interest lie, and how high."""
    found = [(point.kind, point.place, point.density) for point in scene.critical]
    found += [
        ("mean of the means (FedAvg)", scene.average, scene.average_density),
        ("mode of the product (FOLA)", scene.product, scene.product_density),
    ]
    return [
        {"point": name, "theta_1": f"{place[0]:.3f}", "theta_2": f"{place[1]:.3f}", "mixture density": f"{height:.4f}"}
        for name, place, height in found
    ]


def _posteriors(settings: Mapping[str, Any]) -> tuple[Full, Full]:
    means, covariances = settings.get("means"), settings.get("covariances")
    try:
        mean = torch.tensor(means, dtype=torch.float64)
        covariance = torch.tensor(covariances, dtype=torch.float64)
        good = mean.shape == (2, 2) and covariance.shape == (2, 2, 2)
    except (TypeError, ValueError):
        good = False
    require(good, f"draw needs means of 2 x 2 and covariances of 2 x 2 x 2 numbers, got {means} and {covariances}")
    symmetric = torch.equal(covariance, covariance.mT) and bool((torch.linalg.eigvalsh(covariance) > 0).all())
    require(symmetric, f"draw: covariances must be symmetric and positive definite, got {covariances}")
    precision = torch.linalg.inv(covariance)
    return Full({"theta": mean[0]}, precision[0]), Full({"theta": mean[1]}, precision[1])


def _weight(settings: Mapping[str, Any]) -> float:
    weight = settings.get("weight", 0.5)
    require(isinstance(weight, int | float) and 0 <= weight <= 1, f"draw: weight must lie in [0, 1], got {weight}")
    return float(weight)
