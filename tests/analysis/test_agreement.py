"""The table of a sweep and the report choose the same settings, whatever is missing, diverged or equal."""

from dataclasses import replace

import numpy as np
import pytest

from analysis import comparisons, formats, runs, study_records, tables
from analysis.sweep_table import sweep_table
from fl_lightning.metrics.metric import Measurement
from fl_lightning.runs.folder import Result, folder_of, latest, write_result
from fl_lightning.runs.identity import identity
from tune import sweep_run
from tune.grid import cells
from tune.outcome import best_of, outcome_of
from tune.study import Case, Confirm, Range, Search, Stop, Study

pytestmark = pytest.mark.slow


BASE = {"data": "digits", "federation.rounds": 3, "data.validation": 0.1}
STUDY = Study(
    "mine",
    "",
    base=BASE,
    environments={"data.alpha": Range("grid", (0.1, 1.0))},
    # What the sections of settings would call conditions, this study tunes.
    space={"data.clients": Range("grid", (3, 5))},
    cases=(
        Case("FedAvg", {"method": "fedavg"}),
        Case("FOLA", {"method": "fola"}, {"model.hidden": Range("grid", ([4], [8, 4]))}),
    ),
    seeds=(0, 1, 2),
)
IID = Case("wide", {"method": "fedavg", "data.partition": "iid"})  # by its section a condition


def made_up(config, out, rng, status=None):
    """A run that was never computed: few different numbers, so that many settings are equal."""
    status = status or rng.choice(["finished", "diverged", "missing"], p=[0.7, 0.15, 0.15])
    if status == "missing":
        return
    length = 3 if status == "finished" else int(rng.integers(0, 3))
    history = [
        Measurement({name: float(rng.integers(4, 7)) / 10 for name in ("GA", "LA", "GA_validation")}, {})
        for _ in range(length)
    ]
    folder = folder_of(config, out)
    folder.mkdir()
    known = {"identity": identity(config), "name": "made up", "params": config.flat()}
    write_result(Result(str(status), "", "", folder, history, **known))


def stored(study, out, seed):
    """A store with a sweep whose runs are made up, as the sweep itself reads them."""
    rng = np.random.default_rng(seed)
    tried = cells(study)
    for cell in tried:
        for config in cell.configs:
            made_up(config, out, rng)
    if study.confirm:
        best = best_of([outcome_of(cell, out, study) for cell in tried])
        fresh = [replace(one.cell, seeds=study.confirm.seeds, confirms=True) for one in best]
        for cell in fresh:
            for config in cell.configs:
                made_up(config, out, rng, status="finished")
        tried = [*tried, *fresh]
    outcomes = [outcome_of(cell, out, study) for cell in tried]
    sweep_run.open_sweep(study, out, out / "sweeps" / "mine").close(study, outcomes, {})
    return [outcome_of(cell, out, study) for cell in tried]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("changes", [{}, {"metric": "GA_validation"}, {"stop": Stop("GA", at_least=0.6)}])
def test_sweep_and_report_choose_alike(out, seed, changes):
    study = replace(STUDY, cases=(*STUDY.cases, IID), **changes)
    outcomes = stored(study, out, seed)
    expected = {
        (one.cell.case, float(one.cell.environment["data.alpha"])): (
            {result.run_id for result in one.good},
            one.cell.config.split.clients,
            tuple(one.cell.config.model.options["hidden"]),
            100 * np.mean([result.final["GA"] for result in one.good]),
        )
        for one in best_of(outcomes)
    }
    table = runs.load(out, "mine")
    assert comparisons.conditions(table) == ["data.alpha"]
    assert set(comparisons.tuned(table)) == {"data.clients", "model.hidden"}
    best = comparisons.best_of_grid(table)
    best = best.loc[best["n"] > 0]
    found = {
        (row["case"], row["data.alpha"]): (
            set(row["run_ids"]),
            row["data.clients"],
            row["model.hidden"],
            pytest.approx(100 * row["mean"]),
        )
        for _, row in best.iterrows()
    }
    assert found == expected


