"""Out-of-distribution inputs: other datasets, noise, rotated images, classes that no client has.

They are standardised as the training set is: a model sees them as it would see its own data.
"""

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning import discovery, streams
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError, require
from fl_lightning.models.inputs import Inputs, each, number, several

NOISE, ROTATED, DROPPED = "noise", "rotated", "dropped_classes"


def inputs_of(name: str, dataset: Dataset, root: str | None, dropped: Inputs | None, seed: int) -> Inputs:
    """Out-of-distribution inputs, stored as those of the test set are.

    Args:
        name: A dataset, `noise`, `rotated`, `dropped_classes`, or a file.
        dataset: That the model was trained on.
        root: Where its files are; other datasets are looked for beside them.
        dropped: Test samples of dropped classes, if any.
        seed: Key of the noise.

    Raises:
        UserError: If they do not exist, or are of another shape.
    """
    if name == NOISE:
        stream = streams.generator(seed, "ood noise")
        return each(lambda one: _noise(one, dataset.num_tokens, stream), dataset.test_x)
    if name == DROPPED:
        require(
            dropped is not None and number(dropped) > 0,
            "uncertainty.ood dropped_classes needs classes that no client has, got none; use --data.drop_classes '[9]'",
        )
        return dropped
    require(
        not several(dataset.test_x),
        f"uncertainty.ood {name} is one input, but the data have several; use noise or dropped_classes",
    )
    known: Tensor = dataset.test_x
    if name == ROTATED:
        require(
            known.dim() == 4 and known.shape[2] == known.shape[3],
            f"uncertainty.ood rotated needs square images, got inputs of shape {dataset.shape}; leave it out",
        )
        return known.rot90(1, (2, 3)).contiguous()
    if Path(name).suffix in (".npy", ".npz"):
        return fitted(name, _from_file(Path(name)), dataset)
    cls = discovery.find("data", name)
    source = cls(root=root) if root is not None and "root" in getattr(cls, "__dataclass_fields__", {}) else cls()
    found = source.load().test_x
    require(not several(found), f"uncertainty.ood {name} has several inputs, but the data have one; leave it out")
    return fitted(name, found, dataset)


def _noise(known: Tensor, tokens: int | None, stream: torch.Generator) -> Tensor:
    """Bytes, tokens of the vocabulary, or numbers between the smallest and the largest at their place."""
    if known.dtype == torch.long:
        return torch.randint(tokens or 1, known.shape, generator=stream)
    if not known.is_floating_point():
        return torch.randint(256, known.shape, generator=stream, dtype=torch.uint8)
    flat = known.flatten(1)
    low, high = flat.amin(0), flat.amax(0)
    drawn = torch.rand(flat.shape, generator=stream, dtype=torch.float64).to(known.dtype)
    return (low + drawn * (high - low)).view(known.shape)


def fitted(name: str, x: Tensor, dataset: Dataset) -> Tensor:
    """Images of another dataset in the shape of this one: padded with zeros, grey ones repeated for every colour."""
    expected, given = dataset.shape, tuple(x.shape[1:])
    known, tokens = dataset.test_x, dataset.num_tokens
    require(
        x.is_floating_point() == known.is_floating_point() and (x.dtype == torch.long) == (known.dtype == torch.long),
        f"uncertainty.ood {name} holds {x.dtype}, the training set {known.dtype}, and no scale is common to both; give "
        "bytes for bytes, standardised numbers for numbers, and tokens (int64) for tokens",
    )
    require(
        x.dtype != torch.long or (int(x.min()) >= 0 and int(x.max()) < (tokens or 0)),
        f"uncertainty.ood {name} must hold tokens from 0 to {(tokens or 0) - 1}, got {int(x.min())} to {int(x.max())}",
    )
    if given != expected and len(given) == len(expected) == 3:
        if given[0] == 1:
            x = x.expand(-1, expected[0], -1, -1)
        rows, columns = expected[1] - given[1], expected[2] - given[2]
        if min(rows, columns) >= 0:
            x = pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    require(
        tuple(x.shape[1:]) == expected,
        f"uncertainty.ood {name} has inputs of shape {given}, which cannot be made {expected} by padding; give inputs "
        "of the shape of the training set",
    )
    return x[: len(dataset.test_x)].to(dataset.test_x.dtype)


def _from_file(path: Path) -> Tensor:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            array = found
        else:
            key = next((key for key in ("x", "test_x") if key in found.files), None)
            require(key is not None, f"{path} must hold an array x, or test_x, got {', '.join(found.files) or 'none'}")
            array = found[str(key)]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read the inputs {path}: {' '.join(str(error).split())}") from None
    require(
        array.dtype in (np.uint8, np.int64) or np.issubdtype(array.dtype, np.floating),
        f"{path} must hold bytes, floating point numbers or tokens (int64), got {array.dtype}",
    )
    require(array.ndim >= 2 and len(array) > 0, f"{path} must hold samples first, got shape {array.shape}")
    return torch.from_numpy(np.ascontiguousarray(array))
