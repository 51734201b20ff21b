"""A study that is swept in several steps is one study; one that has changed is another."""

import pytest
import yaml

from analysis import comparisons, runs
from analysis.runs import studies
from analysis.study_records import Sweep, joined, steps
from fl_lightning.runs import folder as run_folder
from tests.support.small_studies import TINY, sweep_here
from tune import sweep_run
from tune.study_file import load

STUDY = {
    "base": {**TINY, "federation.rounds": 1},
    "cases": ["fedavg", "fola", "fedprox"],
    "thresholds": [0.3],
    "scales": {"smoke": {}},
}


def written(out, **changes):
    path = out.parent / "mine.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}))
    return load(str(path), "smoke")


def swept(label, among=("a", "b", "c"), **content):
    said = {"cases": [{"label": label}], "among": list(among), "thresholds": [], **content}
    return Sweep("mine", "all", f"sweep of {label}", said, {f"run of {label}": label})


def joined_of(sweeps):
    return joined(steps(sweeps))


@pytest.mark.slow
def test_cases_that_were_swept_one_after_the_other_are_shown_together(out, monkeypatch):
    study = written(out)
    for labels, shown in ((["fola"], {"FOLA"}), (["fedprox"], {"FOLA", "FedProx"}), (["fola"], {"FOLA", "FedProx"})):
        sweep_here(study.only(labels), out, monkeypatch)
        table = runs.load(out, study="mine")
        assert set(table.runs["case"]) == shown
        assert table.remarks == ()
    sweep_here(study, out, monkeypatch)
    assert set(runs.load(out, study="mine").runs["case"]) == {"FedAvg", "FOLA", "FedProx"}


@pytest.mark.slow
def test_a_step_that_was_killed_is_not_left_out(out, monkeypatch):
    study = written(out)
    with monkeypatch.context() as patch:
        patch.setattr("tune.sweep.outcome_of", lambda *_: 1 / 0)  # after the run, before the list of runs
        with pytest.raises(ZeroDivisionError):
            sweep_here(study.only(["fola"]), out, monkeypatch)
    sweep_here(study.only(["fedprox"]), out, monkeypatch)
    table = runs.load(out, study="mine")
    assert set(table.runs["case"]) == {"FOLA", "FedProx"}
    assert table.remarks == ()


@pytest.mark.slow
def test_a_case_that_the_study_no_longer_has_is_left_out(out, monkeypatch):
    sweep_here(written(out), out, monkeypatch)
    sweep_here(written(out, cases=["fedavg", "fola"]), out, monkeypatch)
    table = runs.load(out, study="mine")
    assert set(table.runs["case"]) == {"FedAvg", "FOLA"}
    assert table.remarks == ("1 runs of an earlier form of the study are left out",)


@pytest.mark.slow
def test_what_a_study_has_made_and_no_longer_asks_for_is_left_out(out, monkeypatch):
    study = written(out, space={"training.lr": [0.1, 0.01]}, confirm={"seeds": 2}, continue_to=2, cases=["fola"])
    sweep_here(study, out, monkeypatch)
    before = runs.load(out, study="mine")
    assert before.remarks == ()
    (chosen,) = before.runs.loc[before.runs["confirms"], "training.lr"].unique()
    with monkeypatch.context() as patch:  # as if another setting were the best, as after a repetition
        patch.setattr("tune.best._rank", lambda one: (len(one.scores), -one.diverged, -one.mean))
        folder = sweep_here(study, out, monkeypatch).folder
        table = runs.load(out, study="mine")
        assert chosen not in set(table.runs.loc[table.runs["confirms"], "training.lr"])
        assert len(table.runs) == len(before.runs) == 4
        assert table.remarks == ("2 runs that the study has made and no longer asks for are left out",)
        assert list(comparisons.best_of_grid(table)["n"]) == [1, 2]
    sweep_run.open_sweep(study, out, folder)  # at work again: its end is open
    assert len(runs.load(out, study="mine").runs) == 6


@pytest.mark.slow
def test_a_run_that_was_repeated_takes_the_place_of_the_first(out, monkeypatch):
    study = written(out)
    first = sweep_here(study, out, monkeypatch)
    run_folder.forget(first.cells[0].runs[0][0], out)
    sweep_here(study, out, monkeypatch)
    table = runs.load(out, study="mine")
    assert len(table.runs) == 3
    assert table.remarks == ()


@pytest.mark.slow
def test_a_study_that_was_swept_in_two_forms_is_the_one_that_was_gone_on_with_last(out, monkeypatch):
    for rate in (0.1, 0.03, 0.1):
        study = written(out, base={**STUDY["base"], "training.lr": rate})
        sweep_here(study, out, monkeypatch)
        assert set(runs.load(out, study="mine").runs["training.lr"]) == {rate}


@pytest.mark.slow
def test_what_a_study_says_is_known_before_its_sweep_ends(out):
    study = written(out)
    sweep = sweep_run.open_sweep(study, out, out / "sweeps" / "mine")
    (known,) = runs.Runs(out).sweeps
    assert known.run_id == sweep.run_id
    assert known.content["thresholds"] == [0.3]
    assert known.cases == {}


@pytest.mark.slow
def test_a_sweep_of_all_cases_by_name_is_that_of_the_study(out):
    study = written(out)
    assert study.only(["fola", "fedprox", "fedavg"]) == study
    assert study.only(["fola"]).identity != study.identity


def test_sweeps_are_joined_in_the_order_of_the_study():
    whole = joined_of([swept("c"), swept("a"), swept("b")])
    assert [case["label"] for case in whole.content["cases"]] == ["a", "b", "c"]
    assert whole.cases == {f"run of {label}": label for label in "abc"}
    assert whole.run_id == "sweep of b"


def test_another_study_is_not_joined():
    assert joined_of([swept("a", thresholds=[0.5]), swept("b")]) == swept("b")
    assert joined_of([swept("a"), swept("b", among=())]) == swept("b", among=())
    assert joined_of([swept("b", cases=[{"label": "a"}, {"label": "b", "settings": 1}]), swept("b")]) == swept("b")
    assert joined_of([]) is None


def test_the_later_sweep_of_a_case_counts():
    early = swept("a")._replace(cases={"old": "a"})
    whole = joined_of([early, swept("a"), swept("b")])
    assert set(whole.cases) == {"run of a", "run of b"}


@pytest.mark.slow
def test_a_report_asks_about_the_studys_levels_while_it_runs(out, monkeypatch):
    study = written(out)
    sweep_here(study.only(["fola"]), out, monkeypatch)
    sweep_run.open_sweep(study.only(["fedavg"]), out, out / "sweeps" / "other")
    (part,) = studies(out, "mine")
    assert part.thresholds == (0.3,)
    assert set(part.runs["case"]) == {"FOLA"}
