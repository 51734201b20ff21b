"""Arrays that several processes share: prepared once on disk, then mapped into the memory of each.

Pickles, images and tables must be decoded before they can be used. Each process that does so holds a copy of its own.
Instead the first one writes the arrays to `.npy` files, and all processes map those: the pages lie in memory once, are
read when they are used, and are private as soon as a process writes to them. A prepared copy is known by the content of
the files that it was made from, so it cannot be out of date, and may be deleted at any time: a process that has mapped
it keeps it, and a later one makes it again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import filelock
import numpy as np

from fl_lightning.data.readers import fingerprint
from fl_lightning.data.readers.fingerprint import prepared_folders
from fl_lightning.errors import UserError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

FORMAT = 1
# A process that waits longer than this for another one's copy makes a copy of its own.
PATIENCE_SECONDS = 600.0


def mapped(
    files: Mapping[str, Path],
    make: Callable[[], dict[str, Array]],
    settings: Mapping[str, Any],
    root: str | None = None,
) -> dict[str, Array]:
    """The arrays that `make` reads from the files, mapped from a prepared copy.

    Small data, and data for which no folder is writable, are simply held in memory.

    Args:
        files: Everything that `make` reads, by a name that does not depend on where it lies.
        make: Reads the files.
        settings: What else the arrays depend on, the version of the reader included.
        root: Setting of the source, see `data_root`.
    """
    content = fingerprint.of_files(files, root)

    def read() -> dict[str, Array]:
        arrays = make()
        if fingerprint.of_files(files, root) != content:
            raise UserError(f"{next(iter(files.values()))} changed while it was read; start again when it is complete")
        return arrays

    if sum(file.stat().st_size for file in files.values()) < fingerprint.SMALL:
        return read()
    description = json.dumps([FORMAT, dict(settings), content], sort_keys=True)
    key = hashlib.sha256(description.encode()).hexdigest()[:32]
    folders = prepared_folders(root)
    for folder in folders:
        if (found := _map(folder / key)) is not None:
            return found
    with _locked(key, folders) as place:
        if place is None:
            return read()
        found = _map(place / key)  # another process may have made it while we waited
        if found is None:
            arrays = read()
            found = _write(place, key, arrays) or arrays
        return found


def _map(entry: Path) -> dict[str, Array] | None:
    """The arrays of a prepared copy, or None if there is none that is whole."""
    try:
        return {file.stem: np.load(file, mmap_mode="c", allow_pickle=False) for file in entry.glob("*.npy")} or None
    except (OSError, ValueError, EOFError):
        return None


def _write(place: Path, key: str, arrays: Mapping[str, Array]) -> dict[str, Array] | None:
    """Write a prepared copy, whole or not at all, and map it; None if the disk does not take it."""
    passing = place / f".{key}.{uuid4().hex}"
    try:
        for left_behind in place.glob(f".{key}.*"):  # by a process that was killed: we hold the lock
            shutil.rmtree(left_behind, ignore_errors=True)
        passing.mkdir()
        for name, array in arrays.items():
            with open(passing / f"{name}.npy", "wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        shutil.rmtree(place / key, ignore_errors=True)  # there is one only if it is damaged
        passing.rename(place / key)
    except OSError:
        shutil.rmtree(passing, ignore_errors=True)
    return _map(place / key)


@contextmanager
def _locked(key: str, folders: Sequence[Path]) -> Iterator[Path | None]:
    """The first folder that can be written to, with other processes kept from preparing the same; None without one."""
    for folder in folders:
        lock = filelock.FileLock(folder / f"{key}.lock")
        with suppress(OSError, NotImplementedError):  # read-only, full, or a file system without locks
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=PATIENCE_SECONDS)
        if lock.is_locked:
            try:
                yield folder
            finally:
                lock.release()
            return
    yield None
