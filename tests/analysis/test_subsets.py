"""Whatever is missing from a study, its report is written: random subsets of the runs of every smoke study."""

import numpy as np
import pytest

from analysis import claims, findings, report
from analysis.figures import FIGURES
from analysis.runs import Runs, studies
from analysis.tables import TABLES
from tests.support.small_studies import STUDIES

pytestmark = pytest.mark.system


SUBSETS = 2


@pytest.fixture(scope="module")
def store(smoke_store):
    """Read once for all subsets."""
    return Runs(smoke_store)


def subset_of(part, rng):
    """Some of its runs, of which some have diverged or not ended."""
    kept = part.runs.sample(int(rng.integers(1, len(part.runs) + 1)), random_state=rng).sort_index()
    kept = kept.reset_index(drop=True)
    for status in ("diverged", "running"):
        lost = rng.random(len(kept)) < rng.choice([0, 0.3])
        kept.loc[lost, ["status", "ended"]] = [status, False]
    return part.of(kept)


@pytest.mark.parametrize("study", STUDIES)
def test_nothing_fails_on_a_part_of_a_study(store, study):
    rng = np.random.default_rng(STUDIES.index(study))
    (whole,) = studies(store, study)
    for _ in range(SUBSETS):
        part = subset_of(whole, rng)
        assert findings.summary(part)
        for entry in FIGURES:
            if entry.fits(part):
                entry.make(part)
        for table in TABLES if part.runs["ended"].any() else ():
            if table.fits(part):
                table.make(part)
        for one in claims.check([part]):
            assert not one.finding.failed, one.finding.why
            assert one.finding.known or one.verdict == "undecided"
            assert "nan" not in claims.markdown(one)


def test_the_page_of_a_part_of_a_study(smoke_store, tmp_path):
    """What once was an IndexError: fewer points than a correlation needs."""
    (whole,) = studies(smoke_store, "ae_lf")
    few = list(whole.runs.loc[whole.runs["data.alpha"].eq(1), "run_id"])[:3]
    written = report.write(tmp_path, smoke_store, "ae_lf", where={"run_id": few})
    assert not [sentence for sentence in written.findings if sentence.startswith(report.FAILED)]
    text = written.page.read_text()
    assert "ndecided" in text
    assert all(run_id[:8] in text for run_id in few)


def test_an_item_that_fails_is_named_and_the_page_is_written(smoke_store, tmp_path, monkeypatch):
    def broken(*_):
        raise IndexError("list index out of range\nand more")

    monkeypatch.setattr("analysis.findings.summary", broken)
    monkeypatch.setattr(report, "TABLES", (TABLES[0]._replace(function=broken), TABLES[2]))
    entry = next(entry for entry in FIGURES if entry.key == "learning_curves")
    others = [entry for entry in FIGURES if entry.key == "partitions"]
    monkeypatch.setattr(report, "FIGURES", (entry._replace(function=broken), *others))
    written = report.write(tmp_path, smoke_store, "demo")
    reason = "IndexError: list index out of range"
    titles = ("the summary", "Learning curves", "GA, LA and rounds to thresholds")
    assert written.findings == [f"{report.FAILED} {title}: {reason}" for title in titles]
    text = written.page.read_text()
    assert all(sentence in text for sentence in written.findings)
    assert (tmp_path / "figures" / "demo-smoke-partitions.svg").exists()
    assert (tmp_path / "tables" / "demo-smoke-paired.csv").exists()
