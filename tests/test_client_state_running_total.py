"""A sum that only changes are added to, against the sum of all rows."""

import math
from typing import NamedTuple

import pytest
import torch

from fl_lightning.client_state import ClientMemory, RunningTotal, Snapshot
from fl_lightning.loop import federate
from fl_lightning.methods.bayes_admm import BayesADMM
from fl_lightning.methods.ep import EP
from fl_lightning.methods.fedcurv import FedCurv
from fl_lightning.methods.fedlap import FedLap
from fl_lightning.runs import checkpoint
from fl_lightning.system import trees
from fl_lightning.testing.purity import copied, same
from tests.support.cases import equal_bits, final, ragged

DTYPES = [torch.float32, torch.float64]
METHODS = [FedLap(), EP(), EP(inference="vi", damping=0.7), BayesADMM(), FedCurv(memory="all"), FedCurv()]


class Pair(NamedTuple):
    u: dict
    v: dict


def parts_of(state):
    """The memory and its sum."""
    (memory,) = (part for part in state if isinstance(part, ClientMemory))
    (total,) = (part for part in state if isinstance(part, RunningTotal))
    return memory, total


def exact(memory):
    """The sum of all rows without any rounding but the last one, to float64."""
    leaves, structure = trees.flatten(memory.default)
    rows = [trees.leaves(memory[n]) for n in memory.seen]
    found = []
    for place, leaf in enumerate(leaves):
        columns = zip(*(row[place].double().reshape(-1).tolist() for row in rows), strict=True) if rows else ()
        sums = [math.fsum(column) for column in columns] or [0.0] * leaf.numel()
        found.append(torch.tensor(sums, dtype=torch.float64).view(leaf.shape))
    return trees.unflatten(found, structure)


def random_row(stream, dtype, spread):
    """Numbers of very different sizes and of both signs."""
    size = 10 ** (spread * (torch.rand(6, generator=stream, dtype=torch.float64) - 0.5))
    value = (torch.randn(6, generator=stream, dtype=torch.float64) * size).to(dtype)
    return Pair({"a": value[:4].view(2, 2)}, {"b": value[4:]})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0, 12])
def test_after_a_thousand_rounds_nothing_is_lost(dtype, spread):
    stream = torch.Generator().manual_seed(3)
    memory = ClientMemory.blank(random_row(stream, dtype, spread))
    total = RunningTotal.without_rows(memory.default)
    for _ in range(1000):
        cohort = torch.randperm(30, generator=stream)[:4].tolist()
        rows = {n: random_row(stream, dtype, spread) for n in cohort}
        memory, total = memory.replaced(rows), total.changed(memory, rows)
    for found, expected in zip(trees.leaves(total.sums), trees.leaves(exact(memory)), strict=True):
        assert torch.equal(found, expected)
    assert all(leaf.dtype == dtype for leaf in trees.leaves(total.rounded()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_client_adds_up_to_its_row_however_often_it_has_changed(dtype):
    stream = torch.Generator().manual_seed(0)
    memory = ClientMemory.blank(random_row(stream, dtype, 0))
    total = RunningTotal.without_rows(memory.default)
    for _ in range(20):
        rows = {3: random_row(stream, dtype, 20)}
        memory, total = memory.replaced(rows), total.changed(memory, rows)
        assert same(total.rounded(), rows[3])


def test_what_all_take_back_adds_up_to_nothing():
    stream = torch.Generator().manual_seed(1)
    memory = ClientMemory.blank({"w": torch.ones(5)})
    rows = {n: {"w": torch.randn(5, generator=stream)} for n in range(9)}
    nothing = {n: {"w": torch.zeros(5)} for n in rows}
    total = RunningTotal.without_rows(memory.default)
    assert same(total.rounded(), nothing[0])
    after = total.changed(memory, rows).changed(memory.replaced(rows), nothing)
    assert same(after, total)


def test_neither_the_order_of_clients_matters_nor_is_anything_written_to():
    stream = torch.Generator().manual_seed(2)
    memory = ClientMemory.blank({"w": torch.zeros(5, dtype=torch.float64)})
    rows = {n: {"w": torch.randn(5, generator=stream, dtype=torch.float64)} for n in range(9)}
    start = RunningTotal.without_rows(memory.default).changed(memory, {4: rows[8]})
    memory = memory.replaced({4: rows[8]})
    before = copied((start, memory, rows))
    assert same(start.changed(memory, rows), start.changed(memory, dict(reversed(rows.items()))))
    assert same((start, memory, rows), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_sum_of_a_method_is_that_of_its_clients_rows(method, dtype):
    for record in ragged(dtype).run(method, cohort=2, rounds=25):
        memory, total = parts_of(record.after.state)
        for found, expected in zip(trees.leaves(total.sums), trees.leaves(exact(memory)), strict=True):
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
    assert len(memory.seen) > 2 or method == FedCurv()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_round_reads_the_rows_of_its_cohort_alone(method, monkeypatch):
    asked = []
    read = ClientMemory.__getitem__

    def watched(memory, client):
        asked.append(client)
        return read(memory, client)

    def refused(memory):
        raise AssertionError("somebody wants to know all clients that were seen")

    case = ragged().changed(cohort=2, rounds=12)
    monkeypatch.setattr(ClientMemory, "__getitem__", watched)
    monkeypatch.setattr(ClientMemory, "seen", property(refused))
    for record in federate(method, case.problem(), case.training, case.federation):
        method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
        assert set(asked) <= set(record.cohort.members)
        asked.clear()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_run_that_goes_on_has_the_same_sum_to_the_bit(method, tmp_path):
    case = ragged(dtype=torch.float32).changed(cohort=2, rounds=6)
    records = case.go_on(method)
    checkpoint.write(tmp_path, "id", records[3].after)
    start = Snapshot(0, method.init(case.task().initial.params, 5), {})
    saved = checkpoint.read(tmp_path, "id", start)
    assert same(saved.state, records[3].after.state)
    assert equal_bits(final(case.go_on(method, resume=saved)), final(records))
