"""Whoever is timed does the same work."""

import pytest

from benchmarks.speed import TOLERANCE, contestants, largest_difference
from benchmarks.works import seeded, tiny_fits
from fl_lightning.models.networks.softmax import Softmax

pytestmark = pytest.mark.slow


def test_all_contestants_end_at_the_same_model():
    work = tiny_fits(0.05, seeded(lambda: Softmax((20,), 10)), features=20, cohort=3).in_double(samples=25)
    assert {name.partition(" ")[2] for name in contestants(work)} >= {"bare", "usual", "functional", "lightning"}
    assert largest_difference(work) < TOLERANCE
