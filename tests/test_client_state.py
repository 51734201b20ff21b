"""The clients' memory against a plain dict, and its way through everything that a state goes through."""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch

from fl_lightning.client_state import ClientMemory, Snapshot
from fl_lightning.methods.fedcurv import FedCurv
from fl_lightning.methods.scaffold import Scaffold
from fl_lightning.params import count
from fl_lightning.runs import checkpoint
from fl_lightning.system import trees
from fl_lightning.testing.purity import copied, same
from tests.support.cases import equal_bits, final, ragged


class Pair(NamedTuple):
    u: dict
    v: dict


def some_row(value, dtype=torch.float32):
    return Pair({"a": torch.full((2, 3), float(value), dtype=dtype)}, {"b": torch.tensor(-float(value), dtype=dtype)})


def test_clients_have_the_first_row_until_they_get_their_own():
    memory = ClientMemory.blank(some_row(0.5))
    later = memory.replaced({9: some_row(1), 3: some_row(2)}).replaced({9: some_row(3)})
    assert later.seen == (3, 9)
    assert [n in later for n in (3, 4, 9)] == [True, False, True]
    for n, value in ((3, 2), (4, 0.5), (9, 3), (100_000, 0.5)):
        assert same(later[n], some_row(value))


def test_an_earlier_memory_stays_as_it_is_and_shares_the_other_rows():
    first = ClientMemory.blank(some_row(0)).replaced({1: some_row(1), 2: some_row(2)})
    second = first.replaced({2: some_row(5), 3: some_row(6)})
    assert first.seen == (1, 2)
    assert same(first[2], some_row(2))
    assert second[1].u["a"].data_ptr() == first[1].u["a"].data_ptr()


def test_stacked_rows_are_in_the_order_asked_for():
    memory = ClientMemory.blank(some_row(0)).replaced({4: some_row(4), 1: some_row(1)})
    stacked = memory.stacked((4, 7, 1))
    assert stacked.u["a"].shape == (3, 2, 3)
    assert stacked.v["b"].tolist() == [-4, 0, -1]


@pytest.mark.parametrize(
    "row",
    [
        {"w": torch.zeros(3)},
        {"w": torch.zeros(2, dtype=torch.float64)},
        {"v": torch.zeros(2)},
        {"w": torch.zeros(2), "v": torch.zeros(2)},
    ],
)
def test_a_row_unlike_the_others_is_refused(row):
    with pytest.raises(ValueError, match="for client 6, got"):
        ClientMemory.blank({"w": torch.zeros(2)}).replaced({6: row})


def test_only_tensors_are_remembered():
    with pytest.raises(TypeError, match="expected a tree of tensors"):
        ClientMemory.blank({"w": 1.0})


def test_a_row_does_not_keep_the_whole_cohort_in_memory():
    cohort = torch.zeros(100, 50)
    memory = ClientMemory.blank({"w": torch.zeros(50)}).replaced({1: {"w": cohort[1]}})
    assert memory[1]["w"].untyped_storage().nbytes() == 50 * 4


def test_trees_see_the_rows():
    memory = ClientMemory.blank(some_row(0)).replaced({2: some_row(2), 1: some_row(1)})
    assert count(memory) == 3 * 7
    doubled = trees.map_leaves(lambda leaf: 2 * leaf, memory)
    assert isinstance(doubled, ClientMemory)
    assert doubled.seen == (1, 2)
    assert same(doubled[2], some_row(4))


def test_purity_checks_notice_a_change_in_any_row():
    memory = ClientMemory.blank(some_row(0)).replaced({1: some_row(1)})
    for victim in (memory[1], memory[2]):
        kept = copied(memory)
        assert same(memory, kept)
        victim.u["a"].add_(1)
        assert not same(memory, kept)
    assert not same(memory, memory.replaced({2: memory[2]}))  # who has taken part is part of it


@pytest.mark.parametrize("double", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))])
def test_copies_and_pickles_are_the_same(double):
    memory = ClientMemory.blank(some_row(0)).replaced({1: some_row(1)})
    assert same(double(memory), memory)


@pytest.mark.parametrize("method", [Scaffold(niid_bench_init=True), FedCurv(memory="all")])
def test_a_checkpoint_holds_the_clients_that_have_taken_part(method, tmp_path):
    case = ragged(dtype=torch.float32).changed(cohort=1, rounds=5)
    records = case.go_on(method)
    checkpoint.write(tmp_path, "id", records[2].after)
    start = Snapshot(0, method.init(case.task().initial.params, 5), {})
    saved = checkpoint.read(tmp_path, "id", start)
    seen = {n for record in records[:3] for n in record.cohort.members}
    assert saved.state.clients.seen == tuple(sorted(seen))
    assert same(saved.state, records[2].after.state)
    assert equal_bits(final(case.go_on(method, resume=saved)), final(records))
    assert checkpoint.read_parts(tmp_path).params.keys() == records[2].after.state.params.keys()
