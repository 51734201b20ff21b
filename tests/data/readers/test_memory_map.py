"""Prepared copies: made once, shared, never stale, never half, and never in the way."""

import errno
import importlib
import multiprocessing
import os
import shutil
from pathlib import Path

import filelock
import numpy as np
import pytest

from fl_lightning.data.readers import fingerprint, memory_map, torchvision_files
from fl_lightning.data.sources.cifar10 import Cifar10
from fl_lightning.errors import UserError
from tests.support import cifar_files

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """Folders of the test's own, in which everything counts as large, and nothing is known from before."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FL_LIGHTNING_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(fingerprint, "SMALL", 0)
    monkeypatch.setattr(fingerprint, "_known", {})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(100)))
    return path


class Reader:
    """Reads a file of bytes, and counts how often."""

    def __init__(self, file):
        self.file, self.calls = file, 0

    def __call__(self):
        self.calls += 1
        return {"x": np.frombuffer(self.file.read_bytes(), np.uint8)}

    def mapped(self, **settings):
        return memory_map.mapped({"": self.file}, self, settings)["x"]


def entries(folder):
    return [path for path in (folder / "prepared").iterdir() if path.is_dir() and path.name != "fingerprints"]


def test_made_once_and_mapped(tmp_path, file):
    reader = Reader(file)
    first, second = reader.mapped(), reader.mapped()
    assert reader.calls == 1
    assert isinstance(first, np.memmap)
    assert np.array_equal(first, np.arange(100))
    first[0] = 9
    assert second[0] == 0, "a write is private"
    assert len(entries(tmp_path / "data")) == 1


def test_a_changed_file_is_made_again_and_the_old_map_stays(tmp_path, file):
    reader = Reader(file)
    old = reader.mapped()
    file.write_bytes(bytes(range(100, 200)))  # of the same size, at once
    assert reader.mapped()[0] == 100
    shutil.rmtree(tmp_path / "data")
    assert old[99] == 99, "who has it mapped keeps it"


def test_another_setting_is_another_copy_and_another_place_is_not(tmp_path, file):
    reader = Reader(file)
    reader.mapped(size=1)
    reader.mapped(size=2)
    assert reader.calls == 2
    file.rename(tmp_path / "elsewhere")
    reader.file = tmp_path / "elsewhere"
    reader.mapped(size=1)
    assert reader.calls == 2


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", None])
def test_a_damaged_copy_is_made_again(tmp_path, file, damage):
    reader = Reader(file)
    reader.mapped()
    copy = entries(tmp_path / "data")[0] / "x.npy"
    if damage is None:
        damage = copy.read_bytes()[:-1]
    copy.unlink()  # the arrays of the first call keep their file
    copy.write_bytes(damage)
    assert np.array_equal(reader.mapped(), np.arange(100))
    assert reader.calls == 2
    assert isinstance(reader.mapped(), np.memmap)
    assert reader.calls == 2


def test_what_a_killed_process_left_is_tidied(tmp_path, file):
    reader = Reader(file)
    reader.mapped()
    entry = entries(tmp_path / "data")[0]
    entry.rename(entry.with_name(f".{entry.name}.half"))
    assert np.array_equal(reader.mapped(), np.arange(100))
    assert entries(tmp_path / "data") == [entry]


def refuse_writes(monkeypatch, *folders):
    """As if these folders were read-only: the tests may run as root, whom no permission stops."""
    make = Path.mkdir

    def mkdir(self, *arguments, **options):
        if any(self.is_relative_to(folder) for folder in folders):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        make(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)


def test_a_read_only_root_leads_to_the_users_cache(tmp_path, file, monkeypatch):
    refuse_writes(monkeypatch, tmp_path / "data")
    reader = Reader(file)
    assert isinstance(reader.mapped(), np.memmap)
    assert not (tmp_path / "data").exists()
    assert len(entries(tmp_path / "home/.cache/fl_lightning/data")) == 1
    reader.mapped()
    assert reader.calls == 1


def test_nothing_writable_leads_to_memory(tmp_path, file, monkeypatch):
    refuse_writes(monkeypatch, tmp_path / "data", tmp_path / "home")
    reader = Reader(file)
    assert np.array_equal(reader.mapped(), np.arange(100))
    reader.mapped()
    assert reader.calls == 2
    assert not isinstance(reader.mapped(), np.memmap)


def test_a_copy_in_a_read_only_root_is_used(tmp_path, file, monkeypatch):
    reader = Reader(file)
    reader.mapped()
    refuse_writes(monkeypatch, tmp_path)
    assert isinstance(reader.mapped(), np.memmap)
    assert reader.calls == 1


def test_a_full_disk_leads_to_memory_and_leaves_nothing(tmp_path, file, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", full)
    assert np.array_equal(Reader(file).mapped(), np.arange(100))
    assert entries(tmp_path / "data") == []


def test_small_data_are_not_copied(tmp_path, file, monkeypatch):
    monkeypatch.setattr(fingerprint, "SMALL", 101)
    assert not isinstance(Reader(file).mapped(), np.memmap)
    assert not (tmp_path / "data").exists()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, file):
    def read():
        file.write_bytes(b"more is to come")
        return {"x": np.zeros(3)}

    with pytest.raises(UserError, match="changed while it was read; start again"):
        memory_map.mapped({"": file}, read, {})
    assert entries(tmp_path / "data") == []


def prepare(task):
    """What each process does: it comes to the lock together with the others."""
    together, calls = task
    acquire, read = filelock.FileLock.acquire, torchvision_files._batch

    def acquire_together(*arguments, **settings):
        filelock.FileLock.acquire = acquire
        together.wait()
        return acquire(*arguments, **settings)

    def noted(*arguments):
        with open(calls, "a") as file:
            file.write("x")
        return read(*arguments)

    filelock.FileLock.acquire, torchvision_files._batch = acquire_together, noted
    return int(Cifar10().load().train_x.long().sum())


def test_processes_at_once_prepare_one_copy(tmp_path, monkeypatch):
    cifar_files.make_official(monkeypatch, "CIFAR10")
    cifar_files.write(tmp_path / "data", "CIFAR10")
    fork = multiprocessing.get_context("fork")  # a fresh interpreter would take seconds to import torch and torchvision
    importlib.import_module("torchvision.datasets")
    with fork.Manager() as manager, fork.Pool(3) as pool:
        task = (manager.Barrier(3), tmp_path / "calls")
        sums = pool.map_async(prepare, [task] * 3, chunksize=1).get(timeout=300)
    assert sums == [sum(int(cifar_files.batch("CIFAR10", i)[b"data"].sum()) for i in range(5))] * 3
    assert (tmp_path / "calls").read_text() == "x" * 6, "prepared by one, awaited by the others"
    assert len(entries(tmp_path / "data")) == 1


def test_who_waits_too_long_reads_for_itself(file, monkeypatch):
    monkeypatch.setattr(memory_map, "PATIENCE_SECONDS", 0.05)
    inner = Reader(file)

    def read():
        # Asked for again while the first reader still holds the lock, as another process would.
        if inner.calls < 2:
            inner.mapped()
        return inner()

    assert np.array_equal(memory_map.mapped({"": file}, read, {})["x"], np.arange(100))


def test_names_and_content_make_the_fingerprint(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")
    b.write_text("2")
    both = fingerprint.of_files({"a": a, "b": b})
    assert both == fingerprint.of_files({"b": b, "a": a})
    assert both != fingerprint.of_files({"a": b, "b": a})
    assert both != fingerprint.of_files({"a": a, "c": b})
    b.write_text("3")
    assert both != fingerprint.of_files({"a": a, "b": b})


def test_the_fingerprint_of_files_left_alone_is_remembered(tmp_path, file, monkeypatch):
    def forget():
        monkeypatch.setattr(fingerprint, "_known", {})

    monkeypatch.setattr(fingerprint, "SETTLED_SECONDS", -1.0)
    first = fingerprint.of_files({"": file})
    notes = list((tmp_path / "data/prepared/fingerprints").iterdir())
    assert [note.read_text() for note in notes] == [first]
    monkeypatch.setattr(fingerprint, "_digest", lambda *_: pytest.fail("read again"))
    assert fingerprint.of_files({"": file}) == first
    forget()
    assert fingerprint.of_files({"": file}) == first


def test_the_fingerprint_of_a_fresh_file_is_not(tmp_path, file):
    fingerprint.of_files({"": file})
    assert fingerprint._known == {}
    assert not (tmp_path / "data").exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=f"cannot read {tmp_path}/none: No such file"):
        fingerprint.of_files({"": tmp_path / "none"})


def test_prepared_folders(tmp_path):
    assert fingerprint.prepared_folders("~/x") == [
        tmp_path / "home/x/prepared",
        tmp_path / "home/.cache/fl_lightning/data/prepared",
    ]
    assert len(fingerprint.prepared_folders("~/.cache/fl_lightning/data")) == 1
