"""The list of small mistakes fits the code, so that `make mutants` can be run at any time."""

from pathlib import Path

from tests.mutants.changes import changes

ROOT = Path(__file__).parents[2]


def test_every_change_can_be_made_and_its_tests_are_there():
    known = list(changes())
    texts = {one.file: (ROOT / one.file).read_text() for one in known}
    for one in known:
        compile(one.applied(texts[one.file]), one.file, "exec")
        assert [path for path in one.tests if not (ROOT / path).exists()] == []
        assert one.old != one.new
    assert len(known) >= 64
    assert len(set(known)) == len(known)
    assert sum(not one.noticed for one in known) <= len(known) // 30
