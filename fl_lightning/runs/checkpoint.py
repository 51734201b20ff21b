"""The server's state on disk: written after every round, atomically, the previous one kept.

Reading executes no code. The file is a safetensors file whose header holds the round, the identity of the
configuration, and checksums of the tensors and of the header itself, so that a damaged file is never taken for a good
one. What clients remember is in files beside it (`client_rows.py`), and so are the numbers of the rounds
(`rounds_file.py`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fl_lightning.client_state import ClientMemory, Snapshot
from fl_lightning.errors import UserError
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.runs import client_rows
from fl_lightning.system import trees
from fl_lightning.system.atomic import write_atomically
from fl_lightning.system.checksums import header_checksum, tensor_checksum

FORMAT = "fl_lightning checkpoint 4"
# Format 1 had no checksum of its header; these had the numbers of the rounds in it (`old_formats.py`).
READABLE = (FORMAT, "fl_lightning checkpoint 2", "fl_lightning checkpoint 3")
# Written when a run has ended, by `fl_lightning.runs.files`.
SETTINGS = "config.yaml"
CURRENT, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"


class DamagedError(Exception):
    """A file that is not a complete checkpoint of ours."""


def write(folder: Path, identity: str, snapshot: Snapshot) -> None:
    """Save a round. Whenever the process dies, a complete checkpoint is left."""
    leaves, _ = _flattened(snapshot)
    names = {id(leaf): trees.path_text(path) for path, leaf in leaves}
    tensors: dict[str, Tensor] = {}
    numbers = {}
    memories: list[ClientMemory[Any]] = []
    storages: set[int] = set()

    def store(name: str, leaf: Tensor) -> None:
        tensor = leaf.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses shared memory; a copy of every tensor would be felt with full curvature.
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)

    for path, leaf in leaves:
        name = trees.path_text(path)
        if isinstance(leaf, Tensor):
            store(name, leaf)
        elif isinstance(leaf, ClientMemory):
            memories.append(leaf)
            for below, value in trees.flatten_with_path(leaf.default)[0]:
                store(f"{name}.default{trees.path_text(below)}", value)
        else:
            numbers[name] = leaf
    header = {
        "format": FORMAT,
        "identity": identity,
        "round": str(snapshot.round),
        "numbers": json.dumps(numbers),
        "params": json.dumps({name: names[id(value)] for name, value in snapshot.state.params.items()}),
        "posterior": json.dumps(_described(getattr(snapshot.state, "posterior", None))),
        "tensors": str(tensor_checksum(tensors)),
    }
    if memories:
        header["rows"] = json.dumps(client_rows.write(folder, memories))
    header["checksum"] = header_checksum(header)
    write_atomically(folder / CURRENT, save(tensors, metadata=header), keep=folder / PREVIOUS)
    if memories:
        client_rows.remove_others(folder, _named(folder / CURRENT) | _named(folder / PREVIOUS))


def read(folder: Path, identity: str, template: Snapshot) -> Snapshot | None:
    """The latest complete checkpoint of a folder, or None if there is none.

    Args:
        folder: The run's folder.
        identity: Of the configuration to resume.
        template: The state before round 1, whose structure and shapes the checkpoint must have.

    Raises:
        UserError: If the checkpoint belongs to another configuration, or none is readable.
    """
    damages = []
    for path in (folder / CURRENT, folder / PREVIOUS):
        if path.exists():
            try:
                return _read_file(path, identity, template)
            except DamagedError as damage:
                damages.append(f"{path.name} {damage}")
    if damages:
        raise UserError(f"no readable checkpoint in {folder}: {'; '.join(damages)}; start this run again with --fresh")
    return None


class Parts(NamedTuple):
    """A checkpoint as another run sees it, which does not know the method.

    Attributes:
        params: The server's model.
        buffers: Its buffers.
        posterior: The Gaussian that it is the mean of, if the method's state has a `posterior`.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    posterior: Gaussian | None


def read_parts(folder: Path) -> Parts:
    """The model of a saved run, whatever its method.

    Raises:
        UserError: If no checkpoint can be read.
    """
    path = _existing(folder)
    try:
        header, tensors = _contents(path)
    except DamagedError as damage:
        raise UserError(f"{path} {damage}; compute that run again with --fresh") from None
    # Older files do not say where the model is: its field was always called `params`.
    places = json.loads(header.get("params", "{}")) or _matching(tensors, r"\[0\]\.params\['(.*)'\]")
    params = {name: tensors[key] for name, key in places.items()}
    buffers = {name: tensors[key] for name, key in _matching(tensors, r"\[1\]\['(.*)'\]").items()}
    described = json.loads(header.get("posterior", "null"))
    posterior = None if described is None else _rebuilt(described, tensors | json.loads(header["numbers"]))
    return Parts(params, buffers, posterior)


def identity_of(folder: Path) -> str:
    """Which run, and which round of it, a folder holds: the tensors themselves are not read."""
    path = _existing(folder)
    try:
        with opened(path) as (header, _):
            return f"{header['identity']} after round {header['round']}"
    except DamagedError as damage:
        raise UserError(f"{path} {damage}; compute that run again with --fresh") from None


def round_of(folder: Path) -> int | None:
    """After which round the checkpoint of a folder is; None without one."""
    if not (folder / CURRENT).exists():
        return None
    return int(identity_of(folder).rpartition(" ")[2])


