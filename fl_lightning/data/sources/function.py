"""Your own data from a Python function in one file."""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fl_lightning.data.augment import Name
from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import assemble
from fl_lightning.errors import UserError, require
from fl_lightning.models.inputs import named
from fl_lightning.models.likelihoods import TaskName as Task

FUNCTION = "load"


@dataclass(frozen=True)
class Function(Source):
    """Your own data from a Python file with a function load() that returns arrays or a Dataset.

    Attributes:
        path: The file, which is executed. load() returns a Dataset, a dict of arrays named as in --data arrays, or
            (train_x, train_y, test_x, test_y).
        test_share: Share of every class that becomes the test set, where a dict has none; the same for every seed.
        augment: Augmentation of training images that are bytes, unless load() returns a Dataset that names one.
            none; standard: random crop and flip; paper: crop, flip, AutoAugment and Cutout.
        task: What the targets are, unless load() returns a Dataset, which names it: classification, binary, multilabel,
            regression or tokens, as for --data arrays. auto reads them from type and shape.
        noise: Standard deviation of the targets of a regression around the model.
    """

    path: str = ""
    test_share: float = 0.2
    augment: Name = "none"
    task: Task = "auto"
    noise: float = 1.0

    def __post_init__(self) -> None:
        assemble.given_path(self.path, "my_data.py")
        assemble.check_share(self.test_share)

    def load(self) -> Dataset:
        dataset, _ = self._loaded()
        return dataset if dataset.augment != "none" else replace(dataset, augment=self.augment)

    def fingerprint(self) -> str:
        """Of the file and of what it returns: it may read other files, which no setting names."""
        return self._loaded()[1]

    def _loaded(self) -> tuple[Dataset, str]:
        file = assemble.given_path(self.path, "my_data.py")
        try:
            return _load(file.resolve(), file.read_bytes(), self.test_share, self.task, self.noise)
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}; name a Python file by --data.path") from None


# A run asks for its data once, and for what it is known by again and again: the function is called once per process.
@lru_cache(maxsize=1)
def _load(file: Path, code: bytes, test_share: float, task: Task, noise: float) -> tuple[Dataset, str]:
    """What the file returns, and a hash of both."""
    with assemble.blaming(file):
        returned = _call(file, code)
        if isinstance(returned, tuple) and len(returned) == 4:
            returned = dict(zip(assemble.TRAIN + assemble.TEST, returned, strict=True))
        if isinstance(returned, Mapping):
            returned = assemble.dataset(assemble.complete(returned, test_share, task), task=task, noise=noise)
        require(
            isinstance(returned, Dataset),
            f"{FUNCTION}() must return a Dataset, a dict of arrays or (train_x, train_y, test_x, test_y), got "
            f"{type(returned).__name__}",
        )
    return returned, _hash(code, returned)


def _call(file: Path, code: bytes) -> Any:
    name = f"fl_lightning_data_{file.stem}"
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(file))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses look their module up while it is executed
    try:
        exec(compile(code, str(file), "exec"), vars(module))
        function = getattr(module, FUNCTION, None)
        require(callable(function), f"expected a function {FUNCTION}() in this file, found none")
        return function() if function else None
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        raise UserError(f"{file}: {where}{type(error).__name__}: {' '.join(str(error).split())}") from error


def _hash(code: bytes, dataset: Dataset) -> str:
    whole = hashlib.sha256(hashlib.sha256(code).digest())
    parts = {name: getattr(dataset, name) for name in (*assemble.TRAIN, *assemble.TEST, "owners")}
    for part, tensors in parts.items():
        for name, tensor in named(tensors, part).items() if tensors is not None else ():
            whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            whole.update(tensor.cpu().contiguous().numpy().data)
    return whole.hexdigest()[:32]
