"""From a user's own arrays to a `Dataset`: names, types and labels checked, a test set split off if there is none."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_lightning.data.dataset import Dataset, check_finite
from fl_lightning.data.readers import targets
from fl_lightning.data.readers.memory_map import Array
from fl_lightning.errors import UserError, require, unknown
from fl_lightning.models.inputs import Inputs
from fl_lightning.models.likelihoods import TaskName, likelihood_of
from fl_lightning.streams import numpy_generator

TRAIN, TEST = ("train_x", "train_y"), ("test_x", "test_y")
INPUTS = ("train_x", "test_x")
OPTIONAL = ("owners", "mean", "std", "vocabulary")
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


def complete(arrays: Mapping[str, Any], test_share: float, task: TaskName = "auto") -> dict[str, Array]:
    """The user's arrays as `dataset` takes them, or `UserError`; a test share is split off if they have no test set.

    Args:
        arrays: `train_x`, `train_y`, and if present `test_x`, `test_y`, `owners`, `mean`, `std`, `vocabulary`. Several
            inputs are `train_x.NAME` for each of them, or a dict or tuple of arrays under `train_x`.
        test_share: Of the samples, where there is no test set.
        task: What the targets are.
    """
    arrays = _one_by_one(arrays)
    for name in arrays:
        if name.partition(".")[0] not in INPUTS and name not in TRAIN + TEST + OPTIONAL:
            raise unknown("array", name, TRAIN + TEST + OPTIONAL)
    present = {name.partition(".")[0] for name in arrays}
    for name in TRAIN + (TEST if set(TEST) & present else ()):
        require(name in present, f"expected arrays train_x, train_y, test_x, test_y, got {', '.join(arrays) or 'none'}")
    known = {name: _array(name, value) for name, value in arrays.items()}
    for name in inputs_of(known, "train_x") + inputs_of(known, "test_x"):
        known[name] = _inputs(name, known[name])
    found = targets.task_of(known, task)
    for name in ("train_y", "test_y"):
        if name in known:
            known[name] = targets.converted(name, known[name], found)
    if "owners" in known:
        known["owners"] = _owners(known["owners"])
    if "test_x" not in present:
        known = split_off_test(known, test_share, found)
    dataset(known, task=found)  # refuses what does not fit before a copy of it is prepared
    return known


def dataset(arrays: Mapping[str, Array], augment: str = "none", task: TaskName = "auto", noise: float = 1.0) -> Dataset:
    """The dataset of complete arrays; it shares their memory."""
    likelihood = likelihood_of(targets.task_of(arrays, task), noise)
    tensors = {name: torch.from_numpy(arrays[name]) for name in ("train_y", "test_y", "owners") if name in arrays}
    mean, std = (tuple(map(float, arrays.get(name, default))) for name, default in (("mean", CENTRE), ("std", SCALE)))
    return Dataset(
        train_x=_together(arrays, "train_x"),
        train_y=tensors["train_y"],
        test_x=_together(arrays, "test_x"),
        test_y=tensors["test_y"],
        num_classes=targets.number_of_outputs(arrays, likelihood.task),
        mean=mean,
        std=std,
        augment=augment,
        owners=tensors.get("owners"),
        likelihood=likelihood,
        vocabulary=int(arrays["vocabulary"][0]) if "vocabulary" in arrays else None,
    )


def stored(arrays: Mapping[str, Array], **more: Any) -> Dataset:
    """The `Dataset` of a reader that also says how many `classes` and `tokens` there are; 0 tokens: no text."""
    tensors: dict[str, Any] = {n: torch.from_numpy(arrays[n]) for n in (*TRAIN, *TEST, "owners") if n in arrays}
    classes, tokens = (int(arrays[name][0]) for name in ("classes", "tokens"))
    return Dataset(**tensors, **more, num_classes=classes, vocabulary=tokens or None)


def task_setting(task: TaskName) -> dict[str, str]:
    """What prepared arrays depend on if the user says what the targets are."""
    return {} if task == "auto" else {"task": task}


def inputs_of(arrays: Mapping[str, Any], half: str) -> list[str]:
    """The names of the inputs of one half, one or several.

    >>> inputs_of({"train_x.image": 0, "train_x.age": 0, "train_y": 0}, "train_x")
    ['train_x.image', 'train_x.age']
    """
    return [name for name in arrays if name.partition(".")[0] == half]


def _one_by_one(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays with a name of its own for each of several inputs."""
    flat: dict[str, Any] = {}
    for name, value in arrays.items():
        if name in INPUTS and isinstance(value, Mapping):
            flat |= {f"{name}.{key}": one for key, one in value.items()}
        elif name in INPUTS and isinstance(value, tuple):
            flat |= {f"{name}.{place}": one for place, one in enumerate(value)}
        else:
            flat[name] = value
    return flat


