"""Tables hold the numbers of the runs, in CSV, LaTeX and HTML; sentences say no more than they allow."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis import findings, formats, tables
from fl_lightning.errors import UserError
from tests.support.synthetic import as_study, last_rounds, rounds_table, runs_table, with_failures


def test_accuracy_and_rounds_are_those_of_the_best_setting():
    rounds = rounds_table(lrs=(1, 0.1), seeds=5)
    table = tables.accuracy_and_rounds(as_study(rounds).asked((0.5, 0.99))).set_index("case")
    for case, row in table.iterrows():
        mine = rounds.loc[rounds["case"].eq(case)]
        means = last_rounds(mine).groupby("training.lr")["GA"].mean()
        assert row["GA (%)"] == pytest.approx(100 * means.max())
        best = mine.loc[mine["training.lr"].eq(means.idxmax())]
        assert row["setting"] == f"lr = {means.idxmax():g}"
        first = [run.loc[run["GA"].ge(0.5), "round"].min() for _, run in best.groupby("run_id")]
        assert row["rounds to 50%"] == pytest.approx(np.nanmean(first))
        assert row["reached 50%"] == np.isfinite(first).sum()
        assert row["reached 99%"] == 0
        assert np.isnan(row["rounds to 99%"])
        assert row["n"] == 5


def test_pairs_are_of_equal_seed_and_partition():
    runs = runs_table(seeds=8, rounds=2)
    row = tables.paired_comparison(as_study(runs)).iloc[0]
    one, two = (runs.loc[runs["case"].eq(case)].set_index("seed")["GA"] for case in ("FOLA", "FedAvg"))
    assert row["difference (points)"] == pytest.approx(100 * (one - two).mean())
    assert row["p"] == pytest.approx(stats.wilcoxon(one - two).pvalue)
    assert (row["n"], row["ahead"]) == (8, int((one > two).sum()))
    other = runs.copy()
    other.loc[other["case"].eq("FOLA") & other["seed"].eq(3), "partition"] = "another"
    row = tables.paired_comparison(as_study(other)).iloc[0]
    assert row["n"] == 7
    assert "1 pairs on unequal partitions left out" in row["remark"]
    without = runs.loc[~(runs["case"].eq("FOLA") & runs["seed"].isin([0, 1]))]
    assert tables.paired_comparison(as_study(without)).iloc[0]["n"] == 6


def test_many_conditions_are_pooled_by_seed_and_corrected():
    runs = runs_table(cases=("FedAvg", "FOLA", "FedCurv"), alphas=(0.01, 1), seeds=7, rounds=2)
    table = tables.paired_comparison(as_study(runs))
    assert list(table["α"]) == [0.01, 1, "all"] * 2
    pooled = table.loc[table["α"].eq("all")]
    assert (pooled["n"] == 7).all()  # seeds, not 14 pairs
    assert (table["p (Holm)"] >= table["p"]).all()
    smallest = table["p"].min()
    assert table["p (Holm)"].min() == pytest.approx(min(1, smallest * len(table)))


def test_pairs_that_were_not_tested_are_not_corrected_for():
    corrected = tables._holm(pd.Series([0.01, np.nan, 0.04]))
    assert corrected.to_list() == pytest.approx([0.02, np.nan, 0.04], nan_ok=True)


def test_unknown_names_are_refused():
    runs = runs_table(rounds=1)
    with pytest.raises(UserError, match="unknown case 'FOLAA': did you mean 'FOLA'"):
        tables.paired_comparison(as_study(runs), first="FOLAA")
    with pytest.raises(UserError, match="no run has a column 'AG'"):
        tables.paired_comparison(as_study(runs), metric="AG")


def test_costs_compare_at_equal_traffic():
    rounds = rounds_table(seeds=2, rounds=10)
    table = tables.costs(as_study(rounds)).set_index("case")
    assert table.loc["FOLA", "MB per round"] == pytest.approx(4)
    assert table.loc["FedAvg", "MB per round"] == pytest.approx(2)
    assert table["common MB"].to_list() == pytest.approx([20, 20])
    fola = rounds.loc[rounds["case"].eq("FOLA") & rounds["round"].eq(5), "GA"].mean()
    assert table.loc["FOLA", "GA (%) within common MB"] == pytest.approx(100 * fola)


def test_best_settings_say_how_many_were_tried():
    table = tables.best_settings(as_study(runs_table(lrs=(1, 0.1, 0.01), rounds=1)))
    assert (table["settings tried"] == 3).all()
    assert table["expected best of equal budget (%)"].to_list() == pytest.approx(table["GA (%)"].to_list())


def test_formats(tmp_path):
    runs = runs_table(alphas=(0.01, 1), seeds=6, rounds=1)
    table = tables.paired_comparison(as_study(runs))
    csv, tex = formats.save(table, tmp_path / "paired", "FOLA & co")
    again = pd.read_csv(csv)
    assert again["difference (points)"].to_list() == pytest.approx(table["difference (points)"].to_list())
    text = tex.read_text()
    for piece in (r"\toprule", r"\midrule", r"\bottomrule", r"$\alpha$", r"\end{tabular}"):
        assert piece in text
    html = formats.html(table)
    assert "<table" in html
    assert "&lt;" not in formats.html(pd.DataFrame({"a": [1]}))
    assert "&lt;b&gt;" in formats.html(pd.DataFrame({"case": ["<b>"]}))
    readable = formats.readable(table)
    assert "[" in readable["difference (points)"].iloc[0]
    assert (
        "to" in formats.readable(tables.paired_comparison(as_study(runs_table(seeds=3))))["difference (points)"].iloc[0]
    )
    assert "difference (points) low" not in readable


def test_partial_data_give_tables_too():
    rounds = with_failures(rounds_table())
    runs = last_rounds(rounds)
    table = tables.accuracy_and_rounds(as_study(rounds).asked((0.5,))).set_index("case")
    assert table["n"].to_dict() == {"FedAvg": 2, "FOLA": 2}
    assert table.loc["FedAvg", "diverged seeds"] == 1
    assert len(tables.paired_comparison(as_study(runs))) == 1
    for draw in (tables.correlations, tables.best_settings, tables.paired_comparison):
        assert len(draw(as_study(runs.iloc[:0]))) == 0
    assert findings.summary(as_study(rounds.drop(columns=["LA", "AE", "LF"], errors="ignore").assign(LA=np.nan)))
    lost = rounds.assign(ended=False, status="diverged")
    assert (tables.accuracy_and_rounds(as_study(lost))["n"] == 0).all()


def test_sentences_are_made_from_the_numbers():
    rounds = rounds_table(seeds=3)
    runs = last_rounds(rounds)
    text = " ".join(findings.summary(as_study(rounds).asked((0.5,))))
    row = tables.paired_comparison(as_study(runs)).iloc[0]
    assert f"FOLA is ahead of FedAvg in {row['ahead']} of 3 seeds" in text
    assert f"mean difference {row['difference (points)']:+.1f} points of GA" in text
    assert "n = 3 is too few for a test" in text
    assert "FOLA sends 2 times as much per round as FedAvg" in text
    worse = runs.assign(GA=np.where(runs["case"].eq("FOLA"), 0.1, runs["GA"]))
    assert "FOLA is behind FedAvg in 3 of 3 seeds" in " ".join(findings.summary(as_study(rounds).of(worse)))
    one_bad = runs.assign(GA=np.where(runs["case"].eq("FOLA"), np.where(runs["seed"].eq(0), 0.0, 0.61), 0.6))
    said = " ".join(findings.summary(as_study(rounds).of(one_bad)))  # the mean would say behind, most seeds say ahead
    assert "FOLA is ahead of FedAvg in 2 of 3 seeds and behind in 1, mean difference -19.3 points of GA" in said


def test_sentences_of_enough_seeds_have_a_test_and_of_partial_data_say_so():
    rounds = rounds_table(seeds=8)
    assert "signed-rank test p = " in " ".join(findings.summary(as_study(rounds)))
    running = last_rounds(rounds).assign(ended=False, status="running")
    assert findings.summary(as_study(running))[-1] == "No run has ended, so there is nothing to compare yet."
    many = rounds_table(alphas=(0.01, 1, 100), seeds=7, rounds=3)
    text = " ".join(findings.summary(as_study(many)))
    assert "under 3 of 3 conditions" in text or "of 3 conditions" in text
    assert "after Holm's correction" in text
