"""Pickles of plain values are read; whatever asks for code is refused without running it."""

import os
import pickle

import numpy as np
import pytest

from fl_lightning.data.readers import plain_pickle
from fl_lightning.data.readers.plain_pickle import RefusedError

ARRAYS = [
    np.arange(24, dtype=np.uint8).reshape(2, 12),
    np.arange(6, dtype=np.int64),
    np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    np.arange(4, dtype=">i4"),
    np.empty((0, 3), dtype=np.int16),
]


class Calls:
    """Runs a function when it is unpickled the ordinary way."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays_of_every_protocol(array, protocol):
    read = plain_pickle.loads(pickle.dumps({"data": array, "labels": [1, 2]}, protocol))
    assert np.array_equal(read["data"], array)
    assert read["data"].dtype == array.dtype
    assert read["labels"] == [1, 2]


def test_what_python_2_wrote():
    # {'data': numpy.array([1, 2], 'uint8')} by Python 2, protocol 2, as in the official CIFAR files.
    content = (
        b"\x80\x02}q\x01U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x02\x85cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ"
        b"\xff\xff\xff\xffK\x00tb\x89U\x02\x01\x02tbs."
    )
    assert pickle.loads(content, encoding="bytes")[b"data"].tolist() == [1, 2], "the example itself"
    assert plain_pickle.loads(content)[b"data"].tolist() == [1, 2]


@pytest.mark.parametrize("protocol", range(6))
def test_code_is_refused_and_not_run(tmp_path, protocol):
    mark = tmp_path / "was here"
    content = pickle.dumps({"data": Calls(os.mkdir, str(mark))}, protocol)
    with pytest.raises(RefusedError, match=r"it asks for \w+\.mkdir"):
        plain_pickle.loads(content)
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists(), "the pickle is as harmless as this test"


@pytest.mark.parametrize(
    "value",
    [
        np.array([len, 1], dtype=object),
        np.array(["text"]),
        np.dtype([("a", "u1")]),
        Calls(np.ndarray, 3),
        Calls(np.load, "file"),
        Calls(eval, "1"),
        Calls(bytes, 10),
        Calls(getattr, (), "__class__"),
    ],
    ids=["objects", "text", "records", "a class", "a function of numpy", "eval", "bytes", "getattr"],
)
def test_more_than_plain_arrays_is_refused(value):
    with pytest.raises(RefusedError):
        plain_pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([b"ab"]), np.array([None])], ids=lambda a: a.dtype.kind)
def test_arrays_of_something_else_are_refused(array):
    with pytest.raises(RefusedError, match=r"it holds an array of .*, not of numbers"):
        plain_pickle.loads(pickle.dumps(array))


@pytest.mark.parametrize("length", [0, 1, 10, 60, -1])
def test_half_a_pickle(length):
    with pytest.raises(RefusedError, match="not a whole pickle"):
        plain_pickle.loads(pickle.dumps({"data": ARRAYS[0], "labels": [1]}, 2)[:length])
