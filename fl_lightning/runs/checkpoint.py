"""The server's state on disk: written after every round, atomically, the previous one kept.

Reading executes no code. The file is a safetensors file whose header holds the round, the identity of the
configuration, the numbers of the rounds so far, and checksums of the tensors and of the header itself, so that a
damaged file is never taken for a good one. What clients remember is in files beside it, see `fl_lightning.runs.rows`,
and so are the numbers of earlier rounds, see `fl_lightning.runs.earlier`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils import _pytree as pytree

from fl_lightning.client_memory import ClientMemory
from fl_lightning.errors import UserError
from fl_lightning.gaussian.form import Gaussian
from fl_lightning.record import Measurement, Snapshot
from fl_lightning.runs import earlier, rows
from fl_lightning.system.atomic import write_atomically
from fl_lightning.system.tensor_seal import checksum, seal

# Format 1 had no checksum of its header.
FORMAT = "fl_lightning checkpoint 2"
# With files of earlier rounds beside it.
FORMAT_OF_LONG_RUNS = "fl_lightning checkpoint 3"
# Written when a run has ended, by `fl_lightning.runs.files`.
SETTINGS = "config.yaml"
CURRENT, PREVIOUS = "checkpoint.safetensors", "checkpoint.previous.safetensors"


class DamagedError(Exception):
    """A file that is not a complete checkpoint of ours."""


class Saved(NamedTuple):
    """A checkpoint: the server after a round, and the numbers of all rounds up to it."""

    snapshot: Snapshot
    history: list[Measurement]


def write(folder: Path, identity: str, snapshot: Snapshot, history: Sequence[Measurement]) -> None:
    """Save a round. Whenever the process dies, a complete checkpoint is left."""
    leaves, _ = _flattened(snapshot)
    names = {id(leaf): pytree.keystr(path) for path, leaf in leaves}
    tensors: dict[str, Tensor] = {}
    numbers = {}
    memories: list[ClientMemory[Any]] = []
    storages: set[int] = set()

    def keep(name: str, leaf: Tensor) -> None:
        tensor = leaf.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses shared memory; a copy of every tensor would be felt with full curvature.
        tensors[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)

    for path, leaf in leaves:
        name = pytree.keystr(path)
        if isinstance(leaf, Tensor):
            keep(name, leaf)
        elif isinstance(leaf, ClientMemory):
            memories.append(leaf)
            for below, value in pytree.tree_flatten_with_path(leaf.default)[0]:
                keep(f"{name}.default{pytree.keystr(below)}", value)
        else:
            numbers[name] = leaf
    parts = earlier.write(folder, history, _earlier(folder / CURRENT, identity))
    header = {
        "format": FORMAT_OF_LONG_RUNS if parts else FORMAT,
        "identity": identity,
        "round": str(snapshot.round),
        "numbers": json.dumps(numbers),
        "params": json.dumps({name: names[id(value)] for name, value in snapshot.state.params.items()}),
        "posterior": json.dumps(_described(getattr(snapshot.state, "posterior", None))),
        "history": earlier.encoded(history[len(parts) * earlier.ROUNDS :]),
        "tensors": str(checksum(tensors)),
    }
    if parts:
        header["earlier"] = json.dumps(parts)
    if memories:
        header["rows"] = json.dumps(rows.write(folder, memories))
    header["checksum"] = seal(header)
    write_atomically(folder / CURRENT, save(tensors, metadata=header), keep=folder / PREVIOUS)
    if memories:
        rows.remove_others(folder, _named(folder / CURRENT) | _named(folder / PREVIOUS))


def read(folder: Path, identity: str, template: Snapshot) -> Saved | None:
    """The latest complete checkpoint of a folder, or None if there is none.

    Args:
        folder: The run's folder.
        identity: Of the configuration that wants to go on.
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
        UserError: If there is no readable checkpoint.
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
        with _opened(path) as (header, _):
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
    rows.remove_others(folder, _named(folder / CURRENT))
    if current:
        earlier.remove(folder)


