"""Calibration in tables and figures, from runs with a final round and from runs without."""

import pytest

from analysis import figures, run_arrays, tables
from analysis.figures import FIGURES
from analysis.runs import studies
from analysis.tables import TABLES
from fl_lightning import configure, experiment

SETTINGS = {
    "data": "digits",
    "data.clients": 3,
    "data.subset": 0.2,
    "data.validation": 0.1,
    "model.hidden": [8],
    "training.lr": 0.1,
    "federation.rounds": 1,
    "engine": "functional",
}


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    for alpha in (0.1, 100.0):
        for method, ending in (("fedavg", {}), ("fola", {"uncertainty.final_round": True})):
            experiment.run(configure(SETTINGS | {"data.alpha": alpha, "method": method} | ending), out)
    (found,) = studies(out)
    return found


def test_the_table_has_every_kind_of_prediction(part):
    table = tables.calibration(part)
    assert table.groupby("case")["prediction"].unique().map(set).to_dict() == {
        "FedAvg": {"map"},
        "FOLA": {"map", "temperature", "probit"},
    }
    for _, run in part.runs.iterrows():
        mine = table.loc[table["case"].eq(run["case"]) & table["α"].eq(run["data.alpha"])].set_index("prediction")
        assert mine.loc["map", "ECE"] == pytest.approx(run["ECE"])
        if run["case"] == "FOLA":
            assert mine.loc["probit", "NLL"] == run["probit/NLL"]
            assert mine.loc["probit", "AUROC noise"] == run["probit/AUROC/noise"]
            assert mine.loc["probit", "adaptive ECE"] == run["probit/adaptive_ECE"]
            assert mine.loc["map", "class-wise ECE"] == run["map/classwise_ECE"]
            assert mine.loc["temperature", "fitted T"] == run["posterior/logit_temperature"]
            assert mine["fitted T"].notna().tolist() == [kind == "temperature" for kind in mine.index]


def test_a_table_of_inputs_of_no_class(part):
    table = tables.detection(part)
    assert set(table["case"]) == {"FOLA"}
    for _, run in part.runs.loc[part.runs["case"].eq("FOLA")].iterrows():
        mine = table.loc[table["α"].eq(run["data.alpha"])].set_index("prediction")
        assert set(mine.index) == {"map", "temperature", "probit"}
        for metric in ("AUROC", "AUPR", "FPR95"):
            assert mine.loc["probit", metric] == run[f"probit/{metric}/noise"]
    assert tables.detection(part.only("FedAvg")).empty


def test_what_a_module_logs_is_no_kind_of_prediction(part):
    runs = part.runs.drop(columns=[name for name in part.runs if "/" in str(name)])
    runs["val/NLL"] = 1.0
    assert set(tables.calibration(part.of(runs))["prediction"]) == {"map"}
    assert not part.of(runs).has_final_rounds


def test_the_figures_show_the_runs_that_have_had_a_final_round(part):
    curves = run_arrays.trust(part)
    assert set(curves.runs["case"]) == {"FOLA"}
    for figure in (figures.reliability(curves), figures.risk_coverage(curves), figures.entropies(curves)):
        assert not figure.empty
        assert len(figure.axes) == 2
        assert set(figure.run_ids) == set(curves.runs["run_id"])
    assert figures.reliability(curves.only("none")).empty


def test_the_report_holds_them(part):
    keys = {entry.key for entry in FIGURES if entry.fits(part)}
    assert {"reliability", "risk_coverage", "entropies"} <= keys
    assert {"calibration", "detection"} <= {entry.key for entry in TABLES if entry.fits(part)}
