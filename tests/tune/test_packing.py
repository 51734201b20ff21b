"""Packs: every run in exactly one, shared first rounds together, the longest first."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.config import configure
from fl_lightning.runs.identity import identity
from tune import packing
from tune.grid import cells
from tune.packing import packs, units
from tune.study_file import load

BASE = {"data": "digits", "model": "softmax", "engine": "functional"}


def seconds(config):
    return 0.1 * config.training.epochs * config.federation.rounds


def test_runs_that_share_their_first_round_are_one_unit():
    configs = [config for cell in cells(load("mnist_first_round", "smoke")) for config in cell.configs]
    grouped = units(configs)
    assert sorted(identity(config) for unit in grouped for config in unit) == sorted(identity(c) for c in configs)
    assert len(grouped) == 8  # two alphas, two rates, two seeds
    for unit in grouped:
        assert len(unit) == 4
        assert {(c.names["method"], c.training.epochs) for c in unit} == {
            (method, epochs) for method in ("fedavg", "fola") for epochs in (1, 2)
        }
        assert len({(c.training.lr, c.split.alpha, c.seed) for c in unit}) == 1


def test_runs_of_several_rounds_are_on_their_own():
    configs = [configure({**BASE, "method": m, "federation.rounds": r}) for m in ("fedavg", "fola") for r in (1, 2, 3)]
    assert sorted(len(unit) for unit in units(configs)) == [1, 1, 1, 1, 2]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=60), st.integers(1, 16))
def test_every_unit_is_in_exactly_one_pack(lengths, slots):
    # Stand-ins: only their number and their cost matter here.
    work = [[(number, cost)] * size for number, (cost, size) in enumerate(lengths)]
    packed = packs(work, slots, lambda run: 0.05 * run[1])
    assert sorted(unit[0][0] for pack in packed for unit in pack) == list(range(len(work)))
    assert all(len(unit) == lengths[unit[0][0]][1] for pack in packed for unit in pack)
    costs = [sum(packing._cost(unit, lambda run: 0.05 * run[1]) for unit in pack) for pack in packed]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(costs)), "the longest pack is not the first"
    total = sum(costs)
    largest = max(packing._cost(unit, lambda run: 0.05 * run[1]) for unit in work)
    assert max(costs) <= min(packing.PACK_SECONDS, total / (packing.PACKS_PER_SLOT * slots)) + largest + 1e-9


def test_many_short_runs_become_few_trials_and_long_ones_stay_alone():
    short = [[configure({**BASE, "seed": seed, "training.epochs": 1})] for seed in range(40)]
    assert len(packs(short, 1, seconds)) <= 9
    assert len(packs(short, 1, lambda _: 100.0)) == 40


def test_a_shared_round_costs_about_as_much_as_its_longest_run():
    unit = [configure({**BASE, "federation.rounds": 1, "training.epochs": e}) for e in (1, 5, 10)]
    assert 1.0 <= packing._cost(unit, seconds) < 1.2


def test_packs_survive_the_way_to_another_process():
    study = load("mnist_curves", "smoke")
    pack = [cell.configs for cell in cells(study)]
    common, own = packing.compact(pack)
    assert [[identity(config) for config in unit] for unit in packing.expand((common, own))] == [
        [identity(config) for config in unit] for unit in pack
    ]
    assert "data.alpha" in common
    assert all("data.alpha" not in settings for unit in own for settings in unit)
