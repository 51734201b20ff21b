"""Packs: every run in exactly one, the longest first."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity
from tune import work
from tune.grid import cells
from tune.study_file import load
from tune.work import packs

BASE = {"data": "digits", "model": "softmax", "engine": "functional"}


def seconds(config):
    return 0.1 * config.training.epochs * config.federation.rounds


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 16))
def test_every_run_is_in_exactly_one_pack(lengths, slots):
    runs = list(enumerate(lengths))  # stand-ins: only their number and their cost matter here
    packed = packs(runs, slots, lambda run: 0.05 * run[1])
    assert sorted(run for pack in packed for run in pack) == runs
    costs = [sum(0.05 * length for _, length in pack) for pack in packed]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(costs)), "the longest pack is not the first"
    largest = 0.05 * max(lengths)
    assert max(costs) <= min(work.PACK_SECONDS, sum(costs) / (work.PACKS_PER_SLOT * slots)) + largest + 1e-9


def test_many_short_runs_become_few_trials_and_long_ones_stay_alone():
    short = [configure({**BASE, "seed": seed, "training.epochs": 1}) for seed in range(40)]
    assert len(packs(short, 1, seconds)) <= 9
    assert len(packs(short, 1, lambda _: 100.0)) == 40


def test_packs_survive_the_way_to_another_process():
    pack = [config for cell in cells(load("mnist_curves", "smoke")) for config in cell.configs]
    common, own = work.compact(pack)
    assert [identity(config) for config in work.expand((common, own))] == [identity(config) for config in pack]
    assert "data.alpha" in common
    assert all("data.alpha" not in settings for settings in own)
