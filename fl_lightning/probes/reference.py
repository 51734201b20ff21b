"""A saved run as the global posterior N(mu*, Lambda*^-1), and the distance of other models from it.

    D(theta) = 1/2 (theta - mu*)^T Lambda* (theta - mu*)
    AE = D(theta_S), the aggregation error of the server's model after a round
    LF = sum_n p_n D(theta_n), the local forgetting of the clients' models before it is aggregated

D is the negative log-density without its constant. mu* is the final model of the reference run. Lambda* is the
curvature of the pooled training data at mu* (`pooled_hessian`: no matrix is formed; for softmax regression D is half
the mean variance of the logits' shift under the predictions), or the precision that the run kept (`run`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fl_lightning.curvature import gauss_newton
from fl_lightning.curvature.form import MATRIX
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.plan import SERVER, ClientData
from fl_lightning.errors import require
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.form import Gaussian
from fl_lightning.gaussian.full import Full
from fl_lightning.params import Params, zip_map
from fl_lightning.probes.settings import Probe
from fl_lightning.runs import checkpoint
from fl_lightning.task import Task, Weights


class Reference(Protocol):
    """A global posterior."""

    def distances(self, models: Sequence[Params]) -> list[float]:
        """D of several models."""


@dataclass(frozen=True)
class Pooled:
    """Curvature of the pooled data at the reference model, as an operator.

    Attributes:
        task: Model and likelihood.
        weights: mu*.
        data: The training samples of all clients.
    """

    task: Task
    weights: Weights
    data: ClientData

    def distances(self, models: Sequence[Params]) -> list[float]:
        offsets = [zip_map(torch.sub, model, self.weights.params) for model in models]
        return [q / 2 for q in gauss_newton.quadratics(self.task, self.weights, self.data.blocks(), offsets)]


@dataclass(frozen=True)
class Kept:
    """The posterior that a run has kept itself."""

    posterior: Gaussian

    def distances(self, models: Sequence[Params]) -> list[float]:
        return [float(self.posterior.distance(model)) for model in models]


def load(settings: Probe, task: Task, dataset: Dataset, clients: Sequence[Tensor]) -> Reference | None:
    """The reference that the settings name, or None if they name none.

    Args:
        settings: Which run, and which precision.
        task: The model of the run that is to be measured.
        dataset: Its data.
        clients: Whose training samples are pooled.

    Raises:
        UserError: If there is no such run, or it is of another model or data.
    """
    if settings.reference is None:
        return None
    weights, state = saved_weights("probe.reference", settings.reference, task)
    if settings.reference_precision == "run":
        return Kept(_kept(settings.reference, weights.params, state.get("precision", {})))
    gauss_newton.require_cross_entropy(task)
    pooled = torch.cat(list(clients)).sort().values.to(task.device)
    return Pooled(task, weights, ClientData(SERVER, dataset.to(task.device), pooled, task.dtype))


def saved_weights(setting: str, folder: str, task: Task) -> tuple[Weights, dict[str, Params]]:
    """The final model of a saved run, if it fits the task, and what else its server has kept.

    Args:
        setting: Whose value the folder is, for the error message.
        folder: Of the run.
        task: The model that the weights are for.
    """
    saved = checkpoint.read_parts(Path(folder))
    _check_shapes(setting, folder, saved.params, task.initial.params)
    _check_shapes(setting, folder, saved.buffers, task.initial.buffers)
    weights = Weights(_like(saved.params, task.initial.params), _like(saved.buffers, task.initial.buffers))
    return weights, saved.state


def _kept(folder: str, mean: Params, precision: Params) -> Gaussian:
    require(
        bool(precision),
        f"the run in {folder} keeps no precision, because its method has no posterior; use "
        "--probe.reference_precision pooled_hessian, or a reference whose method has one, such as fola",
    )
    device = next(iter(mean.values())).device
    if MATRIX in precision and MATRIX not in mean:
        return Full(mean, precision[MATRIX].to(device))
    return Diagonal(mean, _like(precision, mean))


def _check_shapes(setting: str, folder: str, found: Params, expected: Params) -> None:
    def shapes(params: Params) -> dict[str, list[int]]:
        return {name: list(value.shape) for name, value in params.items()}

    def in_words(params: Params) -> str:
        return ", ".join(f"{name} {shape}" for name, shape in shapes(params).items()) or "nothing"

    require(
        shapes(found) == shapes(expected),
        f"{setting} {folder} is a run of another model or of data of another shape: expected "
        f"{in_words(expected)}, got {in_words(found)}; give a run with the same --model and --data",
    )


def _like(values: Params, like: Params) -> Params:
    return {name: values[name].to(target.device, target.dtype) for name, target in like.items()}
