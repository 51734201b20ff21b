"""The model that a finished run has left."""

from pathlib import Path

from torch import nn

from fl_lightning.config import parse, read_yaml
from fl_lightning.errors import require
from fl_lightning.experiment import build
from fl_lightning.method import task_of
from fl_lightning.runs import checkpoint
from fl_lightning.task import Weights


def trained_model(folder: Path | str) -> nn.Module:
    """The aggregated model after the last round, in evaluation mode, on the device that its settings name.

    It is the network that was trained: of a method with its own (`Method.network`), that one.

    Args:
        folder: Of a finished run: `Result.folder`, or what `fl-lightning run` calls its files.

    Raises:
        UserError: If there is no such run, or it has kept no checkpoint, as most sweeps do.
    """
    folder = Path(folder)
    parts = checkpoint.read_parts(folder)
    settings = folder / checkpoint.SETTINGS
    require(settings.exists(), f"the run in {folder} has not finished; the command that started it goes on with it")
    config = parse(read_yaml(str(settings)))
    task = task_of(config.method, build(config).task)
    task.load(Weights(parts.params, parts.buffers))
    return task.model.eval()
