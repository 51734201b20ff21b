"""What counts as best: means over seeds, ties, divergence, missing runs, thresholds, rules."""

from dataclasses import replace
from pathlib import Path

import pytest

from analysis import formats
from analysis.sweep_table import sweep_table
from fl_lightning.errors import UserError
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.metrics.metric import Measurement
from fl_lightning.runs.folder import Result, ended, folder_of, write_result
from fl_lightning.runs.identity import identity
from fl_lightning.system.atomic import write_atomically
from tune.grid import cells
from tune.outcome import CellOutcome, best_of, outcome_of, without_result
from tune.study import Case, Range, Study

BASE = {"data": "digits", "model": "softmax", "federation.rounds": 3}


def study(**changes):
    settings = {
        "base": BASE,
        "environments": {"data.alpha": Range("grid", (0.1, 1))},
        "space": {"training.lr": Range("grid", (0.1, 0.2))},
        "cases": (Case("A", {"method": "fedavg"}), Case("B", {"method": "fola"})),
        "seeds": (0, 1),
    }
    return Study("mine", "", **{**settings, **changes})


def result(*values, status="finished", folder=Path()):
    history = [Measurement({"GA": value, "LA": value / 2}, {}) for value in values]
    return Result(status, "", "id", folder, history)


def outcomes(mine, results):
    """Each cell of the study with the results of its seeds."""
    made = cells(mine)
    assert len(made) == len(results)
    return [
        CellOutcome(cell, mine.metric, [(config, one) for config, one in zip(cell.configs, given, strict=False) if one])
        for cell, given in zip(made, results, strict=True)
    ]


def rows(tried, mine):
    """What a sweep prints."""
    return formats.readable(sweep_table(tried, mine), "std", 2).to_dict("records")


def test_a_comparison_in_which_every_run_diverged_is_named():
    mine = study(space={})
    lost = [result(0.5, status="diverged"), result(0.4, status="diverged")]
    tried = outcomes(mine, [lost, [result(0.1), lost[0]], [], [result(0.2), result(0.3)]])
    assert without_result(tried) == ["A data.alpha 0.1"]


def test_the_best_of_every_contest_by_its_mean():
    mine = study()
    pairs = [(0.5, 0.7), (0.9, 0.1), (0.2, 0.2), (0.3, 0.2), (0.1, 0.1), (0.6, 0.6), (0.8, 0.8), (0.8, 0.8)]
    best = best_of(outcomes(mine, [[result(0.9, a), result(b)] for a, b in pairs]))
    found = [(one.cell.environment["data.alpha"], one.cell.case, one.cell.point["training.lr"]) for one in best]
    assert found == [(0.1, "A", 0.1), (0.1, "B", 0.2), (1, "A", 0.2), (1, "B", 0.1)]  # the earlier one of equals
    assert best[0].tried.mean == pytest.approx(0.6)


def test_of_a_metric_that_is_good_if_small_the_smallest_is_the_best():
    mine = study(environments={}, cases=(Case("A", {"method": "fedavg"}),), metric="NLL")
    found = [[replace(result(0.5), history=[Measurement({"GA": 0.5, "NLL": v}, {})])] * 2 for v in (0.9, 0.4)]
    (best,) = best_of(outcomes(mine, found))
    assert best.cell.point["training.lr"] == 0.2
    assert best.tried.mean == pytest.approx(0.4)


def test_a_diverged_or_missing_seed_loses_against_everything_complete():
    mine = study(environments={}, cases=(Case("A", {"method": "fedavg"}),))
    wild = result(0.9, status="diverged")
    for bad in ([result(0.9), wild], [result(0.9)], [result(0.9), None]):
        best = best_of(outcomes(mine, [bad, [result(0.1), result(0.1)]]))
        assert [one.cell.point["training.lr"] for one in best] == [0.2]
    assert best_of(outcomes(mine, [[wild, wild], []])) == []
    (alone,) = best_of(outcomes(mine, [[result(0.9), wild], []]))  # better than nothing
    (row,) = rows([alone], mine)
    assert (row["GA (%)"], row["runs"]) == ("90.00", "2, 1 diverged")


def test_fresh_seeds_choose_nothing():
    mine = study(environments={}, cases=(Case("A", {"method": "fedavg"}),))
    chosen, other = outcomes(mine, [[result(0.5), result(0.6)], [result(0.4), result(0.5)]])
    fresh = replace(other.cell, confirms=True)
    lucky = CellOutcome(fresh, mine.metric, [(config, result(0.9)) for config, _ in other.runs])
    assert best_of([lucky, chosen, other]) == [chosen]
    assert best_of([lucky]) == [lucky]


