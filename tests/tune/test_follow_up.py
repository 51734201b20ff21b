"""Choosing on validation data, and confirming the choice on fresh seeds."""

import csv
import hashlib
import json
from dataclasses import asdict

import pytest
import yaml

from analysis import comparisons, findings, formats, runs, tables
from analysis.sweep_table import best_settings, sweep_table
from fl_lightning.cli.sweep import main
from fl_lightning.errors import UserError
from fl_lightning.runs import folder as run_folder
from tests.support.small_studies import sweep_here
from tune.grid import cells, reference_cells
from tune.outcome import best_of, on_fresh_seeds, protocol_of
from tune.study_file import load

BASE = {
    "data": "digits",
    "data.subset": 0.2,
    "data.clients": 3,
    "model": "softmax",
    "engine": "functional",
    "federation.rounds": 1,
}
CONTENT = {
    "base": BASE,
    "environments": {"data.alpha": [0.1, 1]},
    "cases": ["fedavg", {"label": "FOLA", "method": "fola"}],
    "space": {"training.lr": [0.1, 0.01]},
    "seeds": 2,
    "confirm": {"seeds": 3},
}


def printed(outcomes, study):
    return formats.readable(sweep_table(outcomes, study), "std", 2).to_dict("records")


def study_of(folder, overrides=None, **changes):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**CONTENT, **changes}))
    return load(str(path), overrides=overrides)


@pytest.mark.parametrize(
    ("seeds", "confirming", "expected"),
    [
        (2, 3, (2, 3, 4)),
        ([4, 7], 2, (8, 9)),
        (2, [10, 11], (10, 11)),
    ],
)
def test_which_seeds_confirm(tmp_path, seeds, confirming, expected):
    assert study_of(tmp_path, seeds=seeds, confirm={"seeds": confirming}).confirm.seeds == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"confirm": {"seeds": [1, 2]}}, "confirm.seeds must have no part in choosing, but 1 are among the seeds"),
        ({"confirm": {"seeds": []}}, "confirm.seeds is empty"),
        ({"confirm": {"seed": 3}}, "must say how many seeds"),
        ({"confirm": 3}, "must be a mapping"),
        ({"confirm": {"seeds": 3, "sedes": 1}}, "sedes"),
        (
            {"cases": [{"label": "FOLA", "method": "fola", "confirming": 4}]},
            "confirming of FOLA must be a whole number of the 3 seeds of `confirm`, got 4",
        ),
        ({"cases": [{"method": "fola", "confirming": "two"}]}, "got 'two'; leave it out for all of them"),
        ({"confirm": None, "cases": [{"method": "fola", "confirming": 1}]}, "of the 0 seeds of `confirm`"),
        ({"continue_to": 9, "space": {"federation.rounds": [1, 2]}}, "tunes federation.rounds, which continue_to sets"),
    ],
)
def test_what_cannot_confirm_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError) as caught:
        study_of(tmp_path, **changes)
    assert message in str(caught.value)


def test_a_case_may_be_confirmed_on_fewer_seeds(tmp_path):
    study = study_of(tmp_path, cases=["fedavg", {"label": "FOLA", "method": "fola", "confirming": 2}])
    assert {cell.case: on_fresh_seeds(study, cell).seeds for cell in cells(study)} == {
        "fedavg": (2, 3, 4),
        "FOLA": (2, 3),
    }
    pinned = study_of(tmp_path, {"training.lr": "0.5"}, cases=[{"method": "fola", "confirming": 2}])
    assert pinned.confirming_seeds("fola") == (2, 3)


def test_a_study_that_does_not_say_it_is_known_by_what_it_was(tmp_path):
    said, silent = (study_of(tmp_path, cases=[{"method": "fola", **more}]) for more in ({"confirming": 3}, {}))
    assert said.identity != silent.identity
    assert "confirming" in str(asdict(silent))
    older = json.loads(json.dumps(asdict(silent), default=str))
    for key in ("given", "among", "pretrain"):
        del older[key]
    del older["cases"][0]["confirming"]
    assert silent.identity == hashlib.sha256(json.dumps(older, sort_keys=True).encode()).hexdigest()[:8]


def test_the_default_metric_follows_the_validation_data(tmp_path):
    validated = {**BASE, "data.validation": 0.2}
    assert study_of(tmp_path).metric == "GA"
    assert study_of(tmp_path, base=validated).metric == "GA_validation"
    assert study_of(tmp_path, base=validated, metric="GA").metric == "GA"  # the paper's protocol
    assert study_of(tmp_path, {"data.validation": "0.1"}).metric == "GA_validation"  # from the command line
    assert study_of(tmp_path, {"data.validation": "0"}, base=validated).metric == "GA"
    stops = study_of(tmp_path, base=validated, stop={"at_least": 0.9}).stop
    assert stops.metric == "GA_validation"
    assert study_of(tmp_path, base=validated, stop={"metric": "GA", "at_least": 0.9}).stop.metric == "GA"


@pytest.mark.parametrize("changes", [{"metric": "GA_validation"}, {"stop": {"metric": "GA_validation", "patience": 1}}])
def test_a_metric_that_needs_validation_data_is_refused_without(tmp_path, changes):
    with pytest.raises(UserError, match=r"GA_validation needs data that belong to no client.* set data\.validation"):
        cells(study_of(tmp_path, **changes))
    cells(study_of(tmp_path, base={**BASE, "data.validation": 0.1}, **changes))


