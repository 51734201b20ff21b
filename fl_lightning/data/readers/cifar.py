"""CIFAR-10 and CIFAR-100: pickled batches in torchvision's layout, or the archive they come in, else downloaded.

Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009. Names, addresses and checksums are
torchvision's. The batches are pickles, so they are decoded once and mapped from then on (`mapped.py`).
"""

import gzip
import hashlib
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from fl_lightning.data.augment import Name as Augmentation
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.readers import fingerprint, plain_pickle
from fl_lightning.data.readers.bounds import Bounded
from fl_lightning.data.readers.download import DownloadError, damaged, download, unusable, write_whole
from fl_lightning.data.readers.mapped import Array, mapped
from fl_lightning.data.readers.places import data_root
from fl_lightning.errors import UserError, require

Name: TypeAlias = Literal["CIFAR10", "CIFAR100"]

VERSION = 1
SHAPE = (3, 32, 32)
MOST_BYTES = 800_000_000  # four times all of the official files together
TOO_LARGE = f"it holds more than {MOST_BYTES // 1_000_000} MB"
# The paper's: pixels from -1 to 1.
MEAN = STD = (0.5,)


class Layout(NamedTuple):
    """What CIFAR-10 and CIFAR-100 differ in."""

    labels: str
    num_classes: int
    official_sizes: tuple[int, ...]  # images per file, training files first


LAYOUTS: dict[Name, Layout] = {
    "CIFAR10": Layout("labels", 10, (10_000,) * 6),
    "CIFAR100": Layout("fine_labels", 100, (50_000, 10_000)),
}


def load(name: Name, root: str | None, augmentation: Augmentation) -> Dataset:
    """Read the files under the root, after downloading the archive to it if they are missing."""
    from torchvision import datasets

    source: Any = getattr(datasets, name)
    files = _files(source, name, data_root(root))
    settings = {"reader": "cifar", "version": VERSION, "name": name}
    arrays = mapped(files, lambda: _read(source, name, files), settings, root)
    tensors: dict[str, Any] = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return Dataset(
        **tensors,
        num_classes=LAYOUTS[name].num_classes,
        mean=MEAN,
        std=STD,
        augment=augmentation,
    )


def content(name: Name, root: str | None) -> str | None:
    """A hash of the files if they are not the official ones, which are also what a download would bring."""
    from torchvision import datasets

    source: Any = getattr(datasets, name)
    folder = data_root(root)
    choices = (
        (_batches(source, folder), dict(source.train_list + source.test_list)),
        ({source.filename: folder / source.filename}, {source.filename: source.tgz_md5}),
    )
    for files, official in choices:
        if all(file.is_file() for file in files.values()):
            return fingerprint.unless_official(files, official, root)
    return None


def _batches(source: Any, folder: Path) -> dict[str, Path]:
    return {file: folder / source.base_folder / file for file, _ in source.train_list + source.test_list}


def _files(source: Any, name: Name, folder: Path) -> dict[str, Path]:
    """The batches, or the archive that holds them."""
    batches = _batches(source, folder)
    archive = folder / source.filename
    try:
        missing = [file for file, path in batches.items() if not path.is_file()]
        if not missing:
            return batches
        if not archive.is_file():
            write_whole(archive, download([source.url], source.tgz_md5))
        return {source.filename: archive}
    except DownloadError as error:
        raise UserError(
            f"{name} not found: expected {', '.join(batches)} in {folder / source.base_folder} (missing: "
            f"{', '.join(missing) if len(missing) < len(batches) else 'all'}), or {archive}, and the "
            f"download failed ({error}); put one of the two there, name another folder by --data.root or "
            "FL_LIGHTNING_DATA, or use --data digits, which needs no files"
        ) from None
    except OSError as error:
        raise unusable(folder, name, error) from None


def _read(source: Any, name: Name, files: Mapping[str, Path]) -> dict[str, Array]:
    """Images and labels of both halves, batch after batch."""
    checksums = dict(source.train_list + source.test_list)
    batches: dict[str, tuple[Array, Array]] = {}
    for file, path, content in _contents(source, checksums, files):
        images, labels = _decode(content, path, LAYOUTS[name])
        # Files of the official size are the official ones, or damaged; others may be somebody's own selection.
        official = dict(zip(checksums, LAYOUTS[name].official_sizes, strict=True))[file]
        if len(images) == official and _md5(content) != checksums[file]:
            raise UserError(
                damaged(path, "its checksum is wrong") + "; if you changed it on purpose, use --data arrays instead"
            )
        batches[file] = images, labels
    arrays = {}
    for half, listed in (("train", source.train_list), ("test", source.test_list)):
        arrays[f"{half}_x"] = np.concatenate([batches[file][0] for file, _ in listed])
        arrays[f"{half}_y"] = np.concatenate([batches[file][1] for file, _ in listed])
    return arrays


def _contents(source: Any, wanted: Mapping[str, str], files: Mapping[str, Path]) -> Iterator[tuple[str, Path, bytes]]:
    """Each batch with the file to blame for it."""
    archive = files.get(source.filename)
    try:
        if archive is None:
            for name, path in files.items():
                require(path.stat().st_size <= MOST_BYTES, damaged(path, TOO_LARGE))
                yield name, path, path.read_bytes()
            return
        missing = set(wanted)
        with (
            gzip.open(archive) as unpacked,
            Bounded(unpacked, MOST_BYTES, damaged(archive, TOO_LARGE)) as content,
            tarfile.open(fileobj=content, mode="r:") as members,
        ):
            for member in members:
                folder, _, name = member.name.removeprefix("./").rpartition("/")
                if folder == source.base_folder and name in missing:
                    require(member.isreg(), damaged(archive, f"{name} is a link or a device, not a file"))
                    missing.remove(name)
                    opened = members.extractfile(member)
                    yield name, archive, opened.read() if opened else b""
        require(not missing, damaged(archive, f"{', '.join(sorted(missing))} not in it"))
    except (gzip.BadGzipFile, EOFError, zlib.error, tarfile.TarError):
        raise UserError(damaged(archive or Path(), "not a whole .tar.gz file")) from None
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}; make it readable") from None


def _decode(content: bytes, path: Path, layout: Layout) -> tuple[Array, Array]:
    """Images (n, 3, 32, 32) as bytes and labels of one batch."""
    try:
        batch = plain_pickle.loads(content)
    except plain_pickle.RefusedError as refusal:
        raise UserError(damaged(path, str(refusal))) from None
    require(isinstance(batch, dict), damaged(path, "it holds no batch of images"))
    entries = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
    images, labels = entries.get("data"), entries.get(layout.labels)
    pixels = int(np.prod(SHAPE))
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (pixels,):
        raise UserError(damaged(path, f"its data are not rows of {pixels} bytes"))
    whole = isinstance(labels, np.ndarray | list) and all(isinstance(label, int | np.integer) for label in labels)
    if labels is None or not whole or len(labels) != len(images) or not len(labels):
        raise UserError(damaged(path, f"its {layout.labels} are not one whole number for each image"))
    if min(labels) < 0 or max(labels) >= layout.num_classes:
        bad = next(label for label in labels if not 0 <= label < layout.num_classes)
        raise UserError(damaged(path, f"label {bad}, not 0 to {layout.num_classes - 1}"))
    return images.reshape(-1, *SHAPE), np.asarray(labels, np.int64)


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
