"""The final model of a run: its file, and what another run takes from it, as its start or as a reference posterior.

The file is a plain state dict, `model.safetensors`, with the keys of its `nn.Module`. Nothing of this package is needed
to read it: `model.load_state_dict(safetensors.torch.load_file(path))`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from fl_lightning.data.batches import SERVER, ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.preparation import Preparation
from fl_lightning.errors import UserError, require
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.method import Method, task_of
from fl_lightning.metrics.reference import Pooled, Posterior, Reference
from fl_lightning.metrics.settings import Probe
from fl_lightning.models.likelihoods.base import require_curvature
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params
from fl_lightning.runs import checkpoint
from fl_lightning.system import trees
from fl_lightning.system.atomic import write_atomically

FILE = "model.safetensors"
PREPARATION = "preparation"


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
    moved: Gaussian = trees.map_tensors(lambda leaf: leaf.to(task.device, task.dtype), posterior)
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


def write(folder: Path, task: Task, weights: Weights, preparation: Preparation) -> Path:
    """Write the state dict of the network with these weights; parameters that are not trained are in it, too.

    What its inputs go through before it is in the file's header.
    """
    state = {**task.model.state_dict(), **weights.params, **weights.buffers}
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    write_atomically(folder / FILE, save(tensors, metadata={PREPARATION: preparation.text()}))
    return folder / FILE


def preparation_of(folder: Path) -> Preparation | None:
    """What the inputs of a run's model go through before it; None where the run has not written it down.

    Models of earlier versions lack it, and so do runs that have kept a checkpoint alone.
    """
    try:
        with safe_open(folder / FILE, framework="pt") as file:
            text = (file.metadata() or {}).get(PREPARATION)
    except (SafetensorError, OSError):
        return None
    return None if text is None else Preparation.of_text(text)


def read(folder: Path, task: Task) -> Weights:
    """The final model of a run, from its checkpoint or from its state dict.

    Raises:
        UserError: If it has kept neither, or they are of another network.
    """
    path = folder / FILE
    if (folder / checkpoint.CURRENT).exists() or not path.exists():
        parts = checkpoint.read_parts(folder)
        return fitting("the run", str(folder), Weights(parts.params, parts.buffers), task)
    try:
        state = {name: value.clone() for name, value in load_file(path).items()}  # as `checkpoint` does
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); compute that run again with --fresh") from None
    params = {name: state[name] for name in task.names if name in state}
    buffers = {name: state[name] for name in task.initial.buffers if name in state}
    return fitting("the run", str(folder), Weights(params, buffers), task)
