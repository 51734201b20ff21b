"""What earlier versions have left in folders of runs and in archives. Nothing is written in these formats any more.

Once the numbers of a run's rounds stood in three places: in the header of its checkpoint, fifty rounds at a time in
files beside it, and, when the run had ended, in `result.json`. Archives still have them there.
"""

import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_lightning.metrics.metric import Measurement
from fl_lightning.runs import checkpoint

# Files of fifty rounds beside a checkpoint, which names them and their checksums; each had a copy.
PARTS = "rounds-*.json*"


def rounds(folder: Path) -> list[Measurement]:
    """The rounds of a run that has not ended; none without a checkpoint that has them."""
    for path in (folder / checkpoint.CURRENT, folder / checkpoint.PREVIOUS):
        with suppress(checkpoint.DamagedError, KeyError, OSError, ValueError), checkpoint.opened(path) as (header, _):
            parts = [_part(folder / name, checksum) for name, checksum in json.loads(header.get("earlier", "[]"))]
            return history([one for part in [*parts, json.loads(header["history"])] for one in part])
    return []


def history(content: Any) -> list[Measurement]:
    """The rounds as `result.json` and archives have them; a TypeError if it is something else."""
    return [Measurement(**one) for one in content]


def remove_parts(folder: Path) -> None:
    for path in folder.glob(PARTS):
        path.unlink(missing_ok=True)


def _part(path: Path, checksum: int) -> list[Mapping[str, Any]]:
    for file in (path, path.with_name(f"{path.name}.copy")):
        with suppress(OSError):
            content = file.read_bytes()
            if zlib.crc32(content) == checksum:
                found: list[Mapping[str, Any]] = json.loads(content)
                return found
    raise ValueError(f"the checksum of {path.name} does not match")
