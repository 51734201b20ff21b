"""Small JSON files that are believed only if they are whole, and only by the run that they belong to."""

import json
import zlib
from pathlib import Path
from typing import Any

from fl_lightning.system.atomic import write_atomically

FORMAT = 2  # 1 had neither checksum nor identity


class DamagedError(Exception):
    """A file that is not to be believed; says what is wrong with it."""


def write(path: Path, identity: str, content: dict[str, Any]) -> None:
    """Write the file as a whole."""
    write_atomically(path, pack(identity, content))


def pack(identity: str, content: dict[str, Any]) -> bytes:
    """What such a file holds."""
    sealed = {"format": FORMAT, "identity": identity, **content}
    return json.dumps({**sealed, "checksum": _checksum(sealed)}).encode()


def read(path: Path, identity: str | None) -> dict[str, Any]:
    """What was written.

    Args:
        path: The file.
        identity: Of the run that it must belong to; None takes any.

    Raises:
        DamagedError: If something else is in it now, or it belongs to another run.
        FileNotFoundError: If there is none.
    """
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise DamagedError(f"is damaged ({' '.join(str(error).split())})") from None
    return unpack(content, identity)


def unpack(packed: bytes, identity: str | None) -> dict[str, Any]:
    """What was packed; arguments and errors as for `read`."""
    try:
        content = json.loads(packed.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"is damaged ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict) or "checksum" not in content:
        raise DamagedError("has no checksum: it was written by an earlier version, or is damaged")
    if content.pop("checksum") != _checksum(content) or content.get("format") != FORMAT:
        raise DamagedError("is damaged (its checksum does not match)")
    if identity is not None and content["identity"] != identity:
        raise DamagedError(f"belongs to another run ({content['identity']}, not {identity})")
    return content


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
