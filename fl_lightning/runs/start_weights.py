"""The weights that a network starts from: a file, a finished run, or what torchvision publishes.

What they hold decides the numbers of a run, not where they lie. Nothing in a file is executed.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from urllib.error import URLError

import torch
from safetensors.torch import load_file
from torch import Tensor

from fl_lightning.data.readers import fingerprint
from fl_lightning.errors import UserError, unknown
from fl_lightning.runs import checkpoint
from fl_lightning.runs.frozen_weights import MODEL, whole

EXPECTED = "a file of weights, the folder of a finished run, or for --model torchvision a published name"


def read(setting: str, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict that a value of `model.weights` means.

    Args:
        setting: The value.
        options: Of the model; torchvision's has the name of a network.

    Raises:
        UserError: If there is none, or the file would execute code.
    """
    path = Path(setting).expanduser()
    if path.is_dir():
        if (path / MODEL).exists():
            return whole(path)
        parts = checkpoint.read_parts(path)
        return {**parts.params, **parts.buffers}
    if path.exists():
        return _of_file(path)
    entry = _published(setting, options)
    try:
        found: dict[str, Tensor] = entry.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"model.weights {setting} is downloaded from {entry.url}, which cannot be reached ({reason}); download it "
            "elsewhere and name the file"
        ) from None
    return found


def content(setting: str, options: Mapping[str, Any]) -> str:
    """A short text that names what the weights hold: a hash, or for published weights the file, which has one."""
    path = Path(setting).expanduser()
    if path.is_dir():
        return _of_run(path)
    if path.exists():
        return fingerprint.of_files({"": path})
    return str(_published(setting, options).url).rpartition("/")[2]


def _of_run(folder: Path) -> str:
    return fingerprint.of_files({"": folder / MODEL}) if (folder / MODEL).exists() else checkpoint.identity_of(folder)


def _of_file(file: Path) -> dict[str, Tensor]:
    where = f"model.weights {file}"
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles of another protocol, before they are refused
            given: Any = (
                load_file(file)
                if file.suffix == ".safetensors"
                else torch.load(file, map_location="cpu", weights_only=True)
            )
    except UnpicklingError:
        raise UserError(
            f"{where} holds pickled code or objects, which are never executed here; save the tensors alone, "
            "torch.save(model.state_dict(), file)"
        ) from None
    except Exception as error:  # a file that is cut off or something else fails in any way
        raise UserError(f"{where} holds no weights ({type(error).__name__}); save a state_dict") from None
    if isinstance(given, Mapping) and isinstance(given.get("state_dict"), Mapping):  # a checkpoint of Lightning
        given = given["state_dict"]
    good = isinstance(given, Mapping) and given and all(isinstance(value, Tensor) for value in given.values())
    if not good:
        raise UserError(f"{where} holds no state dict: expected tensors by name, got {type(given).__name__}")
    return {str(name): value for name, value in given.items()}


def _published(setting: str, options: Mapping[str, Any]) -> Any:
    """What torchvision publishes under this name for its network."""
    network = options.get("name")
    if network is None or "/" in setting or "." in setting:
        raise UserError(f"model.weights {setting} does not exist; expected {EXPECTED}")
    from torchvision import models

    known = dict(models.get_model_weights(str(network)).__members__.items())
    if setting not in known:
        raise unknown(f"model.weights of {network}", setting, known, elsewhere="a file, or the folder of a run")
    return known[setting]
