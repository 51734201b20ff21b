"""What a user's targets are: classes, yes or no, several labels, real numbers, or a class for every token."""

from collections.abc import Mapping

import numpy as np
import torch

from fl_lightning.data.readers.memory_map import Array
from fl_lightning.errors import UserError, require
from fl_lightning.models.likelihoods import TaskName, likelihood_of

# How a target is stored, by task.
TYPES = {"classification": np.int64, "binary": np.bool_, "multilabel": np.bool_, "tokens": np.int64}


def task_of(arrays: Mapping[str, Array], task: TaskName) -> TaskName:
    """The task, which `auto` takes from the type and shape of the targets.

    Whole numbers are classes; true and false are answers, or labels where there are several per sample; real numbers
    are a regression; a whole number for every token of the inputs is a class for each of them.
    """
    if task != "auto":
        return task
    y, x = arrays["train_y"], arrays.get("train_x")
    kind = "i" if y.dtype.kind == "u" else y.dtype.kind
    one_hot = y.ndim == 2 and y.size > 0 and bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all())
    if kind == "f" and y.ndim in (1, 2) and not one_hot:
        other = "classification" if y.ndim == 1 else "multilabel"
        require(
            bool((y != np.floor(y)).any()),
            f"train_y holds whole numbers as {y.dtype}, classes or amounts; say --data.task {other} or regression",
        )
        return "regression"
    if kind == "b" and y.ndim in (1, 2):
        return "binary" if y.ndim == 1 else "multilabel"
    if kind == "i" and y.ndim == 2:
        if x is not None and x.dtype == np.int64 and x.shape == y.shape:
            return "tokens"
        if y.size and bool(((y == 0) | (y == 1)).all()) and not one_hot:
            return "multilabel"
    remedy = "np.unique(y, return_inverse=True)[1] makes them"
    if y.ndim == 2:
        remedy = "use argmax(1) on one-hot labels, or say --data.task multilabel"
    require(
        kind == "i" and y.ndim == 1,
        f"train_y must hold one whole number per sample, got {y.dtype} of shape {y.shape}; {remedy}",
    )
    return "classification"


def converted(name: str, y: Array, task: str) -> Array:
    """Targets in the type in which they are stored."""
    require(
        y.dtype.kind in "biuf" and y.dtype.itemsize <= 8,
        f"{name} must hold numbers, got {y.dtype}; np.unique(y, return_inverse=True)[1] makes numbers of names",
    )
    if task == "regression":
        return y.astype(y.dtype.newbyteorder("=") if y.dtype.kind == "f" and y.dtype.itemsize >= 4 else np.float32)
    broken = y != np.floor(y) if y.dtype.kind == "f" else np.zeros(1, bool)
    if broken.any():
        raise UserError(f"{name} must hold whole numbers for {task}, got {float(y[broken][0]):g}")
    if task in ("binary", "multilabel"):
        odd = y[(y != 0) & (y != 1)]
        require(len(odd) == 0, f"{name} must hold nothing but 0 and 1 for {task}, got {float(odd[:1].sum()):g}")
    return y.astype(TYPES[task])


def number_of_outputs(arrays: Mapping[str, Array], task: str) -> int:
    """Classes, labels or targets of complete arrays."""
    y = arrays["train_y"]
    if task == "binary":
        return 1
    if task in ("regression", "multilabel"):
        return 1 if y.ndim == 1 else y.shape[1]
    number = 1 + max(int(arrays[name].max(initial=0)) for name in ("train_y", "test_y"))
    if task == "tokens":
        return number
    present = np.unique(y)
    if number - len(present) > 0 and present.min(initial=0) >= 0:
        gaps = np.flatnonzero(present != np.arange(len(present)))  # not arange(number): a label may be 2^40
        missing = gaps[0] if len(gaps) else len(present)
        raise UserError(
            f"every class from 0 to {number - 1} must have training samples, but class {missing} has none; "
            "number the labels from 0 without gaps"
        )
    require(number > 1, "expected labels of at least two classes, got 0 alone")
    return number


def strata(y: Array, task: str) -> Array:
    """A whole number for each sample, by which samples are divided evenly: its class, mostly."""
    if task == "classification":
        return y
    found = likelihood_of(task).strata(torch.from_numpy(y))
    return np.zeros(len(y), np.int64) if found is None else found.numpy()