def _existing(folder: Path) -> Path:
    path = folder / CURRENT
    if not path.exists():
        if (settings := folder / SETTINGS).exists():  # finished, by a sweep
            raise UserError(
                f"the run in {folder} has ended without keeping its checkpoint, as sweeps do; give their study "
                f"keep_checkpoints: true, or compute it again: fl-lightning run --config {settings} --fresh"
            )
        what = "there is no checkpoint in it" if folder.is_dir() else "there is no such folder"
        raise UserError(f"expected the folder of a saved run, got {folder}: {what}; a finished run names its folder")
    return path


def remove(folder: Path, current: bool) -> None:
    """Forget what a finished run does not need: the previous checkpoint, and on demand the current one."""
    for name in (PREVIOUS, CURRENT) if current else (PREVIOUS,):
        (folder / name).unlink(missing_ok=True)
    client_rows.remove_others(folder, _named(folder / CURRENT))


def _contents(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of a file that is complete."""
    with opened(path) as (header, file):
        # Copies: in the file's memory tensors begin anywhere, and the rounding of matrix products depends on that.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    if header["tensors"] != str(tensor_checksum(tensors)):
        raise DamagedError("is damaged (the checksum of its tensors does not match)")
    return header, tensors


@contextmanager
def opened(path: Path) -> Iterator[tuple[dict[str, str], Any]]:
    """The header of a file, which is whole, and the file."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            given = header.get("format", "")
            if given not in READABLE:
                ours = given.startswith(FORMAT.rstrip("0123456789"))
                raise DamagedError(
                    f"was written by another version ({given})" if ours else "is not a checkpoint of this program"
                )
            if header.pop("checksum", None) != header_checksum(header):
                raise DamagedError("is damaged (the checksum of its header does not match)")
            yield header, file
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedError(f"is damaged ({error})") from None


def _read_file(path: Path, identity: str, template: Snapshot) -> Snapshot:
    header, tensors = _contents(path)
    if header["identity"] != identity:
        raise UserError(
            f"{path} belongs to another configuration ({header['identity']}, not {identity}); "
            "choose another --runs, or start again with --fresh"
        )
    values: dict[str, Any] = tensors | json.loads(header["numbers"])
    leaves, structure = _flattened(template)

    def loaded(name: str, like: Any) -> Any:
        if isinstance(like, ClientMemory):
            below, row = trees.flatten_with_path(like.default)
            default = [loaded(f"{name}.default{trees.path_text(path)}", leaf) for path, leaf in below]
            return ClientMemory.blank(trees.unflatten(default, row))
        value = values.get(name)
        if value is None or (isinstance(like, Tensor) and like.shape != value.shape):
            raise DamagedError(f"does not fit the method: {name} is missing or of another shape")
        return value.to(like.device, like.dtype) if isinstance(like, Tensor) else value

    found = [loaded(trees.path_text(path), like) for path, like in leaves]
    blank = [leaf for leaf in found if isinstance(leaf, ClientMemory)]
    try:
        memories = iter(client_rows.read(path.parent, _extents(header), blank))
    except (OSError, EOFError, ValueError) as error:
        raise DamagedError(f"has lost what clients remember ({error})") from None
    whole = [next(memories) if isinstance(leaf, ClientMemory) else leaf for leaf in found]
    state, buffers = trees.unflatten(whole, structure)
    return Snapshot(int(header["round"]), state, buffers)


def _tree(snapshot: Snapshot) -> tuple[Any, Any]:
    return snapshot.state, snapshot.buffers


def _flattened(snapshot: Snapshot) -> tuple[list[tuple[Any, Any]], Any]:
    """The leaves of a state and where they are, clients' memories among them; and its structure."""
    return trees.flatten_with_path(_tree(snapshot), is_leaf=lambda node: isinstance(node, ClientMemory))


def _matching(tensors: Mapping[str, Tensor], pattern: str) -> dict[str, str]:
    """The keys that have this pattern, by what it captures."""
    return {found[1]: key for key in tensors if (found := re.fullmatch(pattern, key))}


def _described(posterior: Any) -> dict[str, Any] | None:
    """What it takes to build a posterior from its tensors without knowing the method: the form, and where they are."""
    if not isinstance(posterior, Gaussian):
        return None
    leaves, structure = trees.flatten_with_path(posterior)
    return {
        "structure": trees.structure_as_text(structure),
        "leaves": [f"[0].posterior{trees.path_text(path)}" for path, _ in leaves],
    }


def _rebuilt(described: Mapping[str, Any], values: Mapping[str, Any]) -> Gaussian:
    structure = trees.structure_from_text(described["structure"])
    posterior: Gaussian = trees.unflatten([values[name] for name in described["leaves"]], structure)
    return posterior


def _extents(header: Mapping[str, str]) -> list[client_rows.Extent]:
    """The files with what clients remember."""
    return [client_rows.Extent(*extent) for extent in json.loads(header.get("rows", "[]"))]


def _named(path: Path) -> set[str]:
    """The files that a checkpoint cannot do without."""
    try:
        with opened(path) as (header, _):
            return {extent.name for extent in _extents(header)}
    except DamagedError:
        return set()  # of no use, with them or without
