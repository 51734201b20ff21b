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
from fl_lightning.errors import UserError, require, unknown
from fl_lightning.models.lora import in_words
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
    found = _in_run(path) if path.is_dir() else _of_file(path) if path.exists() else _downloaded(setting, options)
    strange = [name for name, value in found.items() if not bool(torch.isfinite(value).all())]
    require(
        not strange,
        f"model.weights {setting}: {in_words(strange)} has values that are not finite; the training that made them has "
        "diverged: give another file or run",
    )
    return found


def _in_run(folder: Path) -> dict[str, Tensor]:
    _require_run(folder)
    if (folder / MODEL).exists():
        return whole(folder)
    parts = checkpoint.read_parts(folder)
    return {**parts.params, **parts.buffers}


def _require_run(folder: Path) -> None:
    require(
        any((folder / name).exists() for name in (MODEL, checkpoint.CURRENT, checkpoint.PREVIOUS)),
        f"model.weights {folder} is a folder with neither {MODEL} nor a checkpoint in it; expected {EXPECTED}",
    )


def _downloaded(setting: str, options: Mapping[str, Any]) -> dict[str, Tensor]:
    entry = _published(setting, options)
    try:
        return dict(entry.get_state_dict(progress=False, check_hash=True, weights_only=True))
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"model.weights {setting} is downloaded from {entry.url}, which cannot be reached ({reason}); download it "
            "elsewhere and name the file"
        ) from None


def content(setting: str, options: Mapping[str, Any]) -> str:
    """A short text that names what the weights hold: a hash, or for published weights the file, which has one."""
    path = Path(setting).expanduser()
    if path.is_dir():
        return _of_run(path)
    if path.exists():
        return fingerprint.of_files({"": path})
    return str(_published(setting, options).url).rpartition("/")[2]


def _of_run(folder: Path) -> str:
    _require_run(folder)
    return fingerprint.of_files({"": folder / MODEL}) if (folder / MODEL).exists() else checkpoint.identity_of(folder)


def _of_file(file: Path) -> dict[str, Tensor]:
    where = f"model.weights {file}"
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles of another protocol, before they are refused
            given: Any = (
                load_file(file)
                if file.suffix == ".safetensors" or _is_safe(file)
                else torch.load(file, map_location="cpu", weights_only=True)
            )
    except UnpicklingError:
        raise UserError(
            f"{where} holds pickled code or objects, which are never executed here; save the tensors alone, "
            "torch.save(model.state_dict(), file)"
        ) from None
    except Exception as error:  # a file that is cut off or something else fails in any way
        raise UserError(f"{where} holds no weights ({type(error).__name__}); save a state_dict") from None
    inside = given if isinstance(given, Mapping) else {}
    nested = [value for value in inside.values() if _is_state(value)]
    if _is_state(inside.get("state_dict")):  # a checkpoint of Lightning
        nested = [inside["state_dict"]]
    if not _is_state(given) and len(nested) != 1:
        got = in_words(map(str, inside)) if inside else type(given).__name__
        raise UserError(
            f"{where} holds no state dict: expected tensors by name, or one such dict, got {got}; save a state_dict"
        )
    return {str(name): value for name, value in (given if _is_state(given) else nested[0]).items()}


def _is_safe(file: Path) -> bool:
    """Whether a file looks like safetensors: a length, and a header in JSON."""
    with file.open("rb") as opened:
        return opened.read(9)[8:] == b"{"


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(one, Tensor) for one in value.values())


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
