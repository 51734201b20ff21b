import math

import pytest
import torch

from fl_lightning.data import dataset as dataset_module
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError

X, Y = torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])
IMAGES = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, Y[:3], X, Y, 3), "same number of samples"),
        ((X, Y, X[:0], Y[:0], 3), "at least 1"),
        ((X, Y[:, None], X, Y, 3), "one label per sample"),
        ((X, Y.float(), X, Y, 3), "use .long"),
        ((X, Y, X, Y, 2), "labels 0 to 1, got 0 to 2"),
        ((X, Y - 1, X, Y, 3), "got -1 to 1"),
        ((X.numpy(), Y, X, Y, 3), "must be torch tensors, got ndarray"),
        ((X.int(), Y, X, Y, 3), "train_x must hold bytes, floating point numbers or tokens"),
        ((-1 - X.long().abs(), Y, X.long(), Y, 3), "train_x must hold tokens from 0 on, got -"),
        ((X, Y, X[:, 0], Y, 3), r"test_x must hold .* got torch.float32 of shape \(4,\)"),
        ((X, Y, X[:, :1], Y, 3), r"inputs of one shape and type, got \(2,\) of torch.float32 and \(1,\)"),
        ((X, Y, X.double(), Y, 3), "and .* of torch.float64"),
        ((IMAGES, Y, IMAGES, Y, 3, (0.5, 0.5)), "one for each of the 3 channels, got 2 and 1"),
        ((IMAGES, Y, IMAGES, Y, 3, (0.5,) * 3, (0.5,) * 4), "got 3 and 4"),
        ((IMAGES, Y, IMAGES, Y, 3, (0.5,), (0.0,)), "std positive"),
        ((IMAGES, Y, IMAGES, Y, 3, (math.nan,), (1.0,)), "mean must be finite"),
        ((X, Y, X, Y, 3, (0.0,), (1.0,), "paper"), "paper needs"),
        ((X, Y, X, Y, 3, (0.0,), (1.0,), "papr"), "did you mean 'paper'"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        Dataset(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sample", [0, 4, 9])
@pytest.mark.parametrize("half", ["train", "test"])
def test_numbers_that_are_not_finite_are_refused_by_sample(monkeypatch, value, sample, half):
    monkeypatch.setattr(dataset_module, "BLOCK", 9)  # four samples at a time
    good, bad, y = torch.zeros(10, 2), torch.zeros(10, 2), torch.zeros(10, dtype=torch.long)
    bad[sample, 1] = value
    arguments = (bad, y, good, y) if half == "train" else (good, y, bad, y)
    with pytest.raises(UserError, match=rf"{half}_x must hold finite .*, got {value} in sample {sample}, column 1;"):
        Dataset(*arguments, num_classes=2)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([0, 1, 2], "one number for each of the 4 training samples"),
        ([0.0, 1.0, 2.0, 3.0], "torch.long"),
        ([-1, 0, 1, 0], "from 0 on, got -1"),
        ([0, 2, 2, 0], "every client from 0 to 2 must own a sample, but client 1 has none"),
        ([1, 1, 1, 1], "client 0 has none"),
        ([0, 1, 2**40, 2], "client 3 has none"),
    ],
)
def test_owners_that_do_not_fit_are_refused(owners, message):
    with pytest.raises(UserError, match=message):
        Dataset(X, Y, X, Y, 3, owners=torch.tensor(owners))


def test_owners_that_fit():
    assert Dataset(X, Y, X, Y, 3, owners=torch.tensor([1, 0, 1, 1])).owners.tolist() == [1, 0, 1, 1]


def test_no_copy_where_the_data_are_already():
    data = Dataset(X, Y, X, Y, 3)
    assert data.to(torch.device("cpu")) is data
