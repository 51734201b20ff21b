"""Data files that would fill the memory, lead elsewhere or claim what they do not hold: one line, soon."""

import gzip
import io
import random
import struct
import zipfile
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest

from fl_lightning.data.readers import assemble
from fl_lightning.data.sources.arrays import Arrays
from fl_lightning.data.sources.cifar10 import Cifar10
from fl_lightning.data.sources.images import Images
from fl_lightning.data.sources.mnist import Mnist
from fl_lightning.data.sources.table import Table
from fl_lightning.errors import UserError
from fl_lightning.system import memory

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 4


def refused(load):
    """The one line with which data are refused."""
    with pytest.raises(UserError) as caught:
        load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 1_000_000)


@pytest.mark.parametrize("label", [2**40, 2**62])
@pytest.mark.parametrize("half", ["train_y", "test_y"])
def test_a_label_of_a_trillion(tmp_path, label, half):
    arrays = {"train_x": X, "train_y": Y, "test_x": X, "test_y": Y, half: np.where(Y == 3, label, Y)}
    np.savez(tmp_path / "my.npz", **arrays)
    assert "has none; number the labels from 0 without gaps" in refused(Arrays(path=str(tmp_path / "my.npz")).load)


def npy(shape, content=b""):
    header = str({"descr": "<f8", "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


@pytest.mark.parametrize("shape", [(2**40,), (2**31, 2**31), (5, 10**12), (-1, 3)])
def test_an_npz_that_claims_more_than_it_holds(tmp_path, shape):
    with zipfile.ZipFile(tmp_path / "my.npz", "w") as archive:
        archive.writestr("train_x.npy", npy(shape, bytes(80)))
    assert "which the file does not" in refused(Arrays(path=str(tmp_path / "my.npz")).load)


def test_an_npz_that_unpacks_to_more_than_there_is(tmp_path, little_memory):
    np.savez_compressed(tmp_path / "my.npz", train_x=np.zeros((200_000, 3)), train_y=np.zeros(200_000, int))
    assert (tmp_path / "my.npz").stat().st_size < 100_000
    line = refused(Arrays(path=str(tmp_path / "my.npz")).load)
    assert "would take 6.4 MB of memory, and 1.0 MB are free" in line


def test_damaged_npz_files_are_told_or_read(tmp_path):
    buffer = io.BytesIO()
    np.savez(buffer, train_x=X, train_y=Y)
    rng = random.Random(1)
    for _ in range(150):
        content = bytearray(buffer.getvalue())
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        (tmp_path / "my.npz").write_bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])
        with suppress(UserError):  # and nothing else
            Arrays(path=str(tmp_path / "my.npz")).load()


@pytest.mark.parametrize(
    ("source", "archive"),
    [(Mnist, "MNIST/raw/train-images-idx3-ubyte.gz"), (Cifar10, "cifar-10-python.tar.gz")],
)
def test_another_archive_in_the_place_of_an_official_one_is_not_unpacked(tmp_path, source, archive):
    """Whatever it holds: code, links, more than the memory."""
    file = tmp_path / archive
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(bytes(5_000_000)))
    before = sorted(tmp_path.rglob("*"))
    assert f"{file} is damaged (its checksum is wrong)" in refused(source(root=str(tmp_path)).load)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_table_that_is_a_bomb(tmp_path, little_memory):
    (tmp_path / "my.csv.gz").write_bytes(gzip.compress(b"a,y\n" + b"0,0\n" * 500_000))
    assert "unpacks to more text" in refused(Table(path=str(tmp_path / "my.csv.gz"), label="y").load)
    pd.DataFrame({"a": np.zeros(200_000), "y": 0}).to_parquet(tmp_path / "my.parquet")
    assert "200,000 rows of 2 would take" in refused(Table(path=str(tmp_path / "my.parquet"), label="y").load)


def test_images_scaled_beyond_memory(tmp_path, little_memory):
    from PIL import Image

    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("L", (4, 4)).save(tmp_path / name / f"{number}.png")
    assert "images of 1000000x1000000 pixels would take" in refused(Images(path=str(tmp_path), size=10**6).load)


def test_labels_without_end_are_still_found():
    found = {"train_x": X, "train_y": Y, "test_x": X, "test_y": Y}
    assert assemble.dataset(found).num_classes == 4
