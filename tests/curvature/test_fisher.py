"""The diagonal Fisher and the gradient of all of a client's data, against autograd; over several blocks."""

import pytest
import torch

from fl_lightning.curvature.fisher import diagonal_fisher, mean_gradient
from fl_lightning.data.batches import BLOCK, ClientData
from fl_lightning.params import zip_map
from tests.support import references
from tests.support.cases import largest_difference, ragged

CASE = ragged(sizes=(BLOCK + 20,))
DATA = ClientData(0, CASE.dataset, CASE.clients[0], torch.float64)


def gradients(batches):
    return [references.gradient(CASE, references.initial(CASE), batch) for batch in batches]


def test_the_gradient_of_all_data_is_that_of_their_mean_loss():
    (expected,) = gradients([CASE.clients[0]])
    assert largest_difference(mean_gradient(CASE.task(), CASE.task().initial, DATA), expected) < 1e-14


def test_per_sample_is_the_mean_of_squares():
    task = CASE.task()
    found = diagonal_fisher(task, task.initial, DATA, "per_sample", None)
    each = gradients(DATA.indices.split(1))
    expected = {name: torch.stack([one[name] for one in each]).square().mean(0) for name in found}
    assert largest_difference(found, expected) < 1e-14


@pytest.mark.parametrize("batch_size", [64, None])
def test_minibatch_weighs_each_square_by_its_batch(batch_size):
    task = CASE.task()
    found = diagonal_fisher(task, task.initial, DATA, "minibatch", batch_size)
    batches = DATA.indices.split(batch_size or len(DATA))
    squares = [zip_map(torch.square, one) for one in gradients(batches)]
    shares = [len(batch) / len(DATA) for batch in batches]
    expected = {name: sum(w * one[name] for w, one in zip(shares, squares, strict=True)) for name in found}
    assert largest_difference(found, expected) < 1e-14
