"""What no run changes: the part of a network that is not trained, kept once for each content beside the runs.

The state dict of a run of which a part is trained holds that part alone. Its header names a file in the folder
`frozen`, which all runs that start from the same weights share.
"""

import hashlib
import json
import os
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save
from torch import Tensor

from fl_lightning.errors import UserError, require
from fl_lightning.models import lora
from fl_lightning.system.atomic import write_atomically, writing

# The state dict that a run leaves, the key of its header that names the rest, and where that is.
MODEL, FROZEN, FOLDER = "model.safetensors", "frozen", "frozen"
# The one key of the header where a part was trained: safetensors writes several in any order, and content is hashed.
PART = "part"
# Of its header: alpha / rank of adapters, if there are any.
LORA = "lora"


def keep(out: Path, state: dict[str, Tensor]) -> str:
    """Write tensors, unless they are there already; their name follows from what they hold."""
    content = save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})
    name = _name_of(content)
    path = _place(out, name)
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(exist_ok=True)
        mine = path.with_name(f"{name}.{uuid4().hex}")  # several runs of a sweep may end at once
        write_atomically(mine, content)
        with writing(path):
            os.replace(mine, path)
    return name


def trained(folder: Path) -> dict[str, Tensor]:
    """The state dict that a run has left: the trained part, or the whole network.

    Raises:
        UserError: If it is damaged.
    """
    path = folder / MODEL
    try:
        return {name: value.clone() for name, value in load_file(path).items()}  # as `checkpoint` does
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); compute that run again with --fresh") from None


def frozen(folder: Path) -> dict[str, Tensor] | None:
    """The rest of a run's network; None of a run that trained the whole one, or where the rest is not there.

    Raises:
        UserError: If it is damaged.
    """
    name = header(folder).get(FROZEN)
    if name is None or not (path := _place(folder.parent, name)).exists():
        return None
    content = path.read_bytes()
    remedy = f"compute a run that shares it again with --fresh, such as {folder}"
    require(_name_of(content) == name, f"{path} is damaged; {remedy}")
    return load(content)


def whole(folder: Path) -> dict[str, Tensor]:
    """The state dict of a run's whole network, with its adapters added to the weights.

    Raises:
        UserError: If its frozen part is not there.
    """
    rest, said = frozen(folder), header(folder)
    name = said.get(FROZEN)
    if rest is None and name is not None:
        raise UserError(
            f"{folder} has the trained part of a network alone, and {_place(folder.parent, name)} with the rest is not "
            "there; copy the folder frozen, too"
        )
    state = {**(rest or {}), **trained(folder)}
    return lora.merged(state, float(said[LORA])) if LORA in said else state


def header(folder: Path) -> dict[str, str]:
    """What the state dict of a run says beside its tensors; nothing where there is none."""
    try:
        with safe_open(folder / MODEL, framework="pt") as file:
            found = dict(file.metadata() or {})
    except (SafetensorError, OSError):
        return {}
    text = found.get(PART)
    return found if text is None else json.loads(text)


def _name_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _place(out: Path, name: str) -> Path:
    return out / FOLDER / f"{name}.safetensors"
