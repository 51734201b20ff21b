"""The numbers of earlier rounds, beside a checkpoint: so many rounds in a file, which is written once.

A checkpoint names these files and their checksums, and holds the numbers of the rounds after them itself. So to save a
round costs the same after ten rounds and after a thousand.
"""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fl_lightning.record import Measurement
from fl_lightning.system.atomic import write_atomically

NAME = "rounds-{}.json"
# Rounds in a file.
ROUNDS = 50


class Part(NamedTuple):
    """A file of a checkpoint's earlier rounds, and its checksum."""

    name: str
    checksum: int


def write(folder: Path, history: Sequence[Measurement], known: Sequence[Part]) -> list[Part]:
    """Write the rounds that fill files; the checkpoint has to name these, and to hold the rounds after them.

    Args:
        folder: Of the run.
        history: The numbers of all rounds so far.
        known: What is there already.
    """
    number = max(0, len(history) - 1) // ROUNDS
    parts = list(known[:number])
    for first in range(len(parts) * ROUNDS, number * ROUNDS, ROUNDS):
        content = encoded(history[first : first + ROUNDS]).encode()
        name = NAME.format(first + ROUNDS)
        write_atomically(folder / name, content)
        parts.append(Part(name, zlib.crc32(content)))
    return parts


def read(folder: Path, parts: Sequence[Part]) -> list[Measurement]:
    """The rounds that a checkpoint has named.

    Raises:
        OSError, ValueError: If something else is in the files now.
    """
    history: list[Measurement] = []
    for name, checksum in parts:
        content = (folder / name).read_bytes()
        if zlib.crc32(content) != checksum:
            raise ValueError(f"the checksum of {name} does not match")
        history += decoded(content.decode())
    return history


def remove(folder: Path) -> None:
    """Forget all of them."""
    for path in folder.glob(NAME.format("*")):
        path.unlink(missing_ok=True)


def encoded(history: Sequence[Measurement]) -> str:
    return json.dumps([measurement._asdict() for measurement in history])


def decoded(text: str) -> list[Measurement]:
    return [Measurement(**item) for item in json.loads(text)]
