"""Who competes with whom, and who is best: conditions, tuned settings, diverged and missing seeds, equal budgets."""

import numpy as np
import pandas as pd
import pytest

from analysis import comparisons, tables
from analysis.study_records import Spec
from tests.support.synthetic import as_study, runs_table
from tune.best import Keys


def test_conditions_and_tuned_settings_are_told_apart():
    table = runs_table(alphas=(0.01, 1), lrs=(0.1, 0.01), strengths=(1, 10), rounds=1)
    assert comparisons.conditions(as_study(table)) == ["data.alpha"]
    assert comparisons.tuned(as_study(table)) == ["training.lr", "method.strength"]
    declared = as_study(table, spec=Spec(Keys(frozenset({"method.strength"}))))
    assert comparisons.conditions(declared) == ["data.alpha", "method.strength"]
    assert comparisons.tuned(declared) == ["training.lr"]


def test_what_follows_from_a_condition_is_neither_a_condition_nor_tuned():
    """As a study says by `given`: each data set with a model and a learning rate of its own."""
    table = runs_table(alphas=(0.01, 1), rounds=1)
    table["model"] = table["data.alpha"].map({0.01: "mlp", 1: "cnn"})
    table["model.hidden"] = table["data.alpha"].map({0.01: "[100]"})
    table["training.lr"] = table["data.alpha"].map({0.01: 0.1, 1: 0.2})
    assert set(comparisons.conditions(as_study(table))) == {"data.alpha", "model", "model.hidden"}
    keys = Keys(frozenset({"data.alpha"}), given=frozenset({"model", "training.lr"}))
    assert comparisons.conditions(as_study(table, spec=Spec(keys))) == ["data.alpha"]
    assert comparisons.tuned(as_study(table, spec=Spec(keys))) == []
    # Unless somebody's flag has said otherwise.
    table.loc[table.index[0], "training.lr"] = 0.3
    assert comparisons.tuned(as_study(table, spec=Spec(keys))) == ["training.lr"]
    table.loc[table.index[1], "model"] = "softmax"
    assert set(comparisons.conditions(as_study(table, spec=Spec(keys)))) == {"data.alpha", "model"}


def test_what_makes_a_case_is_not_tuned():
    table = runs_table(rounds=1)
    table["method.curvature"] = table["case"].map({"FOLA": "online"})
    assert comparisons.tuned(as_study(table)) == []


def brute_force(table, metric="GA"):
    """The largest mean over seeds by loops."""
    best = {}
    for alpha in set(table["data.alpha"]):
        for case in set(table["case"]):
            mine = table[(table["data.alpha"] == alpha) & (table["case"] == case)]
            means = {
                (lr, epochs): mine[(mine["training.lr"] == lr) & (mine["training.epochs"] == epochs)][metric].mean()
                for lr in set(mine["training.lr"])
                for epochs in set(mine["training.epochs"])
            }
            best[alpha, case] = max(means.items(), key=lambda item: item[1])
    return best


def test_the_best_setting_is_the_largest_mean_over_seeds():
    table = runs_table(alphas=(0.01, 1), lrs=(1, 0.1, 0.01), epochs=(1, 5, 20), rounds=1)
    expected = brute_force(table)
    found = comparisons.best_of_grid(as_study(table))
    assert len(found) == len(expected) == 4
    for _, row in found.iterrows():
        setting, mean = expected[row["data.alpha"], row["case"]]
        assert (row["training.lr"], row["training.epochs"]) == setting
        assert row["mean"] == pytest.approx(mean)
        assert (row["n"], row["tried"], row["budget"]) == (3, 9, 9)
        assert row["expected"] == pytest.approx(mean)
        chosen = table[table["run_id"].isin(row["run_ids"])]
        assert sorted(chosen["seed"]) == [0, 1, 2]


def test_a_setting_that_diverged_for_one_seed_is_worth_nothing():
    table = runs_table(cases=("FOLA",), lrs=(1, 0.1), rounds=1)
    best = comparisons.best_of_grid(as_study(table)).iloc[0]
    victim = best["run_ids"][0]
    table.loc[table["run_id"].eq(victim), ["status", "ended"]] = ["diverged", False]
    after = comparisons.best_of_grid(as_study(table)).iloc[0]
    assert after["training.lr"] != best["training.lr"]
    assert (after["diverged"], after["tried"]) == (1, 2)
    assert "1 of 2 settings diverged" in comparisons.budget_remarks(comparisons.best_of_grid(as_study(table)))[0]


