"""The paper's claims: every one can be checked, a false one is not confirmed, and without evidence nothing is."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import claims
from analysis.catalogue import CATALOGUE
from analysis.claims import federated, laplace, steadiness
from analysis.claims.claim import Mean, alike, compared
from analysis.parts import Part, parts
from tests.analysis.synthetic import rounds_table
from tune import study_file


def part_of(rounds, study=""):
    """A part of a store that does not exist."""
    runs = (
        rounds.sort_values("round").groupby("run_id", sort=False).tail(1).drop(columns="round").reset_index(drop=True)
    )
    part = Part(None, "made up", study, "", runs, runs.iloc[:0])
    part.__dict__.update(rounds=rounds, sweep=None)
    return part


def swapped(rounds):
    """The same numbers, with FOLA's called FedAvg's and the other way round."""
    cases = rounds["case"].replace({"FOLA": "FedAvg", "FedAvg": "FOLA"})
    return rounds.assign(case=cases, method=cases.str.lower())


GRID = {"alphas": (0.01, 1, 100), "clients": (5, 20, 80), "seeds": 20}


def test_a_lead_at_small_alpha_is_seen():
    rounds = rounds_table(**GRID, rounds=1)
    assert federated.first_round(part_of(rounds)).verdict == "confirmed"
    behind = federated.first_round(part_of(swapped(rounds)))
    assert behind.verdict == "partly confirmed"  # alike at large alpha they are still
    assert [one.true for one in behind.held] == [False, True]
    assert {one.seeds for one in behind.held} == {20}


def test_heterogeneity_and_clients_lower_accuracy():
    rounds = rounds_table(**GRID, rounds=1)
    found = federated.environment(part_of(rounds))
    assert found.verdict == "confirmed"
    assert found.held[0].text == "GA rises with α in 12 of 12 steps"
    turned = rounds.assign(**{"data.alpha": 1 / rounds["data.alpha"], "data.clients": 400 / rounds["data.clients"]})
    assert federated.environment(part_of(turned)).verdict == "not confirmed"


def test_faster_and_higher():
    rounds = rounds_table(cases=("FedAvg", "FOLA", "SCAFFOLD"), seeds=20, rounds=15)
    found = federated.convergence(part_of(rounds))
    assert found.verdict == "confirmed"
    assert found.held[-1].text.endswith("points against the best other method (FedAvg)")
    assert federated.convergence(part_of(swapped(rounds))).verdict == "not confirmed"


def test_methods_are_compared_on_the_seeds_of_both():
    rounds = rounds_table(cases=("FedAvg", "FOLA", "SCAFFOLD"), seeds=20, rounds=15)
    # On the three seeds that SCAFFOLD has, it is level with FOLA but for a point more; the other seeds are much harder.
    level = rounds.loc[rounds["case"].eq("FOLA") & rounds["seed"].lt(3)]
    level = level.assign(case="SCAFFOLD", method="scaffold", run_id="as " + level["run_id"], GA=level["GA"] + 0.01)
    harder = rounds["seed"].ge(3) * 0.2
    others = rounds.assign(GA=rounds["GA"] - harder).loc[rounds["case"].ne("SCAFFOLD")]
    found = federated.convergence(part_of(pd.concat([others, level], ignore_index=True)))
    text = "final GA -1.0 points against the best other method (SCAFFOLD) on 3 common seeds"
    assert (found.held[-1].text, found.held[-1].true, found.held[-1].seeds) == (text, False, 3)


def diverged(part, case, *seeds):
    lost = part.runs["case"].eq(case) & part.runs["seed"].isin(seeds)
    part.runs.loc[lost, ["status", "ended"]] = ["diverged", False]
    return part


def test_a_seed_at_which_fola_diverged_counts_where_a_rival_has_it():
    rounds = rounds_table(cases=("FedAvg", "FOLA", "SCAFFOLD"), seeds=5, rounds=15)
    few = rounds.loc[rounds["case"].ne("SCAFFOLD") | rounds["seed"].lt(3)]
    last = federated.convergence(diverged(part_of(few), "FOLA", 4)).held[-1]
    assert last.true is False
    assert "(FedAvg)" in last.text  # not SCAFFOLD, which does not have that seed


def test_rivals_without_a_common_seed_say_nothing():
    rounds = rounds_table(cases=("FedAvg", "FOLA", "SCAFFOLD"), seeds=6, rounds=15)
    apart = rounds.loc[rounds["case"].ne("SCAFFOLD") | rounds["seed"].ge(3)]
    apart = apart.loc[apart["case"].ne("FOLA") | apart["seed"].lt(3)]
    assert "(FedAvg) on 3" not in federated.convergence(part_of(apart)).held[-1].text  # FOLA has no more
    assert federated.convergence(part_of(apart)).held[-1].true is True
    alone = apart.loc[apart["case"].ne("FedAvg") | apart["seed"].ge(3)]
    assert federated.convergence(part_of(alone)).held[-1].true is None


def test_variants_of_fola_are_no_rivals():
    rounds = rounds_table(cases=("FedAvg", "FOLA"), seeds=5, rounds=15)
    better = rounds.loc[rounds["case"].eq("FOLA")]
    better = better.assign(case="published code", run_id="as " + better["run_id"], GA=better["GA"] + 0.01)
    found = federated.convergence(part_of(pd.concat([rounds, better], ignore_index=True)))
    assert found.held[-1].true is True


def test_a_rival_that_diverged_is_behind():
    rounds = rounds_table(cases=("FedAvg", "FOLA"), seeds=20, rounds=15)
    last = federated.convergence(diverged(part_of(rounds), "FedAvg", 0)).held[-1]
    assert (last.true, last.seeds) == (True, 20)


def test_runs_that_only_chose_settings_are_no_evidence():
    longer, shorter = (rounds_table(cases=("FedAvg", "FOLA"), seeds=20, rounds=rounds) for rounds in (15, 5))
    shorter = swapped(shorter).assign(run_id=lambda table: "short " + table["run_id"])
    tables = [table.assign(**{"federation.rounds": n}) for table, n in ((longer, 15), (shorter, 5))]
    part = part_of(pd.concat(tables, ignore_index=True))
    part.runs.attrs["stages"] = True
    found = federated.convergence(part)
    assert found.verdict == "confirmed"
    assert not any("R = " in one.text for one in found.held)
    part.runs.attrs["stages"] = False  # rounds that were compared
    assert federated.convergence(part).verdict == "partly confirmed"


def test_best_for_every_alpha():
    rounds = rounds_table(cases=("FedAvg", "FOLA"), alphas=(0.01, 0.1), seeds=20)
    assert federated.every_alpha(part_of(rounds)).verdict == "confirmed"
    assert federated.every_alpha(part_of(swapped(rounds))).verdict == "not confirmed"


def test_correlation_needs_an_interval_above_zero():
    rounds = rounds_table(lrs=(0.001, 0.01, 0.1, 1), seeds=3)
    assert federated.ga_and_la(part_of(rounds)).verdict == "confirmed"
    against = rounds.assign(LA=1 - rounds["GA"])
    assert federated.ga_and_la(part_of(against)).verdict == "not confirmed"


def test_falls_are_added_up():
    smooth = rounds_table(cases=("FOLA",), seeds=3)
    smooth["GA"] = 0.1 * smooth["round"]
    rough = smooth.assign(
        case="FOLA offline", run_id=smooth["run_id"] + "x", GA=smooth["GA"] - 0.15 * (smooth["round"] % 3 == 0)
    )
    found = steadiness.steadiness(part_of(pd.concat([smooth, rough])))
    assert found.verdict == "confirmed"
    table = found.table.set_index("case")["falls of GA (points)"]
    assert table["FOLA"] == 0
    assert table["FOLA offline"] == pytest.approx(3 * 5)  # from 0.2 to 0.15, and so on, in rounds 3, 6 and 9


def verdicts(part):
    """What becomes of the claims that a part can speak about."""
    return {one.claim.key: one for one in claims.check([part])}


def test_three_rounds_cannot_tell_what_happens_after_round_three():
    rounds = rounds_table(cases=("FOLA", "FedAvg"), rounds=3)
    rounds["case"] = rounds["case"].replace({"FedAvg": "FOLA offline"})
    told = verdicts(part_of(rounds, "mnist_curves"))["online_mnist"]
    assert told.verdict == "cannot be told"
    assert "round 3 is the last" in told.finding.why
    assert "round 3 is the last" in claims.markdown(told)


def test_one_alpha_is_not_small_and_large_at_once_and_has_no_steps():
    rounds = rounds_table(alphas=(100,), clients=(5,), rounds=1)
    told = verdicts(part_of(rounds, "mnist_first_round"))
    assert {key: one.verdict for key, one in told.items()} == dict.fromkeys(
        ("first_round", "environment"), "cannot be told"
    )
    assert "α = 100" in told["first_round"].finding.why
    assert [one.answer for one in told["environment"].finding.held] == ["cannot be told"] * 2


def test_a_part_that_cannot_be_told_confirms_nothing():
    rounds = rounds_table(alphas=(0.01, 1, 100), clients=(5,), rounds=1)
    found = federated.environment(part_of(rounds))
    assert [one.true for one in found.held] == [True, None]
    assert found.verdict == "partly confirmed"


def test_where_the_seed_draws_the_partition_one_seed_cannot_tell():
    part = part_of(rounds_table(**{**GRID, "seeds": 1}, rounds=1), "mnist_first_round")
    assert federated.first_round(part).told
    one = verdicts(part)["first_round"]
    assert one.verdict == "cannot be told"
    assert "1 of the 2 seeds that the rule needs" in claims.markdown(one)


def test_a_verdict_of_one_seed_says_so(smoke_store):
    checked = list(claims.check(parts(smoke_store, "laplace")))
    assert checked
    assert all(text.endswith(" (one seed)") for text in claims.overview(checked)["verdict"])


def test_a_seed_that_diverged_is_not_left_out_of_a_mean():
    whole, lost = Mean(0.5, 3), Mean(0.9, 2, 1)
    assert compared("", lost, whole, lambda a, b: a > b).true is False
    assert compared("", whole, lost, lambda a, b: a > b).true is True
    assert compared("", lost, lost, lambda a, b: a > b).true is None
    assert compared("", whole, Mean(0.4, 2), lambda a, b: a > b).true is None
    assert compared("", whole, Mean(), lambda a, b: a > b).true is None
    assert alike("{gap}", [(whole, lost)]).true is False


def test_distances_of_opposite_sign_do_not_cancel():
    apart = [(Mean(50, 3), Mean(55, 3)), (Mean(55, 3), Mean(50, 3))]
    assert alike("{gap} apart", apart) == ("5.0 points apart", False, 3)


@pytest.mark.slow
def test_more_settings_alone_are_no_lead():
    """50 settings against 10 of the same worth: the best of all leads in four of five draws, at equal budgets in
    about half of them."""
    rng = np.random.default_rng(5)
    cases = ["FOLA"] * 50 + ["FedAvg"] * 10
    runs = pd.DataFrame({"case": np.repeat(cases, 2), "seed": [0, 1] * 60, "training.lr": np.repeat(range(60), 2)})
    runs = runs.assign(run_id=runs.index.map(str), method=runs["case"].str.lower(), status="finished", ended=True)
    runs = runs.assign(LA=0.1, round=1, **{"data.alpha": 0.01, "federation.rounds": 1})
    even = plain = 0
    draws = 20
    for _ in range(draws):
        part = part_of(runs.assign(GA=0.5 + 0.05 * np.repeat(rng.standard_normal(60), 2)))
        found = federated.every_alpha(part)
        even += found.held[0].true
        final = found.table.set_index("case")["GA (%)"]
        plain += final["FOLA"] > final["FedAvg"]
    assert plain / draws > 0.7
    assert 0.3 < even / draws < 0.7


def ablation(accuracies, **columns):
    """GA of every seed, by aggregation and strength."""
    rows = [
        {"run_id": f"{case}{strength}{seed}", "case": case, "method.strength": strength, "seed": seed, "GA": ga}
        for (case, strength), values in accuracies.items()
        for seed, ga in enumerate(values)
    ]
    rounds = pd.DataFrame(rows).assign(LA=0.3, round=1, **columns)
    diverged = rounds["GA"].isna()
    return rounds.assign(ended=~diverged, status=np.where(diverged, "diverged", "finished"))


def test_prior_and_product():
    accuracies = {("product", 10.0): 0.6, ("product", 0.0): 0.5, ("average", 10.0): 0.55, ("average", 0.0): 0.4}
    accuracies = {key: [ga, ga] for key, ga in accuracies.items()}
    assert federated.prior_and_product(part_of(ablation(accuracies))).verdict == "confirmed"
    worse = {**accuracies, ("product", 0.0): [0.7, 0.7]}
    assert federated.prior_and_product(part_of(ablation(worse))).verdict == "partly confirmed"


def test_the_best_of_several_strengths_is_not_judged_on_the_seeds_that_chose_it():
    """Every strength is lucky with one seed; the mean of the best is 0.53, and 0.5 is what each of them is worth."""
    lucky = {("product", 10.0**i): [0.59 if seed == i else 0.5 for seed in range(3)] for i in range(3)}
    accuracies = {**lucky, ("product", 0.0): [0.51] * 3, ("average", 1.0): [0.4] * 3}
    found = federated.prior_and_product(part_of(ablation(accuracies)))
    assert [one.true for one in found.held] == [False, True]
    assert found.held[0].text == "product with prior 50.0 % GA, product alone 51.0 %"
    alone = {key: values[:1] for key, values in accuracies.items()}
    told = verdicts(part_of(ablation(alone, data="digits"), "ablation_prior"))["prior_and_product"]
    assert told.verdict == "cannot be told"


def test_surviving_seeds_do_not_stand_for_a_strength():
    accuracies = {
        ("product", 10.0): [0.9, np.nan],
        ("product", 1.0): [0.5, 0.5],
        ("product", 0.0): [0.6, 0.6],
        ("average", 10.0): [0.9, np.nan],
    }
    found = federated.prior_and_product(part_of(ablation(accuracies)))
    assert [one.true for one in found.held] == [False, True]  # the prior alone has diverged


def curvature_rounds(gaps):
    """FedAvg's GA rises from 0.8, and every case stands at a distance from it in each round, for two seeds."""
    rows = [
        {"run_id": f"{case}{seed}", "case": case, "seed": seed, "round": r, "GA": 0.8 + 0.01 * r + gap}
        for case, distances in gaps.items()
        for seed in range(2)
        for r, gap in enumerate(distances, start=1)
    ]
    return pd.DataFrame(rows).assign(LA=0.5, precision_cosine_minmax=0.99, ended=True, status="finished")


