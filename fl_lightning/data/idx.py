"""MNIST and its relatives: four IDX files in torchvision's layout, downloaded where they are missing.

Names, mirrors, checksums and the reader are torchvision's. The download is ours, because torchvision's prints progress
bars, may hang for minutes behind a firewall, and leaves half a file behind when it is killed, which it later takes for
a whole one.
"""

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal, TypeAlias
from urllib.error import HTTPError
from urllib.request import urlopen
from uuid import uuid4

from torch import Tensor

from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError, require

Name: TypeAlias = Literal["MNIST", "FashionMNIST"]

PATIENCE_SECONDS = 8.0


def data_root(root: str | None) -> Path:
    """The folder of all datasets: the setting, else the environment's, else the user's cache."""
    return Path(root or os.environ.get("FL_LIGHTNING_DATA") or "~/.cache/fl_lightning/data").expanduser()


def load(name: Name, root: str | None, mean: float, std: float) -> Dataset:
    """Read `root/name/raw`, after downloading to it what is missing."""
    folder = data_root(root) / name / "raw"
    _complete(name, folder)
    train_x, train_y = _read_half(folder, "train")
    test_x, test_y = _read_half(folder, "t10k")
    return Dataset(train_x, train_y, test_x, test_y, num_classes=10, mean=(mean,), std=(std,))


def _read_half(folder: Path, prefix: str) -> tuple[Tensor, Tensor]:
    from torchvision.datasets.mnist import read_image_file, read_label_file

    image_file, label_file = folder / f"{prefix}-images-idx3-ubyte", folder / f"{prefix}-labels-idx1-ubyte"
    images, labels = _read(read_image_file, image_file), _read(read_label_file, label_file)
    require(images.shape[1:] == (28, 28), _damaged(image_file, f"images of {tuple(images.shape[1:])}, not (28, 28)"))
    require(len(labels) == len(images), _damaged(label_file, f"{len(labels)} labels for {len(images)} images"))
    require(int(labels.max()) < 10, _damaged(label_file, f"label {int(labels.max())}, not 0 to 9"))
    return images[:, None], labels


def _read(reader: Callable[[str], Tensor], file: Path) -> Tensor:
    try:
        return reader(str(file))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error}; make it readable or choose another --data.root") from None
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError):
        # What torchvision raises for a file whose header or length is wrong, in this or that place.
        raise UserError(_damaged(file, f"not a whole IDX file, {file.stat().st_size} bytes")) from None


def _damaged(file: Path, what: str) -> str:
    return f"{file} is damaged ({what}); delete it so that it is downloaded again, or replace it by a good copy"


def _complete(name: Name, folder: Path) -> None:
    """Unpack or download the files that are missing, each one whole or not at all."""
    from torchvision import datasets

    source: Any = getattr(datasets, name)
    checksums = {archive.removesuffix(".gz"): md5 for archive, md5 in source.resources}
    try:
        missing = [file for file in checksums if not (folder / file).is_file()]
        for file in missing:
            archive = folder / f"{file}.gz"
            content = _unpacked(archive) if archive.is_file() else _download(file, checksums[file], source.mirrors)
            _write_whole(folder / file, content)
    except _DownloadError as error:
        raise UserError(
            f"{name} not found: expected {', '.join(checksums)} (or each as .gz) in {folder}, "
            f"{len(missing)} of {len(checksums)} are missing and the download failed ({error}); put them there, name "
            "another folder by --data.root or FL_LIGHTNING_DATA, or use --data digits, which needs no files"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot use {folder} for {name}: {error}; choose another folder by --data.root or FL_LIGHTNING_DATA, "
            "or use --data digits, which needs no files"
        ) from None


class _DownloadError(Exception):
    """No mirror gave the file."""


def _unpacked(archive: Path) -> bytes:
    try:
        return gzip.decompress(archive.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UserError(_damaged(archive, "not a whole gzip file")) from None


def _download(file: str, md5: str, mirrors: list[str]) -> bytes:
    reason = "no mirror is known"
    for mirror in mirrors:
        try:
            packed = _get(f"{mirror}{file}.gz")
        except HTTPError as error:
            error.close()
            reason = f"{mirror}: {error}"
            continue
        except (OSError, HTTPException) as error:
            reason = f"{mirror}: {getattr(error, 'reason', error)}"
            continue
        # Not for security: it tells the file from the login page of a hotel or a proxy.
        if hashlib.md5(packed, usedforsecurity=False).hexdigest() == md5:
            return gzip.decompress(packed)
        reason = f"{mirror} sent something else, its checksum is wrong"
    raise _DownloadError(" ".join(reason.split()))


def _get(url: str) -> bytes:
    """The content of a URL, or OSError if the first answer takes longer than our patience.

    A timeout of `urlopen` alone is no bound: it holds for each address of the host in turn, and not for the name
    lookup. So a thread asks, and is left behind if it hangs.
    """
    answers: SimpleQueue[Any] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urlopen(url, timeout=PATIENCE_SECONDS))
        except Exception as error:
            answers.put(error)

    Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=PATIENCE_SECONDS)
    except Empty:
        raise TimeoutError(f"no answer within {PATIENCE_SECONDS:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    with answer:
        content: bytes = answer.read()
    return content


def _write_whole(file: Path, content: bytes) -> None:
    """Write under a passing name and rename, so that nobody, not even a process beside us, sees half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    passing = file.with_name(f".{file.name}.{uuid4().hex}")
    try:
        passing.write_bytes(content)
        passing.replace(file)
    finally:
        passing.unlink(missing_ok=True)
