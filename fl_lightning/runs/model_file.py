"""The final model of a run as a plain state dict: `model.safetensors`, with the keys of its `nn.Module`.

Nothing of this package is needed to read it: `model.load_state_dict(safetensors.torch.load_file(path))`.
"""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fl_lightning.errors import UserError
from fl_lightning.runs import checkpoint
from fl_lightning.system.atomic import write_atomically
from fl_lightning.task import Task, Weights

FILE = "model.safetensors"


def write(folder: Path, task: Task, weights: Weights) -> Path:
    """Write the state dict of the network with these weights; parameters that are not trained are in it, too."""
    state = {**task.model.state_dict(), **weights.params, **weights.buffers}
    kept = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    write_atomically(folder / FILE, save(kept))
    return folder / FILE


def read(folder: Path, task: Task) -> Weights:
    """The final model of a run, from its checkpoint or from its state dict.

    Raises:
        UserError: If it has kept neither, or they are of another network.
    """
    from fl_lightning.runs.saved import fitting  # it knows what to say about another model

    path = folder / FILE
    if (folder / checkpoint.CURRENT).exists() or not path.exists():
        parts = checkpoint.read_parts(folder)
        return fitting("the run", str(folder), Weights(parts.params, parts.buffers), task)
    try:
        state = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); compute that run again with --fresh") from None
    params = {name: state[name] for name in task.names if name in state}
    buffers = {name: state[name] for name in task.initial.buffers if name in state}
    return fitting("the run", str(folder), Weights(params, buffers), task)
