"""Public datasets whose files somebody has replaced: their numbers are never shown for other files."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from fl_lightning.data.readers import fingerprint, torchvision_files
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity
from tests.data.sources.test_sources import DOWNLOADED, small_files, write


def known_by(data, root):
    return identity(configure({"data": data, "data.root": str(root)}))


@pytest.mark.parametrize("name", sorted(DOWNLOADED))
def test_another_selection_of_mnist_is_another_run(tmp_path, name):
    source, content = DOWNLOADED[name], small_files()
    write(tmp_path / "a" / name / "raw", content)
    own = source(str(tmp_path / "a")).fingerprint()
    assert own is not None
    changed = write(tmp_path / "b" / name / "raw", content) / "t10k-labels-idx1-ubyte"
    changed.write_bytes(changed.read_bytes()[:-1] + b"\x01")
    assert source(str(tmp_path / "b")).fingerprint() not in (own, None)


def test_files_that_are_missing_count_as_those_that_a_download_brings(tmp_path, monkeypatch):
    content = small_files()
    last = list(content)[-1]
    official = {
        **torchvision_files.OFFICIAL["MNIST"],
        last: hashlib.md5(content[last], usedforsecurity=False).hexdigest(),
    }
    monkeypatch.setitem(torchvision_files.OFFICIAL, "MNIST", official)
    folder = write(tmp_path / "MNIST" / "raw", {file: b for file, b in content.items() if file != last})
    before = DOWNLOADED["MNIST"](str(tmp_path)).fingerprint()
    (folder / last).write_bytes(content[last])
    assert DOWNLOADED["MNIST"](str(tmp_path)).fingerprint() == before is not None


def test_the_content_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "SMALL", 0)
    monkeypatch.setattr(fingerprint, "_known", {})
    folder = write(tmp_path / "MNIST" / "raw", small_files())
    for file in folder.iterdir():
        os.utime(file, (time.time() - 100,) * 2)
    monkeypatch.setattr(fingerprint, "SETTLED_SECONDS", -1.0)
    first = known_by("mnist", tmp_path)
    monkeypatch.setattr(fingerprint, "_known", {})  # as in another process
    monkeypatch.setattr(fingerprint, "_digest", lambda *_: pytest.fail("read again"))
    assert known_by("mnist", tmp_path) == first


@pytest.mark.skipif("FL_LIGHTNING_DATA" not in os.environ, reason="needs the official files")
@pytest.mark.parametrize("data", ["mnist", "fashion_mnist", "cifar10"])
def test_official_files_have_one_identity(data, tmp_path):
    assert Path(os.environ["FL_LIGHTNING_DATA"]).is_dir()
    assert known_by(data, os.environ["FL_LIGHTNING_DATA"]) == known_by(data, tmp_path / "nowhere")