def test_a_setting_that_lacks_seeds_cannot_win():
    table = runs_table(cases=("FOLA",), lrs=(1, 0.1), rounds=1)
    best = comparisons.best_of_grid(as_study(table)).iloc[0]
    missing = table.loc[~table["run_id"].eq(best["run_ids"][0])]
    after = comparisons.best_of_grid(as_study(missing)).iloc[0]
    assert after["training.lr"] != best["training.lr"]
    assert after["incomplete"] == 1
    assert after["budget"] == 1
    assert after["expected"] == pytest.approx(after["mean"])  # of the whole one alone


def test_if_all_settings_diverged_the_surviving_seeds_are_shown_as_such():
    table = runs_table(cases=("FOLA",), rounds=1)
    table.loc[0, ["status", "ended"]] = ["diverged", False]
    row = comparisons.best_of_grid(as_study(table)).iloc[0]
    assert (row["n"], row["diverged_seeds"]) == (2, 1)
    assert row["mean"] == pytest.approx(table["GA"].iloc[1:].mean())
    table[["status", "ended"]] = ["diverged", False]
    row = comparisons.best_of_grid(as_study(table)).iloc[0]
    assert row["n"] == 0
    assert np.isnan(row["mean"])


def test_unequal_budgets_are_said_and_evened():
    many = runs_table(cases=("FOLA",), lrs=(1, 0.1, 0.01, 0.001), rounds=1)
    few = runs_table(cases=("FedAvg",), lrs=(0.1, 0.01), rounds=1)
    few["run_id"] = "x" + few["run_id"]
    both = pd.concat([many, few], ignore_index=True)
    best = comparisons.best_of_grid(as_study(both)).set_index("case")
    assert "unequal budgets" in comparisons.budget_remarks(best.reset_index())[0]
    assert (best["budget"] == 2).all()
    means = many.groupby("training.lr")["GA"].mean()
    pairs = [max(a, b) for i, a in enumerate(means) for b in means.iloc[i + 1 :]]
    assert best.loc["FOLA", "expected"] == pytest.approx(np.mean(pairs))
    assert best.loc["FOLA", "expected"] < best.loc["FOLA", "mean"]
    assert best.loc["FOLA", "luck"] == pytest.approx(best.loc["FOLA", "mean"] - best.loc["FOLA", "expected"])
    assert best.loc["FedAvg", "luck"] == 0
    assert best.loc["FedAvg", "expected"] == pytest.approx(best.loc["FedAvg", "mean"])


def test_one_picture_shows_equal_conditions_and_says_what_it_leaves_out():
    table = runs_table(alphas=(0.01, 1), clients=(5, 10, 20), rounds=1)
    more = table.loc[~(table["data.clients"].eq(20) & table["seed"].eq(0))]
    study, remarks = comparisons.largest(as_study(more), ["data.alpha"])
    kept = study.runs
    assert kept["data.clients"].nunique() == 1
    assert kept["data.clients"].iloc[0] in (5, 10)
    assert kept["data.alpha"].nunique() == 2
    assert remarks[0].startswith("only N = ")
    assert f"{len(more) - len(kept)} runs at" in remarks[0]


def several_lengths():
    """Nine runs with 12 rounds, one with 15, four with 6, in this order."""
    tables = [runs_table(rounds=r, seeds=n).iloc[:m] for r, n, m in ((12, 5, 9), (15, 1, 1), (6, 2, 4))]
    for number, table in enumerate(tables):
        table["run_id"] = f"{number}" + table["run_id"]
    return pd.concat(tables, ignore_index=True)


def test_the_final_stage_of_a_study_has_the_most_rounds_of_every_condition():
    short, long = (runs_table(alphas=a, rounds=r) for a, r in (((0.01, 1), 2), ((0.01,), 5)))
    long["run_id"] = "x" + long["run_id"]
    both = pd.concat([short, long], ignore_index=True)
    study = as_study(both, spec=Spec(has_stages=True))
    final = comparisons.final_stage(study).runs
    assert final.groupby("data.alpha")["federation.rounds"].unique().map(list).to_dict() == {0.01: [5], 1: [2]}
    assert comparisons.largest(study)[0].runs["federation.rounds"].unique() == [5]
    compares = Spec(Keys(frozenset({"federation.rounds"})), has_stages=True)  # such a study has no stages
    assert len(comparisons.final_stage(as_study(both, spec=compares)).runs) == len(both)