def test_the_rounds_beyond_a_studys_rule_count_for_nobody(out):
    study = replace(STUDY, stop=Stop("GA", at_least=0.6), cases=STUDY.cases[:1])
    outcomes = stored(study, out, 0)
    loaded = runs.load(out, "mine")
    table = loaded.runs.set_index("run_id")
    rounds = loaded.rounds.groupby("run_id")["round"].max()
    lengths = {result.run_id: len(result.history) for one in outcomes for _, result in one.runs if result.history}
    assert {run_id: rounds[run_id] for run_id in lengths} == lengths
    assert any(length < 3 for length in lengths.values())
    whole = [latest(config, out) for one in outcomes for config, _ in one.runs]
    assert all(len(result.history) == 3 for result in whole if result.status == "finished")  # others may want them
    for one in outcomes:
        for _, result in one.runs:
            assert table.loc[result.run_id, "ended"] == (result.status != "diverged")


def test_confirming_runs_are_shown_and_never_choose(out):
    study = replace(STUDY, confirm=Confirm((3, 4, 5, 6, 7)))
    outcomes = stored(study, out, 4)
    loaded = runs.load(out, "mine")
    table = loaded.runs
    assert set(table.loc[table["confirms"], "seed"]) == {3, 4, 5, 6, 7}
    printed = formats.readable(sweep_table(outcomes, study), "std", 2).to_dict("records")
    shown = {(row["data.alpha"], row["case"]): row for row in printed}
    report = tables.best_settings(loaded)
    assert len(report) == len(shown) == 4
    for _, row in report.iterrows():
        other = shown[f"{row['α']:g}", row["case"]]
        assert other["chosen GA (%)"].startswith(f"{row['chosen GA (%)']:.2f}")
        assert other["confirmed GA (%)"].startswith(f"{row['confirmed GA (%)']:.2f}")
        assert float(other["optimism (points)"]) == pytest.approx(row["optimism (points)"], abs=0.006)
        assert (row["n"], other["confirming"]) == (5, "5")
    without = comparisons.best_of_grid(loaded.of(table.loc[~table["confirms"]]))
    settings = comparisons.tuned(loaded)
    both = comparisons.best_of_grid(loaded)
    assert both[settings].astype(str).equals(without[settings].astype(str))
    assert both["chosen_mean"].equals(without["mean"])
    paired = tables.paired_comparison(loaded)
    assert set(paired["n"]) == {5}
    assert "fresh seeds" in comparisons.confirmed_remarks(both)[0]
    assert "which had no part in the choice" in comparisons.protocol(loaded)


def test_a_confirmation_that_is_not_there_for_all_is_not_used(out):
    study = replace(STUDY, confirm=Confirm((3, 4)))
    stored(study, out, 4)
    loaded = runs.load(out, "mine")
    table = loaded.runs
    kept = table.loc[~(table["confirms"] & table["case"].eq("FOLA") & table["data.alpha"].eq(1.0))]
    best = comparisons.best_of_grid(loaded.of(kept)).set_index(["data.alpha", "case"])["confirmed"]
    assert best.loc[0.1].all()
    assert not best.loc[1.0].any()
    # Where a picture compares values of a tuned setting, all of them are of the seeds that chose.
    assert not comparisons.best_of_grid(loaded, "GA", ["data.alpha", "data.clients"])["confirmed"].any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "same seeds and the test set, as in the paper"),
        ({"metric": "GA_validation"}, "chosen by GA_validation and reported on the test set"),
        ({"confirm": Confirm((7, 8))}, "confirmed: the test set on seeds 7 and 8"),
        ({"space": {"data.clients": Range("grid", (3,))}, "cases": STUDY.cases[:1]}, ""),  # nothing to choose from
        ({"space": {"training.lr": Range("uniform", (0.1, 1.0))}, "search": Search("random", 2)}, "as in the paper"),
    ],
)
def test_a_report_knows_how_settings_were_chosen_from_the_study_as_it_is_stored(changes, words, out):
    study = replace(STUDY, **changes)
    sweep_run.open_sweep(study, out, out / "sweeps" / "mine")
    (sweep,) = runs.Runs(out).sweeps
    found = study_records.spec_of(sweep.content).protocol
    assert words in found
    assert bool(words) == bool(found)
