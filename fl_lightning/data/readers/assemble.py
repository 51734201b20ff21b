"""From a user's own arrays to a `Dataset`: names, types and labels checked, a test set split off if there is none."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning.data.dataset import Dataset
from fl_lightning.data.readers.mapped import Array
from fl_lightning.errors import UserError, require, unknown
from fl_lightning.streams import numpy_generator

TRAIN, TEST = ("train_x", "train_y"), ("test_x", "test_y")
OPTIONAL = ("owners", "mean", "std")
# Of byte images, unless the user says otherwise: from -1 to 1.
CENTRE = SCALE = (0.5,)


def given_path(path: str, example: str) -> Path:
    """The setting `data.path`, which has no default that makes sense."""
    require(path != "", f"data.path is missing: name your data, for example --data.path {example}")
    return Path(path).expanduser()


def check_share(share: float) -> None:
    require(0 < share < 1, f"data.test_share must be > 0 and < 1, got {share:g}; 0.2 is a common choice")


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Put the name of the file before a complaint about what it holds."""
    try:
        yield
    except UserError as error:
        message = str(error)
        raise UserError(message if str(path) in message else f"{path}: {message}") from None


def complete(arrays: Mapping[str, Any], test_share: float) -> dict[str, Array]:
    """The user's arrays as `dataset` takes them, or `UserError`; a test share is split off if they have no test set.

    Args:
        arrays: `train_x`, `train_y`, and if present `test_x`, `test_y`, `owners`, `mean`, `std`.
        test_share: Of the samples, where there is no test set.
    """
    for name in arrays:
        if name not in TRAIN + TEST + OPTIONAL:
            raise unknown("array", name, TRAIN + TEST + OPTIONAL)
    for name in TRAIN + (TEST if set(TEST) & set(arrays) else ()):
        require(name in arrays, f"expected arrays train_x, train_y, test_x, test_y, got {', '.join(arrays) or 'none'}")
    known = {name: _array(name, value) for name, value in arrays.items()}
    for half in ("train", "test"):
        if f"{half}_x" in known:
            known[f"{half}_x"] = _inputs(f"{half}_x", known[f"{half}_x"])
            known[f"{half}_y"] = _labels(f"{half}_y", known[f"{half}_y"])
    if "owners" in known:
        known["owners"] = _owners(known["owners"])
    if "test_x" not in known:
        known = split_off_test(known, test_share)
    dataset(known)  # refuses what does not fit before a copy of it is prepared
    return known


def dataset(arrays: Mapping[str, Array], augment: str = "none") -> Dataset:
    """The dataset of complete arrays; it shares their memory."""
    names = [name for name in (*TRAIN, *TEST, "owners") if name in arrays]
    tensors: dict[str, Any] = {name: torch.from_numpy(arrays[name]) for name in names}
    num_classes = 1 + max(int(arrays[name].max(initial=0)) for name in ("train_y", "test_y"))
    present = np.unique(arrays["train_y"])
    if num_classes - len(present) > 0 and present.min(initial=0) >= 0:
        gaps = np.flatnonzero(present != np.arange(len(present)))  # not arange(num_classes): a label may be 2^40
        missing = gaps[0] if len(gaps) else len(present)
        raise UserError(
            f"every class from 0 to {num_classes - 1} must have training samples, but class {missing} has none; "
            "number the labels from 0 without gaps"
        )
    require(num_classes > 1, "expected labels of at least two classes, got 0 alone")
    mean, std = (tuple(map(float, arrays.get(name, default))) for name, default in (("mean", CENTRE), ("std", SCALE)))
    return Dataset(**tensors, num_classes=num_classes, mean=mean, std=std, augment=augment)


def split_off_test(arrays: Mapping[str, Array], share: float) -> dict[str, Array]:
    """Move a fixed share of every class from the training to the test set.

    It depends on the data alone, not on the run's seed. One sample of every class and of every owner stays behind.

    >>> arrays = {"train_x": np.arange(10), "train_y": np.array([0] * 6 + [1] * 4)}
    >>> {name: len(array) for name, array in split_off_test(arrays, 0.5).items()}
    {'train_x': 5, 'train_y': 5, 'test_x': 5, 'test_y': 5}
    """
    inputs, labels = arrays["train_x"], arrays["train_y"]
    require(
        len(inputs) == len(labels) > 0,
        f"train_x and train_y must have the same number of samples, at least 1, got {len(inputs)} and {len(labels)}",
    )
    order = numpy_generator(0, "test share").permutation(len(labels))
    stays = np.zeros(len(labels), bool)
    for column in (labels, arrays.get("owners", labels)):
        require(len(column) == len(labels), f"owners must name one for each of {len(labels)} samples: {len(column)}")
        stays[np.unique(column[order], return_index=True)[1]] = True
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = labels[order] == label
        number = int(np.floor(share * members.sum() + 0.5))
        is_test[order[np.flatnonzero(members & ~stays)[:number]]] = True
    require(
        bool(is_test.any()),
        f"data.test_share {share:g} of {len(labels)} samples leaves no test set; raise it, or bring test_x and test_y",
    )
    split = {name: arrays[name][~is_test] for name in ("train_x", "train_y", "owners") if name in arrays}
    rest = {name: arrays[name] for name in ("mean", "std") if name in arrays}
    return split | {"test_x": inputs[is_test], "test_y": labels[is_test]} | rest


def _array(name: str, value: Any) -> Array:
    try:
        array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} must be an array of numbers, got {type(value).__name__} ({error})") from None
    if name in ("mean", "std"):
        array = np.atleast_1d(array)
        require(array.ndim == 1 and array.dtype.kind in "fiu", f"{name} must be one number per channel")
    return np.ascontiguousarray(array)


def _inputs(name: str, x: Array) -> Array:
    remedy = "save it as uint8 (images) or float32"
    require(
        x.dtype == np.uint8 or x.dtype.kind == "f", f"{name} must hold bytes or floating point, got {x.dtype}; {remedy}"
    )
    require(x.dtype.itemsize <= 8, f"{name} must hold at most 64 bits per number, got {x.dtype}; {remedy}")
    require(x.ndim >= 2, f"{name} must have samples as its first dimension and more than one, got {x.shape}")
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]  # grey images
    require(
        x.dtype != np.uint8 or x.ndim != 4 or x.shape[1] <= 4 or x.shape[3] > 4,
        f"{name} must have shape (samples, channels, height, width), got {x.shape}, which looks like channels last; "
        f"save {name}.transpose(0, 3, 1, 2)",
    )
    return x


def _labels(name: str, y: Array) -> Array:
    remedy = "use argmax(1) on one-hot labels" if y.ndim == 2 else "np.unique(y, return_inverse=True)[1] makes them"
    require(
        y.ndim == 1 and y.dtype.kind in "iu",
        f"{name} must hold one whole number per sample, got {y.dtype} of shape {y.shape}; {remedy}",
    )
    return y.astype(np.int64)


def _owners(owners: Array) -> Array:
    """Numbers as they are, names in the order of the alphabet."""
    require(
        owners.ndim == 1 and owners.dtype.kind in "iuU",
        f"owners must hold one whole number or name per training sample, got {owners.dtype} of shape {owners.shape}",
    )
    if owners.dtype.kind == "U":
        return np.unique(owners, return_inverse=True)[1].astype(np.int64)
    return owners.astype(np.int64)
