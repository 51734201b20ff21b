"""The numbers of a run's rounds: `rounds.jsonl` in its folder, a line for every round, written before its checkpoint.

A line ends with its checksum, which depends on the run and on the number of the round: a torn, changed or foreign line
is left out, and so is any line after it. Until the run has ended there is a second file with the same lines, so that
one damaged file costs nothing; then `rounds.parquet` and `clients.parquet` say the same.
"""

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.metrics.metric import Measurement
from fl_lightning.runs import old_formats
from fl_lightning.system.atomic import write_atomically, writing

NAME, COPY = "rounds.jsonl", "rounds.copy.jsonl"


def read(folder: Path, identity: str) -> list[Measurement]:
    """The rounds of a run that has this identity, up to the first line that is damaged."""
    whole = _whole_lines(folder, identity)
    return old_formats.rounds(folder) if whole is None else [_decoded(line) for line in whole]


def begin(folder: Path, identity: str, history: Sequence[Measurement]) -> None:
    """Cut off what lies beyond these rounds, which a process goes on from; write them if they are not there yet."""
    if not history:
        for name in (NAME, COPY):
            (folder / name).unlink(missing_ok=True)
        return
    whole = (_whole_lines(folder, identity) or [])[: len(history)]
    content = b"".join(whole) if len(whole) == len(history) else _encoded(identity, history)
    for name in (NAME, COPY):
        _replace(folder / name, content)


def append(folder: Path, identity: str, number: int, measurement: Measurement) -> None:
    """Add a round; it is on disk afterwards."""
    line = _line(identity, number, measurement)
    for name in (COPY, NAME):
        with writing(folder / name), open(folder / name, "ab") as file:
            file.write(line)
            file.flush()
            if name == NAME:  # the copy is for damage, not for a loss of power
                os.fsync(file.fileno())


def write(folder: Path, identity: str, history: Sequence[Measurement]) -> None:
    """Let the file hold all rounds of a run that has ended; nothing is written if it does."""
    _replace(folder / NAME, _encoded(identity, history))


def remove_copies(folder: Path) -> None:
    """Forget what the tables of a run that has ended say too."""
    (folder / COPY).unlink(missing_ok=True)
    old_formats.remove_parts(folder)


def _replace(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)


def _whole_lines(folder: Path, identity: str) -> list[bytes] | None:
    """The lines with right checksums, of that file which has more of them; None without a file."""
    paths = [path for name in (NAME, COPY) if (path := folder / name).exists()]
    return max((_believed(path, identity) for path in paths), key=len, default=None)


def _believed(path: Path, identity: str) -> list[bytes]:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:  # of a bad disk
        return []
    for number, line in enumerate(lines, start=1):
        body, _, rest = line.rpartition(b', "checksum": ')
        if rest != b"%d}\n" % _checksum(identity, number, body):
            return lines[: number - 1]
    return lines


def _encoded(identity: str, history: Sequence[Measurement]) -> bytes:
    return b"".join(_line(identity, number, one) for number, one in enumerate(history, start=1))


def _line(identity: str, number: int, measurement: Measurement) -> bytes:
    body = json.dumps({"round": number, **measurement._asdict()}).encode().removesuffix(b"}")
    return body + b', "checksum": %d}\n' % _checksum(identity, number, body)


def _checksum(identity: str, number: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(f"{identity} {number}".encode()))


def _decoded(line: bytes) -> Measurement:
    content = json.loads(line)
    return Measurement(content["metrics"], content["clients"])