def test_e_full_must_be_close_to_the_average_where_others_are_not():
    others = {"FedAvg": [0, 0, 0, 0], "full online": [0.06, 0.04, 0.002, 0], "diagonal online": [0.03, 0, 0, 0]}
    close = {f"e-full {how}": [0.005, -0.008, 0.02, 0] for how in ("online", "offline")}
    far = {f"e-full {how}": [-0.03, -0.02, 0, 0] for how in ("online", "offline")}
    assert laplace.e_full_is_average(part_of(curvature_rounds({**others, **close}))).verdict == "confirmed"
    found = laplace.e_full_is_average(part_of(curvature_rounds({**others, **far})))
    assert [one.true for one in found.held] == [False, True, False, True]
    assert "2 of 4 rounds" in found.held[0].text
    same = {case: [0, 0, 0, 0] for case in {**others, **far}}
    assert laplace.e_full_is_average(part_of(curvature_rounds(same))).held[0].true is None


def test_an_error_that_goes_the_other_way_is_not_tracked():
    table = rounds_table(alphas=(0.01, 1), lrs=(0.003, 0.01, 0.03, 0.1, 0.3), seeds=4, rounds=1)
    runs = table.assign(**{"federation.start": None})
    falling = part_of(runs.assign(AE=1 - runs["GA"]))
    assert laplace.tracks(falling, "GA", "AE").verdict == "confirmed"
    rising = part_of(runs.assign(AE=runs["GA"]))
    assert laplace.tracks(rising, "GA", "AE").verdict == "not confirmed"