def _together(arrays: Mapping[str, Array], half: str) -> Inputs:
    """The inputs as a dataset has them: a tensor, a tuple where they are numbered, or a dict."""
    names = sorted(inputs_of(arrays, half))
    require(
        names == [half] or half not in names,
        f"expected {half} or {half}.NAME for each of several inputs, got both: {', '.join(names)}",
    )
    if names == [half]:
        return torch.from_numpy(arrays[half])
    several = {name.partition(".")[2]: torch.from_numpy(arrays[name]) for name in names}
    if set(several) == set(map(str, range(len(several)))):
        return tuple(several[str(place)] for place in range(len(several)))
    return several


def split_off_test(arrays: Mapping[str, Array], share: float, task: str = "classification") -> dict[str, Array]:
    """Move a fixed share of every class from the training to the test set.

    It depends on the data alone, not on the run's seed. One sample of every class and of every owner stays behind.

    >>> arrays = {"train_x": np.arange(10), "train_y": np.array([0] * 6 + [1] * 4)}
    >>> {name: len(array) for name, array in split_off_test(arrays, 0.5).items()}
    {'train_x': 5, 'train_y': 5, 'test_x': 5, 'test_y': 5}
    """
    inputs = inputs_of(arrays, "train_x")
    for name in inputs:
        require(
            len(arrays[name]) == len(arrays["train_y"]) > 0,
            f"{name} and train_y must have the same number of samples, at least 1, got {len(arrays[name])} and "
            f"{len(arrays['train_y'])}",
        )
    labels = targets.strata(arrays["train_y"], task)
    order = numpy_generator(0, "test share").permutation(len(labels))
    stays = np.zeros(len(labels), bool)
    for column in (labels, arrays.get("owners", labels)):
        require(len(column) == len(labels), f"owners needs {len(labels)} entries, one per sample, got {len(column)}")
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
    split = {name: arrays[name][~is_test] for name in (*inputs, "train_y", "owners") if name in arrays}
    tested = {name.replace("train", "test", 1): arrays[name][is_test] for name in (*inputs, "train_y")}
    rest = {name: arrays[name] for name in ("mean", "std", "vocabulary") if name in arrays}
    return split | tested | rest


def _array(name: str, value: Any) -> Array:
    try:
        array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} must be an array of numbers, got {type(value).__name__} ({error})") from None
    if name in ("mean", "std", "vocabulary"):
        array = np.atleast_1d(array)
        require(array.ndim == 1 and array.dtype.kind in "fiu", f"{name} must be one number per channel")
    return np.ascontiguousarray(array)


def _inputs(name: str, x: Array) -> Array:
    remedy = "save it as uint8 (images) or float32"
    require(
        0 not in x.shape[1:], f"{name} must hold at least one number per sample, got shape {x.shape}; save it again"
    )
    if x.dtype.kind in "iu" and x.dtype != np.uint8 and x.ndim == 2:
        return x.astype(np.int64)  # tokens
    require(
        x.dtype == np.uint8 or x.dtype.kind == "f",
        f"{name} must hold bytes, floating point or tokens (whole numbers, samples x positions), got {x.dtype} of "
        f"shape {x.shape}; {remedy}",
    )
    require(x.dtype.itemsize <= 8, f"{name} must hold at most 64 bits per number, got {x.dtype}; {remedy}")
    require(x.ndim >= 2, f"{name} needs at least 2 dimensions, samples first, got {x.shape}")
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    if x.dtype.kind == "f" and x.size:
        check_finite(name, torch.from_numpy(x))  # before a test set is split off, which numbers the samples anew
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]  # grey images
    require(
        x.dtype != np.uint8 or x.ndim != 4 or x.shape[1] <= 4 or x.shape[3] > 4,
        f"{name} must have shape (samples, channels, height, width), got {x.shape}, which looks like channels last; "
        f"save {name}.transpose(0, 3, 1, 2)",
    )
    return x


def _owners(owners: Array) -> Array:
    """Numbers as they are, names in the order of the alphabet."""
    require(
        owners.ndim == 1 and owners.dtype.kind in "iuU",
        f"owners must hold one whole number or name per training sample, got {owners.dtype} of shape {owners.shape}",
    )
    if owners.dtype.kind == "U":
        return np.unique(owners, return_inverse=True)[1].astype(np.int64)
    return owners.astype(np.int64)
