"""Your own arrays in one .npz file."""

import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fl_lightning.data.augment import Name
from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import assemble, fingerprint
from fl_lightning.data.readers.memory_map import Array, mapped
from fl_lightning.errors import UserError, require
from fl_lightning.models.likelihoods import TaskName as Task
from fl_lightning.system.memory import require_room_for_data

VERSION = 1


@dataclass(frozen=True)
class Arrays(Source):
    """Your own arrays in an .npz file: train_x, train_y, test_x, test_y, and if you like owners.

    Attributes:
        path: The file. Inputs are bytes (images, channels first), floating point numbers or tokens (whole numbers,
            samples x positions), labels whole numbers from 0 on or other targets (task); several inputs of a model are
            train_x.NAME and test_x.NAME. Without test_x and test_y a share of the training samples is tested on. owners
            numbers or names the client of each training sample; mean and std standardise bytes, 0.5 and 0.5 if absent;
            vocabulary is the number of different tokens, if there are more than occur.
        test_share: Share of every class that becomes the test set, where the file has none; the same for every seed.
        augment: Augmentation of training images that are bytes. none; standard: random crop and flip; paper: crop,
            flip, AutoAugment and Cutout.
        task: What the targets are. classification: whole numbers from 0 on; binary: 0 or 1; multilabel: 0 or 1 for each
            of several labels; regression: real numbers; tokens: a whole number for each position of the inputs, -100
            where there is none. auto reads them from type and shape.
        noise: Standard deviation of the targets of a regression around the model.
    """

    path: str = ""
    test_share: float = 0.2
    augment: Name = "none"
    task: Task = "auto"
    noise: float = 1.0

    def __post_init__(self) -> None:
        assemble.given_path(self.path, "my.npz")
        assemble.check_share(self.test_share)

    def load(self) -> Dataset:
        file = assemble.given_path(self.path, "my.npz")
        settings = {"reader": "arrays", "version": VERSION, "test_share": self.test_share}
        with assemble.blaming(file):
            arrays = mapped({"": file}, self._read, settings | assemble.task_setting(self.task))
            return assemble.dataset(arrays, self.augment, self.task, self.noise)

    def fingerprint(self) -> str:
        return fingerprint.of_files({"": assemble.given_path(self.path, "my.npz")})

    def _read(self) -> dict[str, Array]:
        file = assemble.given_path(self.path, "my.npz")
        try:
            require(zipfile.is_zipfile(file), "expected an .npz file with arrays; write it with np.savez")
            require_room_for_data("it", _unpacked_bytes(file))
            with np.load(file, allow_pickle=False) as content:
                arrays = {name: content[name] for name in content.files}
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            if "Object arrays" in reason:
                reason = "an array of Python objects, which could hide code"
            raise UserError(f"not an .npz file of plain arrays ({reason}); write it again with np.savez") from None
        return assemble.complete(arrays, self.test_share, self.task)


def _unpacked_bytes(file: Path) -> int:
    """What the arrays take, as their headers say; refused where the file does not hold as much."""
    total = 0
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as opened:
                version = np.lib.format.read_magic(opened)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                require(version in read, f"{entry.filename} is of an unknown version; write it again with np.savez")
                shape, _, kind = read[version](opened)
                size = math.prod(shape) * kind.itemsize
                require(
                    kind.hasobject or opened.tell() + size == entry.file_size,
                    f"{entry.filename} says that it holds an array of shape {shape}, which the file does not; "
                    "write it again with np.savez",
                )
            total += size
    return total
