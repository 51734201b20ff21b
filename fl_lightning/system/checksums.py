"""Checksums, so that a damaged file is never taken for a good one: of tensors, of headers, and of small JSON files.

A JSON file counts only if it is whole, and only for the run that it belongs to.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.system.atomic import write_atomically

# Of JSON files; 1 had neither checksum nor identity.
FORMAT = 2


def header_checksum(header: Mapping[str, str]) -> str:
    """The checksum of a header."""
    return str(zlib.crc32(json.dumps(header, sort_keys=True).encode()))


def tensor_checksum(tensors: Mapping[str, Tensor]) -> int:
    """The checksum of named tensors: names, types, shapes and contents."""
    result = 0
    for name in sorted(tensors):
        result = zlib.crc32(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode(), result)
        result = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, result)
    return result


class DamagedError(Exception):
    """A damaged file, with what is wrong with it."""


def write(path: Path, identity: str, content: dict[str, Any]) -> None:
    """Write the file as a whole."""
    write_atomically(path, pack(identity, content))


def pack(identity: str, content: dict[str, Any]) -> bytes:
    """What such a file holds."""
    whole = {"format": FORMAT, "identity": identity, **content}
    return json.dumps({**whole, "checksum": _checksum(whole)}).encode()


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
