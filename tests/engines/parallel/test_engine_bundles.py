"""Longest first, small groups, nobody twice."""

from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.engines.parallel.engine import MOST, bundles


@given(
    st.lists(st.floats(0.1, 1000), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(1, 5),
    st.none() | st.floats(1e-6, 10),
)
def test_bundles(work, workers, size, pace):
    groups = [range(first, min(first + size, len(work))) for first in range(0, len(work), size)]
    found = bundles(groups, range(100, 100 + len(work)), work, workers, pace)
    assert sorted(p for bundle in found for group in bundle.groups for p in group) == list(range(len(work)))
    lengths = [[sum(work[p] for p in group) for group in bundle.groups] for bundle in found]
    flat = [length for bundle in lengths for length in bundle]
    assert flat == sorted(flat, reverse=True)
    for bundle, one in zip(lengths, found, strict=True):
        assert len(bundle) == 1 or (pace is not None and sum(bundle) * pace <= MOST * (1 + 1e-9))
        assert one.clients == tuple(100 + p for group in one.groups for p in group)
