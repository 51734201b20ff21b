"""The final model of a saved run, for another run: to start from it, or as the posterior to be measured against."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fl_lightning.data.dataset import Dataset
from fl_lightning.data.plan import SERVER, ClientData
from fl_lightning.errors import require
from fl_lightning.gaussian.form import Gaussian
from fl_lightning.likelihoods.likelihood import require_curvature
from fl_lightning.method import Method, task_of
from fl_lightning.params import Params
from fl_lightning.probes.reference import Pooled, Posterior, Reference
from fl_lightning.probes.settings import Probe
from fl_lightning.runs import checkpoint
from fl_lightning.task import Task, Weights


def load_reference(settings: Probe, task: Task, dataset: Dataset, clients: Sequence[Tensor]) -> Reference | None:
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
    weights, posterior = saved_weights("probe.reference", settings.reference, task)
    if settings.reference_precision == "run":
        require(
            posterior is not None,
            f"the run in {settings.reference} keeps no precision, because its method has no posterior; use "
            "--probe.reference_precision pooled_hessian, or a reference whose method has one, such as fola",
        )
        assert posterior is not None
        return Posterior(_at(posterior, task).with_mean(weights.params))
    require_curvature(task.likelihood)
    pooled = torch.cat(list(clients)).sort().values.to(task.device)
    return Pooled(task, weights, ClientData(SERVER, dataset.to(task.device), pooled, task.dtype))


def start_from(folder: str, method: Method, task: Task) -> None:
    """Make the final model of a saved run the initial weights: of the task, or of the method's own network.

    Args:
        folder: Of the run.
        method: Of the run that starts from it.
        task: The model that its settings name.
    """
    is_plain = _shapes(checkpoint.read_parts(Path(folder)).params) == _shapes(task.initial.params)
    target = task if is_plain else task_of(method, task)
    target.load(saved_weights("federation.start", folder, target)[0])
    target.initial = target.weights()


def saved_weights(setting: str, folder: str, task: Task) -> tuple[Weights, Gaussian | None]:
    """The final model of a saved run, if it fits the task, and the posterior that it is the mean of, if there is one.

    Args:
        setting: Whose value the folder is, for the error message.
        folder: Of the run.
        task: The model that the weights are for.
    """
    saved = checkpoint.read_parts(Path(folder))
    return fitting(setting, folder, Weights(saved.params, saved.buffers), task), saved.posterior


def fitting(setting: str, folder: str, weights: Weights, task: Task) -> Weights:
    """Weights of a saved run on the device and in the type of a task, if they are of its model."""
    _check_shapes(setting, folder, weights.params, task.initial.params)
    _check_shapes(setting, folder, weights.buffers, task.initial.buffers)
    return Weights(_like(weights.params, task.initial.params), _like(weights.buffers, task.initial.buffers))


def _at(posterior: Gaussian, task: Task) -> Gaussian:
    """On the device of a task, in its floating point type."""
    moved: Gaussian = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(task.device, task.dtype), posterior)
    return moved


def _check_shapes(setting: str, folder: str, found: Params, expected: Params) -> None:
    def in_words(params: Params) -> str:
        return ", ".join(f"{name} {shape}" for name, shape in _shapes(params).items()) or "nothing"

    require(
        _shapes(found) == _shapes(expected),
        f"{setting} {folder} is a run of another model or of data of another shape: expected "
        f"{in_words(expected)}, got {in_words(found)}; give a run with the same --model and --data",
    )


def _shapes(params: Params) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in params.items()}


def _like(values: Params, like: Params) -> Params:
    return {name: values[name].to(target.device, target.dtype) for name, target in like.items()}
