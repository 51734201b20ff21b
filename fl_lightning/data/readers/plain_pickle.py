"""Pickles that hold nothing but plain values and arrays of numbers, read without executing what they ask for.

A pickle is a program: the ordinary reader imports and calls whatever the file names. This one knows the few names by
which NumPy's arrays are written, puts harmless stand-ins of ours in their place, and refuses every other name.
"""

import io
import pickle
from typing import Any

import numpy as np

from fl_lightning.data.readers.mapped import Array

NUMBERS = frozenset({"u1", "i1", "i2", "i4", "i8", "f4", "f8"})


class RefusedError(Exception):
    """A pickle that is damaged, or that asks for more than plain values and arrays."""


def loads(content: bytes) -> Any:
    """The content of a pickle. Text that Python 2 wrote comes as bytes, arrays as NumPy's.

    >>> loads(pickle.dumps({"data": np.arange(3), "name": "abc"}))
    {'data': array([0, 1, 2]), 'name': 'abc'}
    """
    try:
        return _finished(_Reader(io.BytesIO(content), encoding="bytes").load())
    except RefusedError:
        raise
    # A damaged program fails in any way: the reader's own list of its exceptions ends with "and others".
    except Exception as error:
        raise RefusedError("not a whole pickle") from error


class _Kind:
    """Stands for `numpy.dtype`."""

    def __init__(self, code: bytes | str, *_: object) -> None:
        self.code = code.decode() if isinstance(code, bytes) else str(code)
        if self.code not in NUMBERS:
            raise RefusedError(f"it holds an array of {self.code}, not of numbers")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1].decode() if isinstance(state[1], bytes) else str(state[1])
        self.code = (order if order in "<>" else "") + self.code


class _Values:
    """Stands for an array that is being filled."""

    def __init__(self, *_: object) -> None:
        self.array: Array = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_column, content = state
        self.array = np.frombuffer(content, kind.code).reshape(shape, order="F" if by_column else "C")


def _from_buffer(content: bytes, kind: _Kind, shape: tuple[int, ...], order: str, *_: object) -> _Values:
    values = _Values()
    values.__setstate__((1, shape, kind, order == "F", content))
    return values


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise RefusedError(f"it asks for the encoding {encoding}")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """How Python 3 writes the bytes of an empty array for Python 2."""
    return b""


STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Kind,
    ("numpy", "ndarray"): None,  # only ever the first argument of `_reconstruct`
    ("numpy.core.multiarray", "_reconstruct"): _Values,
    ("numpy._core.multiarray", "_reconstruct"): _Values,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _no_bytes,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise RefusedError(f"it asks for {module}.{name}, which a file of plain values does not need")
        return STAND_INS[module, name]


def _finished(value: Any) -> Any:
    """The values with arrays in place of their stand-ins."""
    if isinstance(value, _Values):
        return value.array
    if isinstance(value, dict):
        return {key: _finished(item) for key, item in value.items()}
    return value
