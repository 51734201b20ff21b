"""Runs that measure little: every other round, no LA, or clients on their own tests; every table and figure copes."""

import pytest

from analysis import figures, runs, tables
from analysis.claims.means import falls
from analysis.figures import FIGURES
from analysis.runs import studies
from analysis.tables import TABLES
from fl_lightning import experiment
from fl_lightning.runs.config.run_config import configure
from tests.support.small_studies import TINY, new_store

pytestmark = pytest.mark.slow


KINDS = {
    "sparse": {"evaluation.every": 3, "evaluation.local": False, "federation.rounds": 7},
    "personal": {"data.client_test": 0.25, "evaluation.every": 2, "federation.rounds": 7},
}


@pytest.fixture(scope="module")
def sparse_store(tmp_path_factory, empty_store):
    with new_store(tmp_path_factory.mktemp("sparse"), empty_store) as out:
        for kind, settings in KINDS.items():
            for method in ("fedavg", "fola"):
                experiment.run(configure({**TINY, **settings, "method": method}), out, tags={"kind_of_run": kind})
    return out


def of(store, kind):
    return runs.load(store, tags={"kind_of_run": kind})


def test_tables_have_what_was_measured(sparse_store):
    study = of(sparse_store, "sparse")
    table, rounds = study.runs, study.rounds
    assert (table["rounds"] == 7).all()
    assert table["GA"].notna().all()
    assert rounds.loc[rounds["GA"].notna(), "round"].tolist() == [3, 6, 7] * 2
    accuracy = tables.accuracy_and_rounds(study.asked((0.0,)))
    assert (accuracy["rounds to 0%"] == 3).all()
    assert accuracy["LA (%)"].isna().all()
    assert len(tables.correlations(study)) == 0
    assert falls(rounds).notna().all()


def test_personal(sparse_store):
    study = of(sparse_store, "personal")
    found, table = tables.personal(study), study.runs
    assert found["PA after (%)"].tolist() == pytest.approx((100 * table["PA_after"]).tolist())
    assert (found["worst tenth after (%)"] <= found["PA after (%)"]).all()
    everything = runs.load(sparse_store)
    assert len(tables.personal(everything)) == 2  # the others have none
    assert not figures.personal_curves(study).empty


def test_curves_show_what_there_is(sparse_store):
    figure = figures.learning_curves(of(sparse_store, "sparse"))
    assert not figure.empty
    (panel,) = figure.axes
    drawn = [line.get_xdata().tolist() for line in panel.lines if len(line.get_xdata()) > 1]
    assert [3.0, 6.0, 7.0] in [list(map(float, x)) for x in drawn]


def test_every_entry_of_the_report_copes(sparse_store):
    for part in studies(sparse_store):
        for entry in FIGURES:
            if entry.fits(part):
                entry.make(part)
        for table in TABLES:
            if table.fits(part):
                table.make(part)
