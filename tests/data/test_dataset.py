import pytest
import torch

from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError

X, Y = torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, Y[:3], X, Y, 3), "same number of samples"),
        ((X, Y, X[:0], Y[:0], 3), "at least 1"),
        ((X, Y.float(), X, Y, 3), "use .long"),
        ((X, Y, X, Y, 2), "labels 0 to 1, got 0 to 2"),
        ((X, Y - 1, X, Y, 3), "got -1 to 1"),
        ((X.numpy(), Y, X, Y, 3), "must be torch tensors, got ndarray"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Dataset(*arguments)