def _contents(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of a file that is complete."""
    with _opened(path) as (header, file):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    if header["tensors"] != str(checksum(tensors)):
        raise DamagedError("is damaged (the checksum of its tensors does not match)")
    return header, tensors


@contextmanager
def _opened(path: Path) -> Iterator[tuple[dict[str, str], Any]]:
    """The header of a file, which is whole, and the file."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            given = header.get("format", "")
            if given not in (FORMAT, FORMAT_OF_LONG_RUNS):
                ours = given.startswith(FORMAT.rstrip("0123456789"))
                raise DamagedError(
                    f"was written by another version ({given})" if ours else "is not a checkpoint of this program"
                )
            if header.pop("checksum", None) != seal(header):
                raise DamagedError("is damaged (the checksum of its header does not match)")
            yield header, file
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedError(f"is damaged ({error})") from None


def _read_file(path: Path, identity: str, template: Snapshot) -> Saved:
    header, tensors = _contents(path)
    if header["identity"] != identity:
        raise UserError(
            f"{path} belongs to another configuration ({header['identity']}, not {identity}); "
            "choose another --out, or start again with --fresh"
        )
    values: dict[str, Any] = tensors | json.loads(header["numbers"])
    leaves, structure = _flattened(template)

    def loaded(name: str, like: Any) -> Any:
        if isinstance(like, ClientMemory):
            below, row = pytree.tree_flatten_with_path(like.default)
            default = [loaded(f"{name}.default{pytree.keystr(path)}", leaf) for path, leaf in below]
            return ClientMemory.blank(pytree.tree_unflatten(default, row))
        value = values.get(name)
        if value is None or (isinstance(like, Tensor) and like.shape != value.shape):
            raise DamagedError(f"does not fit the method: {name} is missing or of another shape")
        return value.to(like.device, like.dtype) if isinstance(like, Tensor) else value

    found = [loaded(pytree.keystr(path), like) for path, like in leaves]
    blank = [leaf for leaf in found if isinstance(leaf, ClientMemory)]
    try:
        memories = iter(rows.read(path.parent, _extents(header), blank))
    except (OSError, EOFError, ValueError) as error:
        raise DamagedError(f"has lost what clients remember ({error})") from None
    whole = [next(memories) if isinstance(leaf, ClientMemory) else leaf for leaf in found]
    state, buffers = pytree.tree_unflatten(whole, structure)
    try:
        history = earlier.read(path.parent, _parts(header)) + earlier.decoded(header["history"])
    except (OSError, ValueError) as error:
        raise DamagedError(f"has lost the numbers of earlier rounds ({error})") from None
    return Saved(Snapshot(int(header["round"]), state, buffers), history)


def _tree(snapshot: Snapshot) -> tuple[Any, Any]:
    return snapshot.state, snapshot.buffers


def _flattened(snapshot: Snapshot) -> tuple[list[tuple[Any, Any]], Any]:
    """The leaves of a state and where they are, clients' memories among them; and its structure."""
    return pytree.tree_flatten_with_path(_tree(snapshot), is_leaf=lambda node: isinstance(node, ClientMemory))


def _matching(tensors: Mapping[str, Tensor], pattern: str) -> dict[str, str]:
    """The keys that have this pattern, by what it captures."""
    return {found[1]: key for key in tensors if (found := re.fullmatch(pattern, key))}


def _described(posterior: Any) -> dict[str, Any] | None:
    """What it takes to build a posterior from its tensors without knowing the method: the form, and where they are."""
    if not isinstance(posterior, Gaussian):
        return None
    leaves, structure = pytree.tree_flatten_with_path(posterior)
    return {
        "structure": pytree.treespec_dumps(structure),
        "leaves": [f"[0].posterior{pytree.keystr(path)}" for path, _ in leaves],
    }


def _rebuilt(described: Mapping[str, Any], values: Mapping[str, Any]) -> Gaussian:
    structure = pytree.treespec_loads(described["structure"])
    posterior: Gaussian = pytree.tree_unflatten([values[name] for name in described["leaves"]], structure)
    return posterior


def _extents(header: Mapping[str, str]) -> list[rows.Extent]:
    """The files with what clients remember."""
    return [rows.Extent(*extent) for extent in json.loads(header.get("rows", "[]"))]


def _parts(header: Mapping[str, str]) -> list[earlier.Part]:
    """The files with the numbers of earlier rounds."""
    return [earlier.Part(*part) for part in json.loads(header.get("earlier", "[]"))]


def _earlier(path: Path, identity: str) -> list[earlier.Part]:
    """Those that the last checkpoint of this run has named, if there is one."""
    try:
        with _opened(path) as (header, _):
            return _parts(header) if header["identity"] == identity else []
    except DamagedError:
        return []


def _named(path: Path) -> set[str]:
    """The files that a checkpoint cannot do without."""
    try:
        with _opened(path) as (header, _):
            return {extent.name for extent in _extents(header)}
    except DamagedError:
        return set()  # of no use, with them or without