def test_references_are_there_for_all_seeds(tmp_path):
    study = study_of(tmp_path, reference={"method": "centralised"}, base={**BASE, "probe.reference": "@reference"})
    assert [cell.seeds for cell in reference_cells(study)] == [(0, 1, 2, 3, 4)] * 2


@pytest.mark.slow
def test_the_best_settings_run_again_and_nothing_twice(out, tmp_path, monkeypatch, capsys):
    study = study_of(tmp_path, base={**BASE, "data.validation": 0.2}, continue_to=2)
    first = sweep_here(study, out, monkeypatch)
    tuned, fresh = 2 * 2 * 2 * 2, 2 * 2 * 3
    assert first.computed == tuned + fresh  # the seeds that chose do not go on
    confirming = [one for one in first.cells if one.cell.confirms]
    assert [len(one.runs) for one in confirming] == [3] * 4
    chosen = {one.cell.group: one for one in best_of(first.cells) if not one.cell.confirms}
    for one in confirming:
        assert one.cell.config.federation.rounds == 2  # what the study goes on to
        assert one.cell.point == chosen[one.cell.group].cell.point
        assert {config.seed for config, _ in one.runs} == {2, 3, 4}
        assert all(result.tags["purpose"] == "confirm" for _, result in one.runs)
    table = printed(first.cells, study)
    assert [row["rounds"] for row in table] == ["1"] * 4 + ["2"] * 4
    assert [row["runs"] for row in table] == ["2"] * 4 + [""] * 4
    assert [row["confirming"] for row in table] == [""] * 4 + ["3"] * 4
    for of_choice in ("GA_validation (%)", "chosen GA (%)"):
        assert [row[of_choice] == "–" for row in table] == [False] * 4 + [True] * 4
    assert [row["confirmed GA (%)"] == "–" for row in table] == [True] * 4 + [False] * 4
    assert not any("optimism (points)" in row for row in table)  # seeds of one length alone could tell
    last = best_of(first.cells)[-1]
    assert last.cell.confirms
    fresh_mean = 100 * sum(result.final["LA"] for result in last.good) / 3
    assert table[-1]["LA (%)"].startswith(f"{fresh_mean:.2f}")  # as the confirmed GA beside it
    assert "no part in the choice" in protocol_of(first.cells, study)
    assert "Chosen by GA_validation on seeds 0 and 1; confirmed" in best_settings(first.cells, study)
    with (first.folder / "runs.csv").open() as file:
        listed = [(line["purpose"], int(line["seed"])) for line in csv.DictReader(file)]
    assert {seed for purpose, seed in listed if purpose == "confirm"} == {2, 3, 4}
    assert {seed for purpose, seed in listed if purpose == "choose"} == {0, 1}

    # Killed in between: two confirming runs and one that chose are gone.
    lost = [*(config for config, _ in confirming[0].runs[:2]), first.cells[0].runs[0][0]]
    for config in lost:
        run_folder.forget(config, out)
    again = sweep_here(study, out, monkeypatch)
    assert again.computed == 3
    assert printed(again.cells, study) == table

    found = runs.load(out, "mine")
    confirms = found.runs["confirms"]
    assert set(found.runs.loc[confirms, "seed"]) == {2, 3, 4}
    assert set(found.runs.loc[~confirms, "seed"]) == {0, 1}
    best = comparisons.best_of_grid(found).sort_values("federation.rounds", kind="stable")
    assert list(best["federation.rounds"]) == [1] * 4 + [2] * 4
    assert list(best["confirmed"]) == [False] * 4 + [True] * 4
    assert best["chosen_mean"].isna().tolist() == [False] * 4 + [True] * 4
    assert list(best["n"]) == [2] * 4 + [3] * 4
    for (_, row), one in zip(best.iterrows(), printed(again.cells, study), strict=True):
        name = "confirmed GA (%)" if row["confirmed"] else "chosen GA (%)"
        assert one[name].startswith(f"{100 * row['mean']:.2f}")
        assert (one["case"].lower(), float(one["training.lr"])) == (row["case"].lower(), row["training.lr"])
    assert "optimism (points)" not in tables.best_settings(found)
    assert "optimism (points)" not in tables.accuracy_and_rounds(found)
    assert not any("Optimism" in sentence for sentence in findings.summary(found))
    everything = runs.load(out)  # without the study, their own mark tells
    assert everything.runs["confirms"].sum() == fresh

    assert main([str(tmp_path / "mine.yaml"), "--runs", str(out), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "confirming  12 more" in said
    assert "on fresh seeds, 2 to 4, with 2 rounds; 12 are there already" in said
    assert "time" not in said  # the best settings are known, and nothing is left of them
    study_of(tmp_path, cases=["fedavg", {"method": "fola", "confirming": 1}])
    assert main([str(tmp_path / "mine.yaml"), "--dry-run", "--runs", str(out)]) == 0
    assert "confirming  8 more" in capsys.readouterr().out


@pytest.mark.slow
def test_another_study_may_choose_by_a_run_that_confirms_here(out, tmp_path, monkeypatch):
    small = {"environments": {}, "cases": ["fedavg"]}
    sweep_here(study_of(tmp_path, **small), out, monkeypatch)
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "other.yaml"
    path.write_text(yaml.safe_dump({**CONTENT, **small, "seeds": 5, "confirm": None}))
    sweep_here(load(str(path)), out, monkeypatch)
    assert set(runs.load(out, "mine").runs.query("confirms")["seed"]) == {2, 3, 4}
    assert not runs.load(out, "other").runs["confirms"].any()