def test_few_settings_cannot_tell_a_correlation():
    runs = rounds_table(alphas=(0.01,), seeds=9, rounds=1).assign(**{"federation.start": None})
    found = laplace.tracks(part_of(runs.assign(AE=1 - runs["GA"])), "GA", "AE")
    assert found.verdict == "cannot be told"
    assert "2 settings are too few" in found.held[0].text


def test_every_claim_can_be_checked_on_the_smoke_studies(smoke_store):
    checked = list(claims.check(parts(smoke_store)))
    assert [one.claim.key for one in checked] == [claim.key for claim in claims.CLAIMS]
    assert {claim.figure for claim in claims.CLAIMS} <= {entry.key for entry in CATALOGUE}
    assert {claim.study for claim in claims.CLAIMS} <= set(study_file.names())
    for one in checked:
        text = claims.markdown(one)
        assert not one.finding.failed
        assert one.finding.held or one.finding.why
        assert one.verdict in text.lower()
        assert one.claim.rule.split()[0] in text
        assert "nan" not in text
    overview = claims.overview(checked)
    assert list(overview) == ["claim", "runs", "parts", "verdict"]
    assert len(overview) == len(checked)
    several = {key for part in parts(smoke_store) for key, one in verdicts(part).items() if one.finding.told}
    assert {"first_round", "environment", "full_is_best", "diagonal_keeps_differences"} <= several