def test_rows():
    mine = study(cases=(Case("A", {"method": "fedavg"}),), thresholds=(0.5, 0.8), seeds=(0, 1, 2))
    good = [result(0.4, 0.6, 0.5), result(0.5, 0.5, 0.6), result(0.1, 0.9, 0.7)]
    poor = [result(0.1, 0.1, 0.1)] * 3
    table = rows(outcomes(mine, [poor, good, [result(0.2, 0.2, 0.2), None, result(0.2, 0.2, 0.2)], [None] * 3]), mine)
    assert table == [
        {
            "data.alpha": "0.1",
            "case": "A",
            "training.lr": "0.2",
            "at the edge": "training.lr (largest)",
            "GA (%)": "60.00 ± 10.00",
            "LA (%)": "30.00 ± 5.00",
            "rounds to 50%": "1.67 ± 0.58",
            "rounds to 80%": "2.00 (1/3)",
            "runs": "3",
        },
        {
            "data.alpha": "1",
            "case": "A",
            "training.lr": "0.1",
            "at the edge": "training.lr (smallest)",
            "GA (%)": "20.00 ± 0.00",
            "LA (%)": "10.00 ± 0.00",
            "rounds to 50%": "never",
            "rounds to 80%": "never",
            "runs": "2 of 3",
        },
    ]


def test_other_metrics_and_continued_runs_have_their_columns():
    mine = study(environments={}, cases=(Case("A", {"method": "fedavg"}),), metric="LA")
    short, long = cells(mine), cells(study(base={**BASE, "federation.rounds": 9}, environments={}, cases=mine.cases))
    tried = [CellOutcome(cell, "LA", [(c, result(0.5)) for c in cell.configs]) for cell in (short[0], long[0])]
    table = rows(tried, mine)
    assert [row["rounds"] for row in table] == ["3", "9"]
    assert list(table[0]) == ["case", "rounds", "training.lr", "at the edge", "LA (%)", "GA (%)", "runs"]
    with pytest.raises(UserError, match="unknown metric 'GAA': did you mean 'GA'"):
        rows(outcomes(study(metric="GAA"), [[result(0.5)]] * 8), study(metric="GAA"))


def test_a_case_that_always_diverged_is_shown_where_nothing_is_chosen():
    mine = study(environments={}, space={}, thresholds=(0.8,))
    wild = result(status="diverged")
    first, second = rows(outcomes(mine, [[wild, wild], [result(0.9), result(0.8)]]), mine)
    assert first == {
        "case": "A",
        "GA (%)": "–",
        "LA (%)": "–",
        "rounds to 80%": "never",
        "runs": "2, 2 diverged",
    }
    assert second["GA (%)"] == "85.00 ± 7.07"


@pytest.mark.parametrize(
    ("status", "stop", "length"),
    [
        ("finished", None, 3),
        ("diverged", None, 3),
        ("stopped", None, None),  # a scheduler did that
        ("stopped", Stop(at_least=0.5), 2),
        ("finished", Stop(at_least=0.5), 2),  # what another study computed beyond our rule does not count
        ("finished", Stop(at_least=0.99), 3),
        ("stopped", Stop(at_least=0.99), None),  # stopped by a rule that is not ours
    ],
)
def test_when_a_run_has_ended(tmp_path, status, stop, length):
    (cell,) = cells(study(environments={}, space={}, cases=(Case("A", {"method": "fedavg"}),), seeds=(0,)))
    assert ended(cell.config, tmp_path, stop) is None
    folder = folder_of(cell.config, tmp_path)
    folder.mkdir()
    write_result(replace(result(0.1, 0.6, 0.7, status=status, folder=folder), identity=identity(cell.config)))
    found = ended(cell.config, tmp_path, stop)
    assert (None if found is None else len(found.history)) == length
    assert len(outcome_of(cell, tmp_path, study(stop=stop)).runs) == (found is not None)
    for name in ("result.json", "rounds.jsonl"):
        write_atomically(folder / name, b"{")
    with pytest.raises(UserError, match="is damaged"):
        ended(cell.config, tmp_path, stop)


def test_only_settings_at_an_end_of_what_was_tried_are_said_to_be_there():
    spaces = {"training.lr": Range("grid", (0.4, 0.1, 0.2)), "training.epochs": Range("grid", (1, 2))}
    mine = study(environments={}, space=spaces, cases=(Case("A", {"method": "fedavg"}),), seeds=(0,))

    def row(lr, epochs):
        """The one in which this setting is the best."""
        good = [cell.point == {"training.lr": lr, "training.epochs": epochs} for cell in cells(mine)]
        (found,) = rows(outcomes(mine, [[result(0.9 if one else 0.1)] for one in good]), mine)
        return found.get("at the edge", "")

    assert row(0.2, 1) == ""  # nobody trains for less than an epoch
    assert row(0.4, 1) == "training.lr (largest)"
    assert row(0.1, 2) == "training.lr (smallest), training.epochs (largest)"
    assert "at the edge" not in rows(outcomes(study(space={}), [[result(0.5)]] * 4), study(space={}))[0]
