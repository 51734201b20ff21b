"""Where datasets lie, and a name for what their files hold.

The same content has the same name wherever it lies, and a changed file another one.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

from fl_lightning.errors import UserError, require

USER_CACHE = "~/.cache/fl_lightning/data"


def data_root(root: str | None) -> Path:
    """The folder of all datasets: the setting, else the environment's, else the user's cache."""
    return Path(root or os.environ.get("FL_LIGHTNING_DATA") or USER_CACHE).expanduser()


def prepared_folders(root: str | None) -> list[Path]:
    """Where prepared copies may lie: beside the data, so that all users of one folder share them, or in the cache."""
    places = (data_root(root), Path(USER_CACHE).expanduser())
    return list(dict.fromkeys(place / "prepared" for place in places))


Kind: TypeAlias = Literal["sha256", "md5"]

# Smaller data are read again each time: that takes less than it takes to explain a cache.
SMALL = 1_000_000
# A file system's clock ticks every few milliseconds, so a file that was written just now may be written again without
# looking any different. Only files that have been left alone for this long are remembered.
SETTLED_SECONDS = 2.0

_known: dict[str, str] = {}


def of_files(files: Mapping[str, Path], root: str | None = None, kind: Kind = "sha256") -> str:
    """A hash of the files' content and of the names that the mapping gives them.

    Reading gigabytes for every run of a sweep would cost minutes, so the hash of large files is remembered, in this
    process and beside the prepared data, as long as their sizes and times of change are the same.

    Args:
        files: By name; what the name should not depend on (the folder) is left out of it.
        root: Setting of the source, see `data_root`.
        kind: The hash of each file.
    """
    try:
        stats = {name: file.stat() for name, file in sorted(files.items())}  # before resolve, which raises of a loop
        for name, look in stats.items():
            require(  # a pipe would be waited for, and reading would empty it
                stat.S_ISREG(look.st_mode),
                f"{files[name]} must be a file, got a folder, pipe or device; replace or remove it",
            )
        looks = {name: (files[name].resolve(), look) for name, look in stats.items()}
        listing = [
            (name, str(path), look.st_size, look.st_mtime_ns, look.st_ctime_ns) for name, (path, look) in looks.items()
        ]
        key = hashlib.sha256(json.dumps([kind, listing]).encode()).hexdigest()[:32]
        if key in _known:
            return _known[key]
        large = sum(look.st_size for _, look in looks.values()) >= SMALL
        notes = [folder / "fingerprints" / key for folder in prepared_folders(root)] if large else []
        found = _noted(notes) or _of_digests({name: _digest(file, kind) for name, file in files.items()})
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}; make it readable or name another") from None
    if time.time() - max(max(look.st_mtime, look.st_ctime) for _, look in looks.values()) > SETTLED_SECONDS:
        _known[key] = found
        _note(notes, found)
    return found


def unless_official(files: Mapping[str, Path], official: Mapping[str, str], root: str | None) -> str | None:
    """A name for files that are not the official ones; None for official files, wherever they lie.

    Args:
        files: By name, those that are there; the others will be downloaded.
        official: The MD5 sums of the official files.
        root: Setting of the source, see `data_root`.
    """
    expected = {name: _of_digests({name: digest}) for name, digest in official.items()}
    found = {name: of_files({name: file}, root, "md5") for name, file in files.items()}
    return None if expected == expected | found else _of_digests(expected | found)


def _digest(file: Path, kind: Kind) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def _of_digests(digests: Mapping[str, str]) -> str:
    whole = hashlib.sha256()
    for name, content in sorted(digests.items()):
        whole.update(f"{len(name.encode())} {name} {content}\n".encode())
    return whole.hexdigest()[:32]


def _noted(notes: list[Path]) -> str | None:
    for note in notes:
        with suppress(OSError, UnicodeDecodeError):
            text = note.read_text(encoding="ascii")
            if len(text) == 32:
                return text
    return None


def _note(notes: list[Path], found: str) -> None:
    if any(note.exists() for note in notes):
        return
    for note in notes:
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(found, encoding="ascii")  # half a note has another length
            return