def test_a_rule_that_fails_is_said_to_have_failed(smoke_store, monkeypatch):
    def broken(part):
        raise IndexError("list index out of range")

    monkeypatch.setattr(claims, "CLAIMS", (claims.CLAIMS[0]._replace(check=broken),))
    (one,) = claims.check(parts(smoke_store))
    assert one.finding.failed
    assert one.verdict == "cannot be told"
    assert "IndexError: list index out of range" in claims.markdown(one)


def test_a_study_without_the_cases_of_a_claim_cannot_tell():
    rounds = rounds_table(cases=("SCAFFOLD",), alphas=(0.01, 1), clients=(5, 10))
    told = verdicts(part_of(rounds, "mnist_first_round"))
    assert told["first_round"].finding.why == "there are no runs of FOLA and FedAvg"
    assert told["environment"].verdict == "confirmed"


def test_a_study_that_is_not_there_has_no_claims(smoke_store):
    assert {one.part.study for one in claims.check(parts(smoke_store, "ae_lf"))} == {"ae_lf"}


def test_the_page_of_rules_is_that_of_the_code():
    page = Path(__file__).parents[2] / "docs" / "claims.md"
    assert page.read_text() == claims.rules(), "run: python -m analysis.claims > docs/claims.md"


def of_forms(**forms):
    """Runs of FedAvg and of FOLA's cases, each with a form of curvature."""
    tables = [rounds_table(cases=("FedAvg",), rounds=3)]
    for case, form in forms.items():
        mine = rounds_table(cases=("FOLA",), rounds=3, **{"method.curvature_form": form, "method.curvature": "online"})
        tables.append(mine.assign(case=case, run_id=case + mine["run_id"]))
    return part_of(pd.concat(tables, ignore_index=True))


@pytest.mark.parametrize(
    ("forms", "shown"),
    [
        ({"FOLA": "diagonal", "kron": "kron"}, "curvatures"),
        # Some of its rivals are FOLA's own, and one has another form: that is no comparison of forms.
        ({"FOLA": "diagonal", "cavity": "diagonal", "layers": "inputs"}, "learning_curves"),
    ],
)
def test_curves_are_of_forms_where_forms_are_compared(forms, shown):
    part = of_forms(**forms)
    fitting = {entry.key for entry in CATALOGUE if entry.key in ("curvatures", "learning_curves") and entry.fits(part)}
    assert fitting == {shown}
