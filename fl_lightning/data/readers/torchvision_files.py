"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 in torchvision's layout; torchvision downloads what is missing.

CIFAR's files are pickles, which may run code when they are read. So only the official files are, known by their MD5
sums; they are decoded once and mapped from then on (`memory_map`). An IDX file is a header and the plain bytes of the
images, so the file itself is mapped: several runs on one machine share one copy.
"""

import io
import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.augment import Name as Augmentation
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.readers import fingerprint
from fl_lightning.data.readers.fingerprint import data_root
from fl_lightning.data.readers.memory_map import Array, mapped
from fl_lightning.errors import UserError, require

Mnist: TypeAlias = Literal["MNIST", "FashionMNIST"]
Cifar: TypeAlias = Literal["CIFAR10", "CIFAR100"]

# Of a server that does not answer, per connection.
PATIENCE_SECONDS = 8.0
VERSION = 1  # of prepared copies
# MD5 sums of the official files, unpacked; torchvision knows those of the archives.
OFFICIAL: dict[Mnist, dict[str, str]] = {
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


class DownloadError(Exception):
    """No address gave the file."""


class Archive(NamedTuple):
    """A file that torchvision can download."""

    name: str
    md5: str
    addresses: Sequence[str]


def mnist(name: Mnist, root: str | None, mean: float, std: float) -> Dataset:
    """Read the IDX files in `root/name/raw`."""
    folder = data_root(root) / name / "raw"
    files = [folder / file for file in OFFICIAL[name]]
    if not all(file.is_file() for file in files):
        from torchvision import datasets

        source: Any = getattr(datasets, name)
        archives = [Archive(file, md5, [mirror + file for mirror in source.mirrors]) for file, md5 in source.resources]
        _complete(name, folder, files, archives)
    train_x, train_y = _idx_half(folder, "train")
    test_x, test_y = _idx_half(folder, "t10k")
    return Dataset(train_x, train_y, test_x, test_y, num_classes=10, mean=(mean,), std=(std,))


def mnist_content(name: Mnist, root: str | None) -> str | None:
    """A hash of the IDX files that are there; None for the official ones, which are also what a download brings."""
    folder = data_root(root) / name / "raw"
    files = {file: folder / file for file in OFFICIAL[name] if (folder / file).is_file()}
    return fingerprint.unless_official(files, OFFICIAL[name], root)


def cifar(name: Cifar, root: str | None, augmentation: Augmentation) -> Dataset:
    """Read the batches in `root`, the official ones; pixels go from -1 to 1, as in the paper."""
    from torchvision import datasets

    source: Any = getattr(datasets, name)
    sums: dict[str, str] = dict(source.train_list + source.test_list)
    files = {file: data_root(root) / source.base_folder / file for file in sums}
    _complete(name, data_root(root), list(files.values()), [Archive(source.filename, source.tgz_md5, [source.url])])
    halves = {"train": source.train_list, "test": source.test_list}

    def read() -> dict[str, Array]:
        arrays = {}
        for half, listed in halves.items():
            batches = [_batch(files[file], md5) for file, md5 in listed]
            arrays[f"{half}_x"] = np.concatenate([images for images, _ in batches])
            arrays[f"{half}_y"] = np.concatenate([labels for _, labels in batches])
        return arrays

    arrays = mapped(files, read, {"reader": "cifar", "version": VERSION, "name": name}, root)
    tensors: dict[str, Any] = {key: torch.from_numpy(array) for key, array in arrays.items()}
    classes = 10 if name == "CIFAR10" else 100
    return Dataset(**tensors, num_classes=classes, mean=(0.5,), std=(0.5,), augment=augmentation)


def _batch(file: Path, md5: str) -> tuple[Array, Array]:
    """Images (n, 3, 32, 32) as bytes and labels of an official file."""
    from torchvision.datasets.utils import check_integrity

    try:
        if not check_integrity(file, md5):
            raise UserError(f"{_damaged(file, 'its checksum is wrong')}; for images of your own use --data arrays")
        with open(file, "rb") as opened:
            batch = pickle.load(opened, encoding="latin1")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; make it readable") from None
    labels = batch["labels"] if "labels" in batch else batch["fine_labels"]
    return batch["data"].reshape(-1, 3, 32, 32), np.asarray(labels, np.int64)


def _idx_half(folder: Path, prefix: str) -> tuple[Tensor, Tensor]:
    image_file, label_file = folder / f"{prefix}-images-idx3-ubyte", folder / f"{prefix}-labels-idx1-ubyte"
    images, labels = _idx(image_file, dimensions=3), _idx(label_file, dimensions=1)
    require(images.shape[1:] == (28, 28), _damaged(image_file, f"images of {images.shape[1:]}, not (28, 28)"))
    require(len(labels) == len(images), _damaged(label_file, f"{len(labels)} labels for {len(images)} images"))
    require(int(labels.max()) < 10, _damaged(label_file, f"label {int(labels.max())}, not 0 to 9"))
    return torch.from_numpy(images)[:, None], torch.from_numpy(labels).long()


def _idx(file: Path, dimensions: int) -> Array:
    """The bytes of an IDX file: pages are read when they are used, and are private as soon as they are written to."""
    try:
        with open(file, "rb") as opened:
            header = opened.read(4 + 4 * dimensions)
        length = file.stat().st_size
        shape = tuple(int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4))
        # Two zeros, 8 for bytes, the number of dimensions, their sizes.
        whole = header[:4] == bytes([0, 0, 8, dimensions]) and len(shape) == dimensions and min(shape) > 0
        if not whole or length != len(header) + np.prod(shape, dtype=object):
            raise UserError(_damaged(file, f"not a whole IDX file, {length} bytes"))
        return np.memmap(file, np.uint8, mode="c", offset=len(header), shape=shape)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error}; make it readable or choose another --data.root") from None


def _complete(name: str, place: Path, files: Sequence[Path], archives: Sequence[Archive]) -> None:
    """Unpack or download what is missing into a folder beside its place; so a file that is there is whole.

    Args:
        name: Of the dataset.
        place: Where the user may have put archives, and where they are unpacked.
        files: That are needed.
        archives: Their names, MD5 sums and addresses.
    """
    missing = [file for file in files if not file.is_file()]
    if not missing:
        return
    new = [folder for folder in (place, *place.parents) if not folder.exists()]
    try:
        place.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".", suffix=".part", dir=place) as part:
            for archive in archives:
                if place / archive.name.removesuffix(".gz") not in set(files) - set(missing):
                    _unpack(archive, place, part)
            for file in missing:
                file.parent.mkdir(exist_ok=True)
                os.replace(part / file.relative_to(place), file)
    except DownloadError as error:
        for folder in new:  # perhaps of a misspelt place
            folder.rmdir()
        raise UserError(
            f"{name} not found: expected {', '.join(file.name for file in files)} in {files[0].parent} (missing: "
            f"{', '.join(file.name for file in missing)}), or {', '.join(one.name for one in archives)} in {place}, "
            f"and the download failed ({error}); put them there, name another folder by --data.root or "
            "FL_LIGHTNING_DATA, or use --data digits, which needs no files"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot use {place} for {name}: {error}; choose another folder by --data.root or FL_LIGHTNING_DATA, or "
            "use --data digits, which needs no files"
        ) from None


def _unpack(archive: Archive, place: Path, part: str) -> None:
    """Unpack an archive that lies at its place, else download it; only official ones, whose content is known."""
    from torchvision.datasets.utils import check_integrity, download_url, extract_archive

    file = place / archive.name
    if file.is_file():
        require(check_integrity(file, archive.md5), _damaged(file, "its checksum is wrong"))
    else:
        file, reasons = Path(part, archive.name), []
        for address in archive.addresses:
            try:
                with _patient_and_silent():
                    download_url(address, part, archive.name, archive.md5)
                break
            except (OSError, HTTPException, RuntimeError) as error:  # the last one for a wrong checksum
                reasons.append(f"{address}: {' '.join(str(error).split())}")
        else:
            raise DownloadError("; ".join(reasons))
    extract_archive(file, part)


@contextmanager
def _patient_and_silent() -> Iterator[None]:
    """Without torchvision's progress bars; a server that does not answer is given up."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE_SECONDS)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)


def _damaged(file: Path, what: str) -> str:
    return f"{file} is damaged ({what}); delete it so that it is downloaded again, or replace it by a good copy"
