"""No number moves without its version: finished runs are known by it."""

import pytest

from tests import golden

ENTRIES = golden.entries()


def test_nothing_is_golden_that_is_no_more():
    assert set(golden.stored()) <= set(ENTRIES), "run `make golden`"


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_numbers_move_only_with_their_version(name):
    entry, stored = ENTRIES[name], golden.stored().get(name)
    assert stored is not None, f"{name} is new: run `make golden`"
    assert stored["version"] == entry.version, f"the version of {name} was raised: run `make golden`"
    assert golden.same(entry.compute(), stored["numbers"]), (
        f"{name} has changed: raise the version of that part, so that older runs are not taken for new ones, and run "
        "`make golden`"
    )


def test_golden_numbers_notice_a_change(monkeypatch):
    name = "method fedavg"
    before = ENTRIES[name].compute()
    monkeypatch.setattr("fl_lightning.methods.fedavg.average", lambda start, models, weights, rate=1.0: dict(models[0]))
    assert not golden.same(ENTRIES[name].compute(), before)