def test_without_a_study_the_rounds_with_the_most_runs_are_shown_and_nothing_is_dropped():
    table = several_lengths()
    assert len(comparisons.final_stage(as_study(table)).runs) == len(table)
    kept, remarks = comparisons.largest(as_study(table))
    assert set(kept.runs["federation.rounds"]) == {12}
    assert remarks == ["only R = 12; 5 runs at 15, 6 are not shown"]
    found = tables.correlations(as_study(table)).set_index("R")
    assert list(found["n"]) == [4, 9, 1]
    assert list(found.index) == [6, 12, 15]  # as numbers, not as text, nor as they were made


def test_of_equally_many_runs_those_with_more_rounds_are_shown():
    table = several_lengths()
    table = table.groupby("federation.rounds").head(1)
    assert set(comparisons.largest(as_study(table))[0].runs["federation.rounds"]) == {15}


def test_what_diverged_counts_as_tried():
    """Half of FOLA's settings diverge: it has no right to the best of the other half at a smaller budget."""
    table = runs_table(lrs=(1, 0.1, 0.01, 0.001), rounds=1)
    lost = table["case"].eq("FOLA") & table["training.lr"].isin([1, 0.001])
    table.loc[lost, ["status", "ended"]] = ["diverged", False]
    best = comparisons.best_of_grid(as_study(table)).set_index("case")
    assert (best["budget"] == 4).all()
    assert best["expected"].to_dict() == pytest.approx(best["mean"].to_dict())


def test_runs_that_differ_in_the_seed_alone_are_one_setting():
    table = runs_table(alphas=(0.01, 1), lrs=(0.1, 0.01), seeds=3, rounds=1)
    numbers = comparisons.setting_numbers(as_study(table))
    assert numbers.nunique() == 2 * 2 * 2
    assert (numbers.value_counts() == 3).all()


def test_what_the_study_tunes_is_no_condition_and_its_metric_chooses():
    table = runs_table(clients=(5, 10), rounds=1)
    assert comparisons.conditions(as_study(table)) == ["data.clients"]
    table["LA"] = 1 - table["GA"]
    study = as_study(table, spec=Spec(Keys(tuned=frozenset({"data.clients"})), "LA"))
    assert comparisons.conditions(study) == []
    assert comparisons.tuned(study) == ["data.clients"]
    worst = comparisons.best_of_grid(study).set_index("case")
    means = table.groupby(["case", "data.clients"])["GA"].mean()
    for case in ("FedAvg", "FOLA"):
        assert worst.loc[case, "mean"] == worst.loc[case, "expected"] == pytest.approx(means[case].min())
    largest = comparisons.best_of_grid(study, chosen_by="GA").set_index("case")["mean"].to_dict()
    assert largest == pytest.approx(means.groupby("case").max().to_dict())


@pytest.mark.slow
def test_fresh_seeds_are_right_on_average_where_the_chosen_ones_are_too_good():
    """No training: 150 comparisons of six settings that are all alike, so that whatever leads by chance does."""
    rng = np.random.default_rng(3)
    table = runs_table(cases=("FOLA",), alphas=range(1, 151), lrs=(1, 2, 3, 4, 5, 6), seeds=2, rounds=1)
    table["GA"] = 0.7 + 0.05 * rng.standard_normal(len(table))
    chosen = comparisons.best_of_grid(as_study(table))
    fresh = table.loc[table["run_id"].isin([ids[0] for ids in chosen["run_ids"]])]
    fresh = pd.concat([fresh.assign(seed=seed, run_id=f"{seed}" + fresh["run_id"]) for seed in range(2, 7)])
    fresh["GA"] = 0.7 + 0.05 * rng.standard_normal(len(fresh))
    both = pd.concat([table.assign(confirms=False), fresh.assign(confirms=True)], ignore_index=True)
    best = comparisons.best_of_grid(as_study(both))
    error = 0.05 / np.sqrt(5 * len(best))
    assert best["confirmed"].all()
    assert best["chosen_mean"].equals(chosen["mean"])
    assert abs(best["mean"].mean() - 0.7) < 3 * error
    assert best["chosen_mean"].mean() - 0.7 > 10 * error
    optimism = tables.best_settings(as_study(both))["optimism (points)"].mean()
    assert optimism == pytest.approx(100 * 0.05 / np.sqrt(2) * 1.267, rel=0.15)  # the expected maximum of six normals
