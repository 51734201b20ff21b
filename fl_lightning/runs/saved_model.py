"""The final model of a run: its file, and what another run takes from it, as its start or as a reference posterior.

The file is a plain state dict, `model.safetensors`, with the keys of its `nn.Module`. Nothing of this package is needed
to read it: `model.load_state_dict(safetensors.torch.load_file(path))`. Where a part of the network is trained, it holds
that part and A of adapters, and its header names the file with the rest (`frozen_weights.py`).
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from fl_lightning.data.batches import SERVER, ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.preparation import Preparation
from fl_lightning.errors import require
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.method import Method, task_of
from fl_lightning.metrics.reference import Pooled, Posterior, Reference
from fl_lightning.metrics.settings import Probe
from fl_lightning.models import lora
from fl_lightning.models.likelihoods.base import require_curvature
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params
from fl_lightning.runs import checkpoint, frozen_weights
from fl_lightning.system import trees
from fl_lightning.system.atomic import write_atomically

FILE = frozen_weights.MODEL
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


def write(folder: Path, task: Task, weights: Weights, preparation: Preparation, apart: bool = False) -> Path:
    """Write the state dict of the network with these weights.

    What its inputs go through before it is in the file's header.

    Args:
        folder: Of the run.
        task: The network.
        weights: Its final ones.
        preparation: Of its inputs.
        apart: Whether parameters that are not trained are kept beside the runs, once for all of them.
    """
    header = {PREPARATION: preparation.text()}
    state = task.model.state_dict()
    random = {name: state[name] for name in lora.starts(task.model)} if apart else {}  # of a seed: no run shares it
    trained = {**random, **weights.params, **weights.buffers}
    if apart:
        rest = {name: value for name, value in state.items() if name not in trained}
        name = frozen_weights.keep(folder.parent, rest)
        scale = lora.scale_of(task.model)
        parts = {**header, frozen_weights.FROZEN: name} | ({} if scale is None else {frozen_weights.LORA: str(scale)})
        header = {frozen_weights.PART: json.dumps(parts)}
        state = {}
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in {**state, **trained}.items()}
    write_atomically(folder / FILE, save(tensors, metadata=header))
    return folder / FILE


def preparation_of(folder: Path) -> Preparation | None:
    """What the inputs of a run's model go through before it; None where the run has not written it down.

    Models of earlier versions lack it, and so do runs that have kept a checkpoint alone.
    """
    text = frozen_weights.header(folder).get(PREPARATION)
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
    state = frozen_weights.trained(folder)
    params = {name: state[name] for name in task.names if name in state}
    buffers = {name: state[name] for name in task.initial.buffers if name in state}
    return fitting("the run", str(folder), Weights(params, buffers), task)
