"""CIFAR-10 and CIFAR-100: torchvision's layout, the archive, the download, and what is said of damaged files."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_lightning.data.readers import fingerprint
from fl_lightning.errors import UserError
from tests.support.cifar_files import (
    ARCHIVES,
    CLASSES,
    FOLDERS,
    KEYS,
    SOURCES,
    TEST,
    TRAIN,
    archive,
    batch,
    make_official,
    packed,
    write,
)
from tests.support.web import serving_files


@pytest.fixture(params=sorted(SOURCES))
def name(request, monkeypatch, tmp_path):
    """Each dataset, with an address that refuses the connection, and with nothing of the user's own cache."""
    from torchvision import datasets

    monkeypatch.setattr(getattr(datasets, request.param), "url", "http://127.0.0.1:9/none.tar.gz")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    make_official(monkeypatch, request.param)
    return request.param


@pytest.fixture
def server(tmp_path, name, monkeypatch):
    """A web server on this machine that has the archive; the folder that it serves."""
    from torchvision import datasets

    folder = tmp_path / "server"
    folder.mkdir()
    (folder / ARCHIVES[name]).write_bytes(archive(name))
    with serving_files(folder) as address:
        monkeypatch.setattr(getattr(datasets, name), "url", address + ARCHIVES[name])
        yield folder


def check(name, data):
    """That these are the generated files."""
    halves = [batch(name, i) for i in range(len(TRAIN[name]) + 1)]
    train = np.concatenate([half[b"data"] for half in halves[:-1]]).reshape(-1, 3, 32, 32)
    assert np.array_equal(data.train_x.numpy(), train)
    assert np.array_equal(data.test_x.numpy(), halves[-1][b"data"].reshape(-1, 3, 32, 32))
    assert data.train_y.tolist() == [label for half in halves[:-1] for label in half[KEYS[name]]]
    assert data.test_y.tolist() == halves[-1][KEYS[name]]
    assert data.train_x.dtype == torch.uint8
    assert data.num_classes == CLASSES[name]
    ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 1, 1)
    assert data.inputs(ends, torch.float64).flatten().tolist() == [-1, -1, -1, 1, 1, 1]


def error_of(name, root):
    with pytest.raises(UserError) as caught:
        SOURCES[name](root=str(root)).load()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("small", [0, 10**9], ids=["mapped", "in memory"])
def test_torchvisions_layout(tmp_path, name, small, monkeypatch):
    monkeypatch.setattr(fingerprint, "SMALL", small)
    write(tmp_path / "data", name)
    for _ in range(2):
        check(name, SOURCES[name](root=str(tmp_path / "data")).load())
    assert (tmp_path / "data" / "prepared").exists() == (small == 0)


def test_augmentation_is_the_papers_unless_said_otherwise(tmp_path, name):
    write(tmp_path, name)
    assert SOURCES[name](root=str(tmp_path)).load().augment == "paper"
    assert SOURCES[name](root=str(tmp_path), augment="none").load().augment == "none"


def test_the_archive_is_enough(tmp_path, name):
    (tmp_path / ARCHIVES[name]).write_bytes(archive(name))
    check(name, SOURCES[name](root=str(tmp_path)).load())


def test_the_archive_completes_what_is_missing(tmp_path, name):
    folder = write(tmp_path, name)
    (folder / TEST[name]).unlink()
    (tmp_path / ARCHIVES[name]).write_bytes(archive(name))
    check(name, SOURCES[name](root=str(tmp_path)).load())


def test_a_download_is_silent_and_kept(tmp_path, name, server, capfd):
    check(name, SOURCES[name](root=str(tmp_path / "data")).load())
    assert capfd.readouterr() == ("", "")
    assert {path.name for path in (tmp_path / "data").iterdir()} <= {FOLDERS[name], "prepared"}
    assert sorted(path.name for path in (tmp_path / "data" / FOLDERS[name]).iterdir()) == sorted(packed(name))
    (server / ARCHIVES[name]).unlink()
    check(name, SOURCES[name](root=str(tmp_path / "data")).load())


