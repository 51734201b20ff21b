"""The numbers that describe a partition, against sums in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.data.heterogeneity import measure, summarise

tables = st.integers(1, 6).flatmap(
    lambda classes: st.lists(st.lists(st.integers(0, 50), min_size=classes, max_size=classes), min_size=1, max_size=8)
)


@given(tables.filter(lambda table: any(map(any, table))))
@settings(max_examples=100, deadline=None)
def test_statistics_are_their_definitions(table: list[list[int]]) -> None:
    measured = measure(torch.tensor(table))
    total = sum(map(sum, table))
    population = [sum(column) / total for column in zip(*table, strict=True)]
    for n, row in enumerate(table):
        assert measured.samples[n] == sum(row)
        assert measured.classes[n] == sum(count > 0 for count in row)
        if not sum(row):
            assert math.isnan(measured.entropy[n])
            assert math.isnan(measured.emd[n])
            continue
        shares = [count / sum(row) for count in row]
        assert measured.entropy[n].item() == pytest.approx(-sum(p * math.log2(p) for p in shares if p), abs=1e-12)
        distance = sum(abs(p - q) for p, q in zip(shares, population, strict=True))
        assert measured.emd[n].item() == pytest.approx(distance, abs=1e-12)
        assert distance < 2

    summary, full = summarise(torch.tensor(table)), [row for row in table if sum(row)]
    assert (summary.clients, summary.empty) == (len(table), len(table) - len(full))
    assert (summary.smallest, summary.largest) == (min(map(sum, table)), max(map(sum, table)))
    assert summary.classes == pytest.approx(sum(sum(c > 0 for c in row) for row in full) / len(full))
    weighted = [sum(row) / total * float(measured.emd[n]) for n, row in enumerate(table) if sum(row)]
    assert summary.emd == pytest.approx(sum(weighted), abs=1e-12)


def test_the_ends_of_the_scales() -> None:
    same = summarise(torch.full((5, 8), 3))
    assert (same.emd, same.classes, same.empty) == (0.0, 8.0, 0)
    assert same.entropy == pytest.approx(3.0)
    apart = summarise(torch.eye(10, dtype=torch.int64) * 7)
    assert apart.entropy == 0
    assert apart.emd == pytest.approx(1.8)  # 2 (1 - 1/K)
    assert summarise(torch.tensor([[1], [2], [9], [4]])).median == 3
