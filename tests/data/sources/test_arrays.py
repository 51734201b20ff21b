"""--data arrays: an .npz file."""

import numpy as np
import pytest
import torch

from fl_lightning.data.readers import fingerprint
from fl_lightning.data.readers.assemble import split_off_test
from fl_lightning.data.sources.arrays import Arrays
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
Y = np.arange(40) % 4
HUGE = np.zeros((40, 3))
HUGE[20, 1] = 1e39
IMAGES = RNG.integers(256, size=(40, 3, 8, 8), dtype=np.uint8)
GOOD = {"train_x": X[:30], "train_y": Y[:30], "test_x": X[30:], "test_y": Y[30:]}


@pytest.fixture
def save(tmp_path):
    def write(**arrays):
        np.savez(tmp_path / "my.npz", **arrays)
        return str(tmp_path / "my.npz")

    return write


@pytest.mark.parametrize("pack", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("small", [0, 10**9], ids=["mapped", "in memory"])
def test_the_arrays_as_they_are(tmp_path, monkeypatch, pack, small):
    monkeypatch.setattr(fingerprint, "SMALL", small)
    monkeypatch.setenv("FL_LIGHTNING_DATA", str(tmp_path / "data"))
    pack(tmp_path / "my.npz", owners=np.arange(30) % 7, **GOOD)
    data = Arrays(path=str(tmp_path / "my.npz")).load()
    for name, array in GOOD.items():
        assert np.array_equal(getattr(data, name).numpy(), array)
    assert data.owners.tolist() == [i % 7 for i in range(30)]
    assert data.num_classes == 4
    assert (tmp_path / "data").exists() == (small == 0)


def test_bytes_are_scaled_to_minus_one_to_one(save):
    data = Arrays(path=save(train_x=IMAGES, train_y=Y), augment="standard").load()
    assert data.inputs(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), torch.float32).flatten().tolist() == [-1, 1]
    assert data.augment == "standard"
    own = Arrays(path=save(train_x=IMAGES, train_y=Y, mean=[0.1, 0.2, 0.3], std=0.5)).load()
    assert own.mean == pytest.approx((0.1, 0.2, 0.3))
    assert own.std == (0.5,)


def test_grey_images_get_a_channel(save):
    assert Arrays(path=save(train_x=IMAGES[:, 0], train_y=Y)).load().shape == (1, 8, 8)


def test_owners_by_name(save):
    data = Arrays(path=save(**GOOD, owners=np.array(["b", "a", "c"] * 10))).load()
    assert data.owners[:3].tolist() == [1, 0, 2]


def test_without_a_test_set_a_share_of_every_class_is_split_off(save):
    path = save(train_x=X, train_y=Y)
    data = Arrays(path=path, test_share=0.3).load()
    assert data.test_y.bincount().tolist() == [3] * 4
    assert data.train_y.bincount().tolist() == [7] * 4
    both = torch.cat([data.train_x, data.test_x])
    assert sorted(both.tolist()) == sorted(X.tolist()), "every sample once"
    again = Arrays(path=path, test_share=0.3).load()
    assert torch.equal(again.test_x, data.test_x)


