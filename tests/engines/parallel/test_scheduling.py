"""Longest first, small groups, nobody twice."""

from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.engines.parallel.engine import MOST, bundles
from fl_lightning.system import activity
from fl_lightning.system.activity import Pace


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


def test_the_pace_of_a_round_says_how_long_it_takes(monkeypatch):
    heard, clock = [], iter([0.0, 10.0, 20.0, 30.0])
    monkeypatch.setattr("fl_lightning.system.activity.time.monotonic", lambda: next(clock))
    with activity.heard_by(heard.append):
        pace = Pace("clients trained", [1.0, 3.0, 2.0])
        pace.done(1)
        pace.done(0)
        pace.done(2)
    assert heard == [
        "0 of 3 clients trained",
        "1 of 3 clients trained, 10 s left",
        "2 of 3 clients trained, 10 s left",
        "3 of 3 clients trained",
    ]
