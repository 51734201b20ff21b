"""Public datasets whose files somebody has replaced: their numbers are never shown for other files."""

import gzip
import hashlib
import os
import time
from pathlib import Path

import pytest

from fl_lightning.config import configure
from fl_lightning.data.readers import fingerprint, idx
from fl_lightning.runs.identity import identity
from tests.data import cifar_files
from tests.data.test_sources import DOWNLOADED, small_files, write


def known_by(data, root):
    return identity(configure({"data": data, "data.root": str(root)}))


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_another_selection_of_cifar_is_another_run(tmp_path, name):
    data, content = name.lower(), cifar_files.packed(name)
    other = {**content, cifar_files.TEST[name]: next(iter(content.values()))}
    for root, files in (("a", content), ("same", content), ("b", other)):
        cifar_files.write(tmp_path / root, name, files)
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / cifar_files.ARCHIVES[name]).write_bytes(cifar_files.archive(name))
    assert known_by(data, tmp_path / "a") == known_by(data, tmp_path / "same") != known_by(data, tmp_path / "b")
    nowhere = known_by(data, tmp_path / "nowhere")
    assert nowhere not in (known_by(data, tmp_path / "a"), known_by(data, tmp_path / "packed"))


@pytest.mark.parametrize("name", sorted(DOWNLOADED))
def test_another_selection_of_mnist_is_another_run(tmp_path, name):
    source, content = DOWNLOADED[name], small_files()
    write(tmp_path / "a" / name / "raw", content)
    packed = write(tmp_path / "packed" / name / "raw", {f"{file}.gz": gzip.compress(b) for file, b in content.items()})
    own = source(str(tmp_path / "a")).fingerprint()
    assert own is not None
    assert source(str(tmp_path / "packed")).fingerprint() == own
    source(str(tmp_path / "packed")).load()  # unpacks, and is still the same
    assert (packed / "t10k-labels-idx1-ubyte").is_file()
    assert source(str(tmp_path / "packed")).fingerprint() == own
    changed = write(tmp_path / "b" / name / "raw", content) / "t10k-labels-idx1-ubyte"
    changed.write_bytes(changed.read_bytes()[:-1] + b"\x01")
    assert source(str(tmp_path / "b")).fingerprint() not in (own, None)


def test_files_that_are_missing_count_as_those_that_a_download_brings(tmp_path, monkeypatch):
    content = small_files()
    last = list(content)[-1]
    official = {**idx.OFFICIAL["MNIST"], last: hashlib.md5(content[last], usedforsecurity=False).hexdigest()}
    monkeypatch.setitem(idx.OFFICIAL, "MNIST", official)
    folder = write(tmp_path / "MNIST" / "raw", {file: b for file, b in content.items() if file != last})
    before = DOWNLOADED["MNIST"](str(tmp_path)).fingerprint()
    (folder / last).write_bytes(content[last])
    assert DOWNLOADED["MNIST"](str(tmp_path)).fingerprint() == before is not None


def test_the_content_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "SMALL", 0)
    monkeypatch.setattr(fingerprint, "_known", {})
    folder = cifar_files.write(tmp_path, "CIFAR10")
    for file in folder.iterdir():
        os.utime(file, (time.time() - 100,) * 2)
    monkeypatch.setattr(fingerprint, "SETTLED_SECONDS", -1.0)
    first = known_by("cifar10", tmp_path)
    monkeypatch.setattr(fingerprint, "_known", {})  # as in another process
    monkeypatch.setattr(fingerprint, "_digest", lambda *_: pytest.fail("read again"))
    assert known_by("cifar10", tmp_path) == first


@pytest.mark.skipif("FL_LIGHTNING_DATA" not in os.environ, reason="needs the official files")
@pytest.mark.parametrize("data", ["mnist", "fashion_mnist", "cifar10"])
def test_official_files_have_one_identity(data, tmp_path):
    assert Path(os.environ["FL_LIGHTNING_DATA"]).is_dir()
    assert known_by(data, os.environ["FL_LIGHTNING_DATA"]) == known_by(data, tmp_path / "nowhere")
