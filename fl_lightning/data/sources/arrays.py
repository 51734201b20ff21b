"""Your own arrays in one .npz file."""

import zipfile
import zlib
from dataclasses import dataclass

import numpy as np

from fl_lightning.data.augment import Name
from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import assemble, fingerprint
from fl_lightning.data.readers.mapped import Array, mapped
from fl_lightning.errors import UserError, require

VERSION = 1


@dataclass(frozen=True)
class Arrays(Source):
    """Your own arrays in an .npz file: train_x, train_y, test_x, test_y, and if you like owners.

    Attributes:
        path: The file. Inputs are bytes (images, channels first) or floating point numbers, labels whole numbers from
            0 on; without test_x and test_y a share of the training samples is tested on. owners numbers or names the
            client of each training sample; mean and std standardise bytes, 0.5 and 0.5 if absent.
        test_share: Share of every class that becomes the test set, where the file has none; the same for every seed.
        augment: Augmentation of training images that are bytes. none; standard: random crop and flip; paper: crop,
            flip, AutoAugment and Cutout.
    """

    path: str = ""
    test_share: float = 0.2
    augment: Name = "none"

    def __post_init__(self) -> None:
        assemble.given_path(self.path, "my.npz")
        assemble.check_share(self.test_share)

    def load(self) -> Dataset:
        file = assemble.given_path(self.path, "my.npz")
        settings = {"reader": "arrays", "version": VERSION, "test_share": self.test_share}
        with assemble.blaming(file):
            return assemble.dataset(mapped({"": file}, self._read, settings), self.augment)

    def fingerprint(self) -> str:
        return fingerprint.of_files({"": assemble.given_path(self.path, "my.npz")})

    def _read(self) -> dict[str, Array]:
        file = assemble.given_path(self.path, "my.npz")
        try:
            require(zipfile.is_zipfile(file), "expected an .npz file with arrays; write it with np.savez")
            with np.load(file, allow_pickle=False) as content:
                arrays = {name: content[name] for name in content.files}
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            if "Object arrays" in reason:
                reason = "an array of Python objects, which could hide code"
            raise UserError(f"not an .npz file of plain arrays ({reason}); write it again with np.savez") from None
        return assemble.complete(arrays, self.test_share)