def test_every_class_and_owner_keeps_a_training_sample():
    labels = np.array([0] * 20 + [1] + [2] * 20)
    owners = np.array([0] * 20 + [1] * 20 + [2])
    split = split_off_test({"train_x": np.arange(41), "train_y": labels, "owners": owners}, 0.9)
    assert set(split["train_y"]) == {0, 1, 2}
    assert set(split["owners"]) == {0, 1, 2}
    assert len(split["test_y"]) > 30


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X, "y": Y}, "unknown array 'x'"),
        ({"train_x": X}, "expected arrays train_x, train_y, test_x, test_y, got train_x"),
        ({"train_x": X, "train_y": Y, "test_x": X}, "expected arrays"),
        ({**GOOD, "tset_x": X}, "did you mean 'test_x'"),
        ({**GOOD, "train_y": Y[:29]}, "same number of samples"),
        ({"train_x": X, "train_y": Y[:29]}, "same number of samples"),
        ({**GOOD, "train_y": Y[:30] + 1}, "class 0 has none; number the labels from 0 without gaps"),
        ({**GOOD, "train_y": Y[:30] - 1}, "labels 0 to 3, got -1 to 2"),
        ({**GOOD, "train_y": np.where(Y[:30] == 2, 0, Y[:30])}, "class 2 has none"),
        ({**GOOD, "test_y": np.full(10, 7)}, "class 4 has none"),
        ({**GOOD, "train_y": Y[:30] * 0, "test_y": Y[30:] * 0}, "at least two classes"),
        ({**GOOD, "train_y": Y[:30].astype(float)}, "whole numbers as float64, .* --data.task classification or"),
        ({**GOOD, "train_y": np.array(list("abc") * 10)}, "return_inverse"),
        ({**GOOD, "train_y": np.eye(4)[Y[:30]]}, "argmax"),
        ({**GOOD, "train_x": np.zeros((30, 2, 2), int)}, "save it as uint8"),
        ({"train_x": X.astype(int) - 9, "train_y": Y}, "train_x must hold tokens from 0 on"),
        ({**GOOD, "train_x": X[:30].astype(complex)}, "save it as uint8"),
        ({**GOOD, "train_x": X[:30, 0]}, "needs at least 2 dimensions"),
        ({**GOOD, "test_x": X[30:, :2]}, "inputs of one shape"),
        (
            {**GOOD, "train_x": np.where(X[:30] > 1, np.nan, X[:30])},
            "must hold finite numbers of .*, got nan in sample",
        ),
        ({"train_x": HUGE, "train_y": Y}, r"got 1e\+39 in sample 20, column 1; correct"),
        ({"train_x": X[:, :0], "train_y": Y}, r"train_x must hold at least one number per sample, got shape \(40, 0\)"),
        ({"train_x": IMAGES[:, :, :0], "train_y": Y}, r"at least one number per sample, got shape \(40, 3, 0, 8\)"),
        ({"train_x": X[:, :0].astype(int), "train_y": Y}, "at least one number per sample"),
        ({**GOOD, "owners": np.arange(30) * 2}, "client 1 has none"),
        ({**GOOD, "owners": np.arange(29)}, "one number for each of the 30"),
        ({"train_x": X, "train_y": Y, "owners": np.arange(30)}, "owners needs"),
        ({**GOOD, "owners": np.arange(30.0)}, "owners must hold one whole number or name"),
        ({"train_x": IMAGES.transpose(0, 2, 3, 1), "train_y": Y}, "looks like channels last"),
        ({"train_x": IMAGES, "train_y": Y, "mean": [0.1, 0.2]}, "one for each of the 3 channels"),
        ({"train_x": X[:3], "train_y": np.arange(3)}, "leaves no test set"),
        ({"train_x": X[:0], "train_y": Y[:0]}, "at least 1"),
        ({**GOOD, "train_x": np.array([{}] * 30)}, "could hide code"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(save, arrays, message):
    path = save(**arrays)
    with pytest.raises(UserError, match=message) as caught:
        Arrays(path=path).load()
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_files_that_are_something_else_are_named(tmp_path, save):
    whole = (tmp_path / "my.npz", save(**GOOD))[0].read_bytes()
    for content in (b"", b"a,b\n1,2\n", whole[:100], whole[:-30], whole[:300] + b"\0" * 50 + whole[350:]):
        (tmp_path / "my.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"my.npz: .*np.savez"):
            Arrays(path=str(tmp_path / "my.npz")).load()
    with pytest.raises(UserError, match="No such file"):
        Arrays(path=str(tmp_path / "none.npz")).load()
    with pytest.raises(UserError, match="must be a file, got a folder"):
        Arrays(path=str(tmp_path)).load()


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(UserError, match=r"data.path is missing: .* --data.path my.npz"):
        Arrays()
    with pytest.raises(UserError, match="test_share must be > 0 and < 1"):
        Arrays(path="x.npz", test_share=1.0)


def test_a_changed_file_is_another_run_and_a_moved_one_is_not(tmp_path, save):
    def known_by(path):
        return identity(configure({"data": "arrays", "data.path": path}))

    path = save(**GOOD)
    first = known_by(path)
    assert known_by(path) == first
    (tmp_path / "my.npz").rename(tmp_path / "moved.npz")
    assert known_by(str(tmp_path / "moved.npz")) == first
    path = save(**{**GOOD, "train_x": X[:30] + 1})
    assert known_by(path) != first
