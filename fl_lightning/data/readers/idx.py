"""MNIST and its relatives: four IDX files in torchvision's layout, downloaded where they are missing.

An IDX file is a header and the plain bytes of the images, so the file itself is mapped into memory: several runs on
one machine share one copy.
"""

import gzip
import io
import zlib
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.dataset import Dataset
from fl_lightning.data.readers import fingerprint
from fl_lightning.data.readers.bounds import Bounded
from fl_lightning.data.readers.download import DownloadError, damaged, download, unusable, write_whole
from fl_lightning.data.readers.mapped import Array
from fl_lightning.data.readers.places import data_root
from fl_lightning.errors import UserError, require

Name: TypeAlias = Literal["MNIST", "FashionMNIST"]

# MD5 sums of the official files, unpacked; torchvision knows those of the archives.
OFFICIAL: dict[Name, dict[str, str]] = {
    "MNIST": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "FashionMNIST": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}

UNSIGNED_BYTE = 8  # the third byte of the header; the fourth is the number of dimensions, their sizes follow
MOST_BYTES = 200_000_000  # four times the largest of the official files
TOO_LARGE = f"it holds more than {MOST_BYTES // 1_000_000} MB"


def load(name: Name, root: str | None, mean: float, std: float) -> Dataset:
    """Read `root/name/raw`, after downloading to it what is missing."""
    folder = data_root(root) / name / "raw"
    _complete(name, folder)
    train_x, train_y = _read_half(folder, "train")
    test_x, test_y = _read_half(folder, "t10k")
    return Dataset(train_x, train_y, test_x, test_y, num_classes=10, mean=(mean,), std=(std,))


def content(name: Name, root: str | None) -> str | None:
    """A hash of the files that are there, packed or not, if they are not the official ones, which a download brings."""
    folder = data_root(root) / name / "raw"
    places = {file: (folder / file, folder / f"{file}.gz") for file in OFFICIAL[name]}
    found = {file: next((path for path in paths if path.is_file()), None) for file, paths in places.items()}
    files = {file: path for file, path in found.items() if path is not None}
    return fingerprint.unless_official(files, OFFICIAL[name], root, "unpacked md5")


def _read_half(folder: Path, prefix: str) -> tuple[Tensor, Tensor]:
    image_file, label_file = folder / f"{prefix}-images-idx3-ubyte", folder / f"{prefix}-labels-idx1-ubyte"
    images, labels = _map(image_file, dimensions=3), _map(label_file, dimensions=1)
    require(images.shape[1:] == (28, 28), damaged(image_file, f"images of {images.shape[1:]}, not (28, 28)"))
    require(len(labels) == len(images), damaged(label_file, f"{len(labels)} labels for {len(images)} images"))
    require(int(labels.max()) < 10, damaged(label_file, f"label {int(labels.max())}, not 0 to 9"))
    return torch.from_numpy(images)[:, None], torch.from_numpy(labels).long()


def _map(file: Path, dimensions: int) -> Array:
    """The values of a file: its pages are read when they are used, and are private as soon as they are written to."""
    try:
        with open(file, "rb") as opened:
            header = opened.read(4 + 4 * dimensions)
        length = file.stat().st_size
        shape = tuple(int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4))
        whole = header[:4] == bytes([0, 0, UNSIGNED_BYTE, dimensions]) and len(shape) == dimensions and min(shape) > 0
        if not whole or length != len(header) + np.prod(shape, dtype=object):
            raise UserError(damaged(file, f"not a whole IDX file, {length} bytes"))
        return np.memmap(file, np.uint8, mode="c", offset=len(header), shape=shape)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error}; make it readable or choose another --data.root") from None


def _complete(name: Name, folder: Path) -> None:
    """Unpack or download the files that are missing, each one whole or not at all."""
    from torchvision import datasets

    source: Any = getattr(datasets, name)
    checksums = {archive.removesuffix(".gz"): md5 for archive, md5 in source.resources}
    try:
        missing = [file for file in checksums if not (folder / file).is_file()]
        for file in missing:
            archive = folder / f"{file}.gz"
            if archive.is_file():
                require(archive.stat().st_size <= MOST_BYTES, damaged(archive, TOO_LARGE))
                packed = archive.read_bytes()
            else:
                packed = download([f"{mirror}{file}.gz" for mirror in source.mirrors], checksums[file])
            write_whole(folder / file, _unpacked(archive, packed))
    except DownloadError as error:
        raise UserError(
            f"{name} not found: expected {', '.join(checksums)} (or each as .gz) in {folder}, "
            f"{len(missing)} of {len(checksums)} are missing and the download failed ({error}); put them there, name "
            "another folder by --data.root or FL_LIGHTNING_DATA, or use --data digits, which needs no files"
        ) from None
    except OSError as error:
        raise unusable(folder, name, error) from None


def _unpacked(archive: Path, packed: bytes) -> bytes:
    try:
        with gzip.open(io.BytesIO(packed)) as content:
            return Bounded(content, MOST_BYTES, damaged(archive, TOO_LARGE)).read()
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UserError(damaged(archive, "not a whole gzip file")) from None
