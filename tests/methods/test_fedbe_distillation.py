"""FedBE's student: what it sees, in which mode, and which of its iterates are averaged."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from fl_lightning.data.batches import ClientData
from fl_lightning.errors import Diverged
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbe import FedBE, swa_steps
from tests.methods.test_fedbe import ensemble_labels
from tests.support.cases import equal_bits, final, largest_difference, network, ragged

# A student that moves visibly, in batches that do not divide the 12 held-out samples: 18 steps, SWA at 8, 12 and 16.
LIVELY = FedBE(samples=3, server_epochs=6, server_lr=0.2, server_batch_size=5, swa_start=5, swa_frequency=4)

# --- the student ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frequency", [1, 2, 3, 7, 25])
def test_which_iterates_are_averaged(frequency):
    for total, start in product([1, 2, 6, 20, 24, 60, 500, 510, 1580], [0, 1, 5, 20, 500]):
        every = [t for t in range(1, total + 1) if t % frequency == 0]
        expected = [t for t in every if t > start] or [t for t in every if t > total // 2] or [total]
        assert list(swa_steps(total, start, frequency)) == expected


def test_the_published_schedule():
    assert list(swa_steps(20 * 79, 500, 25)) == list(range(525, 1576, 25))
    assert list(swa_steps(100, 500, None)) == [100]


def test_labels_and_test_set_are_never_used():
    case = ragged()
    expected = final(case.run(LIVELY))
    labels = case.dataset.train_y.clone()
    labels[case.holdout] = (labels[case.holdout] + 1) % 3
    other = replace(case.dataset, train_y=labels, test_x=case.dataset.test_x + 1, test_y=case.dataset.test_y * 0)
    assert equal_bits(final(case._replace(dataset=other).run(LIVELY)), expected)
    inputs = case.dataset.train_x.clone()
    inputs[case.holdout] += 1
    moved = case._replace(dataset=replace(case.dataset, train_x=inputs))
    assert largest_difference(final(moved.run(LIVELY)), expected) > 1e-4


def test_global_randomness_is_neither_used_nor_moved():
    case = ragged()._replace(model=network(dropout=0.5))
    torch.manual_seed(1)
    np.random.seed(1)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one = final(case.run(LIVELY))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    torch.manual_seed(2)
    assert equal_bits(final(case.run(LIVELY)), one)
    assert not equal_bits(final(case.run(LIVELY, seed=1)), one)


@pytest.mark.parametrize("training", [True, False])
def test_teachers_are_evaluated_and_students_train(training):
    """Teachers without dropout, the student with it; the workbench keeps its mode and its weights."""
    case = ragged()._replace(model=network(dropout=0.5))
    record = case.run(LIVELY, rounds=1)[0]
    task = record.cohort.server.task
    task.model.train(training)
    kept = task.weights()
    state, cohort, reports = record.before.state, record.cohort, record.reports
    modes = []
    handle = task.model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    assert equal_bits(LIVELY.aggregate(state, cohort, reports).params, record.after.state.params)
    handle.remove()
    assert modes == [False] * (3 + 1 + 4) + [True] * 18
    assert task.model.training is training
    assert equal_bits(task.weights().params, kept.params)
    labels = LIVELY.soft_labels(LIVELY.teachers(state, cohort, reports), cohort.server)
    plain = case._replace(model=network())
    params = [
        dict(zip(dict(plain.model.named_parameters()), teacher.values(), strict=True))
        for teacher in LIVELY.teachers(state, cohort, reports)
    ]
    assert (labels - ensemble_labels(LIVELY, plain, params)).abs().max() < 1e-12


def test_the_mode_comes_back_even_if_distillation_fails():
    record = ragged().run(LIVELY, rounds=1)[0]
    task = record.cohort.server.task
    task.model.eval()
    with pytest.raises(IndexError):
        LIVELY.distil(record.after.state.params, torch.zeros(3, 3), record.cohort)
    assert not task.model.training


def test_soft_labels_go_through_more_than_one_block():
    """1,100 held-out samples, more than one block; the labels stay in storage order."""
    case = ragged()
    record = case.run(LIVELY, rounds=1)[0]
    places = torch.arange(1100) % len(case.dataset.train_x)
    holdout = ClientData(-1, case.dataset, places, torch.float64)
    teachers = list(LIVELY.teachers(record.before.state, record.cohort, record.reports))
    labels = LIVELY.soft_labels(teachers, record.cohort.server._replace(holdout=holdout))
    expected = ensemble_labels(LIVELY, case._replace(holdout=places), teachers)
    assert (labels - expected).abs().max() < 1e-12


def test_extreme_temperatures_and_certain_teachers_stay_finite():
    case = ragged(torch.float32)
    record = case.run(FedAvg(), rounds=1)[0]
    certain = {name: value * 1e4 for name, value in record.after.state.params.items()}
    for temperature in (1e-6, 0.5, 1e6):
        labels = FedBE(temperature=temperature).soft_labels([certain], record.cohort.server)
        assert labels.dtype == torch.float32
        assert torch.allclose(labels.sum(1), torch.ones(12))
    assert all(value.isfinite().all() for value in final(case.run(FedBE(temperature=1e-6))).values())


def test_a_student_that_diverges_is_named():
    with pytest.raises(Diverged, match="aggregate is not finite in round 1"):
        ragged(torch.float32).run(FedBE(server_lr=1e30))
