"""Small files of CIFAR's format."""

import gzip
import hashlib
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np

from fl_lightning.data.sources.cifar10 import Cifar10
from fl_lightning.data.sources.cifar100 import Cifar100

SOURCES = {"CIFAR10": Cifar10, "CIFAR100": Cifar100}
FOLDERS = {"CIFAR10": "cifar-10-batches-py", "CIFAR100": "cifar-100-python"}
ARCHIVES = {"CIFAR10": "cifar-10-python.tar.gz", "CIFAR100": "cifar-100-python.tar.gz"}
TRAIN = {"CIFAR10": [f"data_batch_{i}" for i in range(1, 6)], "CIFAR100": ["train"]}
TEST = {"CIFAR10": "test_batch", "CIFAR100": "test"}
KEYS = {"CIFAR10": b"labels", "CIFAR100": b"fine_labels"}
CLASSES = {"CIFAR10": 10, "CIFAR100": 100}


def batch(name, number, size=100, **changes):
    """One batch as Python sees it: every class occurs."""
    pixels = np.random.default_rng(number).integers(256, size=(size, 3072), dtype=np.uint8)
    labels = [(number + i) % CLASSES[name] for i in range(size)]
    return {b"data": pixels, KEYS[name]: labels, b"coarse_labels": [0] * size, b"batch_label": b"some"} | changes


def packed(name):
    """The content of all files by name."""
    batches = {file: batch(name, i) for i, file in enumerate([*TRAIN[name], TEST[name]])}
    return {file: pickle.dumps({key.decode(): v for key, v in one.items()}, 2) for file, one in batches.items()}


def write(root: Path, name, content=None):
    """The layout of the unpacked archive; returns the folder of the batches."""
    folder = root / FOLDERS[name]
    folder.mkdir(parents=True)
    for file, data in (content or packed(name)).items():
        (folder / file).write_bytes(data)
    return folder


def archive(name, content=None):
    """The bytes of the .tar.gz file."""
    target = io.BytesIO()
    with gzip.GzipFile(fileobj=target, mode="w", mtime=0) as packing, tarfile.open(fileobj=packing, mode="w") as tar:
        for file, data in {"batches.meta": b"names", **(content or packed(name))}.items():
            member = tarfile.TarInfo(f"{FOLDERS[name]}/{file}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return target.getvalue()


def make_official(monkeypatch, name):
    """Let torchvision take the small files for the official ones; others are not read at all."""
    from torchvision import datasets

    source, content = getattr(datasets, name), packed(name)
    sums = [[file, hashlib.md5(data).hexdigest()] for file, data in content.items()]
    monkeypatch.setattr(source, "train_list", sums[:-1])
    monkeypatch.setattr(source, "test_list", sums[-1:])
    monkeypatch.setattr(source, "tgz_md5", hashlib.md5(archive(name)).hexdigest())
