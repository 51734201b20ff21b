"""Checksums of tensors and of the headers of their files, so that a damaged file is never taken for a good one."""

import json
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor


def seal(header: Mapping[str, str]) -> str:
    """The checksum of a header."""
    return str(zlib.crc32(json.dumps(header, sort_keys=True).encode()))


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """The checksum of named tensors: names, types, shapes and contents."""
    result = 0
    for name in sorted(tensors):
        result = zlib.crc32(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode(), result)
        result = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, result)
    return result