def test_a_download_with_another_checksum_is_not_kept(tmp_path, name, server):
    (server / ARCHIVES[name]).write_bytes(b"<html>please log in</html>")
    assert "the download failed (http://127.0.0.1" in error_of(name, tmp_path / "data")
    assert not (tmp_path / "data").exists()  # perhaps a misspelt place


def test_missing_files_are_named_with_all_ways_out(tmp_path, name):
    message = error_of(name, tmp_path)
    assert message.startswith(f"{name} not found: expected {', '.join([*TRAIN[name], TEST[name]])}")
    for hint in (
        str(tmp_path / FOLDERS[name]),
        ARCHIVES[name],
        "--data.root",
        "FL_LIGHTNING_DATA",
        "digits",
        "refused",
    ):
        assert hint in message


def test_one_missing_file_is_named(tmp_path, name):
    folder = write(tmp_path, name)
    (folder / TEST[name]).unlink()
    assert f"(missing: {TEST[name]})" in error_of(name, tmp_path)


@pytest.mark.parametrize("length", [0, 5000, -1])
def test_a_damaged_file_is_named(tmp_path, name, length):
    folder = write(tmp_path, name)
    file = folder / TRAIN[name][-1]
    file.write_bytes(file.read_bytes()[:length])
    message = error_of(name, tmp_path)
    assert message.startswith(f"{file} is damaged (its checksum is wrong)")
    assert "delete it so that it is downloaded again, or replace it by a good copy" in message
    assert "for images of your own use --data arrays" in message


def test_one_pixel_that_flipped_on_the_disk_is_seen(tmp_path, name):
    folder = write(tmp_path, name)
    data = bytearray((folder / TEST[name]).read_bytes())
    data[1000] ^= 1
    (folder / TEST[name]).write_bytes(data)
    assert error_of(name, tmp_path).startswith(f"{folder / TEST[name]} is damaged (its checksum is wrong)")


@pytest.mark.parametrize("length", [0, 20_000])
def test_a_damaged_archive_is_named_and_stays(tmp_path, name, length):
    file = tmp_path / ARCHIVES[name]
    file.write_bytes(archive(name)[:length])
    message = error_of(name, tmp_path)
    assert message.startswith(f"{file} is damaged (its checksum is wrong)")
    assert "delete it" in message
    assert list(tmp_path.iterdir()) == [file]


class Opens:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_file_with_code_is_refused_and_not_run(tmp_path, name):
    folder = write(tmp_path, name)
    (folder / TEST[name]).write_bytes(pickle.dumps({b"data": Opens(tmp_path / "was here")}, 2))
    assert f"{folder / TEST[name]} is damaged (its checksum is wrong)" in error_of(name, tmp_path)
    assert not (tmp_path / "was here").exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path, name, server):
    (tmp_path / "file").write_text("in the way")
    assert error_of(name, tmp_path / "file").startswith(f"cannot use {tmp_path / 'file'} for {name}")


def real(folder):
    root = os.environ.get("FL_LIGHTNING_DATA")
    if not root or not (Path(root) / folder).is_dir():
        pytest.skip(f"the data are not at hand: set FL_LIGHTNING_DATA to a folder with {folder}")
    return root


def test_the_real_files_of_cifar10():
    from torchvision.datasets import CIFAR10

    root = real("cifar-10-batches-py")
    data = SOURCES["CIFAR10"]().load()
    assert tuple(data.train_x.shape) == (50_000, 3, 32, 32)
    assert tuple(data.test_x.shape) == (10_000, 3, 32, 32)
    assert data.train_y.bincount().tolist() == [5000] * 10
    assert data.test_y.bincount().tolist() == [1000] * 10
    assert data.train_x[0, :, 0, 0].tolist() == [59, 62, 63]
    assert data.train_y[:5].tolist() == [6, 9, 9, 4, 1]
    theirs = CIFAR10(root, train=False)
    assert np.array_equal(theirs.data.transpose(0, 3, 1, 2), data.test_x.numpy())
    assert theirs.targets == data.test_y.tolist()


def test_the_real_files_of_cifar100():
    real("cifar-100-python")
    data = SOURCES["CIFAR100"]().load()
    assert tuple(data.train_x.shape) == (50_000, 3, 32, 32)
    assert data.train_y.bincount().tolist() == [500] * 100
    assert data.test_y.bincount().tolist() == [100] * 100
