"""Runs that have ended in one small file, to publish them, or to go on with a sweep elsewhere.

A zip archive with a folder for every run: its settings (`config.yaml`) and all its numbers (in `result.json`), but
neither checkpoints nor models nor pictures, and not where its folder and store were. Where it is unpacked, the runs are
known as if they had been computed there: sweeps and comparisons find them finished, reports show them.
"""

import zlib
from collections.abc import Iterable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

from fl_lightning.errors import UserError, require
from fl_lightning.runs import files
from fl_lightning.runs.checkpoint import SETTINGS
from fl_lightning.runs.folder import (
    FOLDER_TAG,
    RESULT,
    Result,
    as_saved,
    clear,
    folder_name,
    from_saved,
    locked,
    read_result,
    write_result,
)
from fl_lightning.runs.identity import PLACES
from fl_lightning.runs.tracking.sync import PARENT_TAG, sync_ended
from fl_lightning.system import checksums
from fl_lightning.system.atomic import write_atomically

# Of the machine and the store where a run was computed.
LOCAL_TAGS = (FOLDER_TAG, PARENT_TAG)
# Entries of real runs are smaller; a larger one is refused.
LARGEST = 256 * 2**20
REMEDY = "give a file that `fl-lightning runs export` has written"
# The same runs make the same file.
DATE = (1980, 1, 1, 0, 0, 0)


class Unpacked(NamedTuple):
    """What came of the runs of an archive: those that are new here, and how many were here already."""

    new: list[Result]
    known: int


def pack(folders: Iterable[Path], file: Path) -> int:
    """Write the runs in these folders to an archive; those that have not ended are left out.

    Returns:
        How many runs are in it; without any, no file is written.
    """
    results = [read_result(folder) for folder in sorted(folders)]
    ended = [one for one in results if one is not None and (one.status != "stopped" or one.message)]
    content = BytesIO()
    with ZipFile(content, "w") as archive:
        for result in ended:
            settings = (result.folder / SETTINGS).read_bytes()
            for name, entry in ((RESULT, checksums.pack(result.identity, _portable(result))), (SETTINGS, settings)):
                archive.writestr(ZipInfo(f"{result.folder.name}/{name}", DATE), entry, ZIP_DEFLATED, compresslevel=9)
    if ended:
        write_atomically(file, content.getvalue())
    return len(ended)


def unpack(file: Path, out: Path) -> Unpacked:
    """Put the runs of an archive beside those that are here, and add them to the store.

    A run that has ended here stays as it is. All entries are looked at before the first is written.

    Raises:
        UserError: If the file is no such archive, or damaged.
    """
    new, known = [], 0
    for name, (content, settings) in _read(file).items():
        folder = out / name
        result = from_saved(content, folder)
        with locked(folder):
            if read_result(folder) is not None:
                known += 1
                continue
            clear(folder, keep=("lock",))
            write_atomically(folder / SETTINGS, settings)
            files.write_tables(result.history, folder)
            write_result(result)
            new.append(sync_ended(out, result))
    return Unpacked(new, known)


def _portable(result: Result) -> dict[str, Any]:
    """What is saved of a run, without the machine that computed it."""
    tags = {name: value for name, value in result.tags.items() if name not in LOCAL_TAGS}
    params = {name: None if name in PLACES else value for name, value in result.params.items()}
    saved = as_saved(replace(result, tags=tags, params=params, store="", run_id="", unsent=True))
    del saved["rounds"]  # how many: here they are themselves
    return {**saved, "history": [measurement._asdict() for measurement in result.history]}


def _read(file: Path) -> dict[str, tuple[dict[str, Any], bytes]]:
    """By the name of its folder, what is saved of every run: its result, and its settings as YAML."""
    try:
        with ZipFile(file) as archive:
            entries = {one.filename: one.file_size for one in archive.infolist()}
            names = sorted({name.rpartition("/")[0] for name in entries})
            expected = {f"{name}/{kind}" for name in names for kind in (RESULT, SETTINGS)}
            require(
                entries.keys() == expected and max(entries.values(), default=0) <= LARGEST,
                f"{file} holds other things than runs; {REMEDY}",
            )
            return {name: _entry(archive, name) for name in names}
    except FileNotFoundError:
        raise UserError(f"no file at {file}; {REMEDY}") from None
    except (BadZipFile, zlib.error, EOFError, LookupError, TypeError, ValueError, checksums.DamagedError) as damage:
        raise UserError(f"{file} is damaged, or not an archive of runs ({damage}); {REMEDY}") from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; {REMEDY}") from None


def _entry(archive: ZipFile, name: str) -> tuple[dict[str, Any], bytes]:
    content = checksums.unpack(archive.read(f"{name}/{RESULT}"), None)
    result = from_saved(content, Path(name))
    for metric, value in ((name, value) for one in result.history for name, value in one.metrics.items()):
        if not isinstance(value, int | float):
            raise ValueError(f"expected a number as {metric}, got {value!r}")
    tags = result.tags
    own = folder_name(tags["method"], tags["data"], tags["trajectory"], result.params["federation.rounds"])
    # A run lies in the folder of its settings, and nowhere else on this machine.
    require(name == own == Path(own).name, f"{archive.filename}: expected a run in the folder {own!r}, got {name!r}")
    return content, archive.read(f"{name}/{SETTINGS}")
