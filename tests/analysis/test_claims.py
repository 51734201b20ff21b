"""The paper's claims: every one can be checked, and a false one is not confirmed."""

import itertools
from dataclasses import replace

import pandas as pd
import pytest

from analysis import claims
from analysis.claims import federated, laplace
from analysis.parts import Part, parts
from analysis.report import CATALOGUE
from tests.analysis.synthetic import rounds_table
from tune import study_file


def part_of(rounds, study=""):
    """A part of a store that does not exist."""
    runs = (
        rounds.sort_values("round").groupby("run_id", sort=False).tail(1).drop(columns="round").reset_index(drop=True)
    )
    part = Part(None, "made up", study, "", runs, runs.iloc[:0])
    part.__dict__["rounds"] = rounds
    return part


def swapped(rounds):
    """The same numbers, with FOLA's called FedAvg's and the other way round."""
    return rounds.assign(case=rounds["case"].replace({"FOLA": "FedAvg", "FedAvg": "FOLA"}))


GRID = {"alphas": (0.01, 1, 100), "clients": (5, 20, 80), "seeds": 20}


def test_a_lead_at_small_alpha_is_seen():
    rounds = rounds_table(**GRID, rounds=1)
    assert federated.first_round(part_of(rounds)).verdict == "confirmed"
    behind = federated.first_round(part_of(swapped(rounds)))
    assert behind.verdict == "partly confirmed"  # alike at large alpha they are still
    assert [true for _, true in behind.held] == [False, True]


def test_heterogeneity_and_clients_lower_accuracy():
    rounds = rounds_table(**GRID, rounds=1)
    found = federated.environment(part_of(rounds))
    assert found.verdict == "confirmed"
    assert found.held[0][0] == "GA rises with α in 12 of 12 steps"
    turned = rounds.assign(**{"data.alpha": 1 / rounds["data.alpha"], "data.clients": 400 / rounds["data.clients"]})
    assert federated.environment(part_of(turned)).verdict == "not confirmed"


def test_faster_and_higher():
    rounds = rounds_table(cases=("FedAvg", "FOLA", "SCAFFOLD"), seeds=20, rounds=15)
    found = federated.convergence(part_of(rounds))
    assert found.verdict == "confirmed"
    assert found.held[-1][0].endswith("points against the best other method (FedAvg)")
    assert federated.convergence(part_of(swapped(rounds))).verdict == "not confirmed"


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
    found = federated.steadiness(part_of(pd.concat([smooth, rough])))
    assert found.verdict == "confirmed"
    table = found.table.set_index("case")["falls of GA (points)"]
    assert table["FOLA"] == 0
    assert table["FOLA offline"] == pytest.approx(3 * 5)  # from 0.2 to 0.15, and so on, in rounds 3, 6 and 9


def test_nothing_is_said_about_rounds_that_are_not_there():
    rounds = pd.concat([rounds_table(cases=("FOLA",), rounds=3), rounds_table(cases=("FedAvg",), rounds=3)])
    rounds["case"] = rounds["case"].replace({"FedAvg": "FOLA offline"})
    part = part_of(rounds, "mnist_curves")
    assert federated.steadiness(part).held == []
    assert "online_mnist" not in {one.claim.key for one in claims.check([part])}


def test_prior_and_product():
    accuracies = {("product", 10.0): 0.6, ("product", 0.0): 0.5, ("average", 10.0): 0.55, ("average", 0.0): 0.4}
    rows = [
        {"run_id": f"{case}{strength}{seed}", "case": case, "method.strength": strength, "seed": seed, "GA": ga}
        for ((case, strength), ga), seed in itertools.product(accuracies.items(), range(2))
    ]
    rounds = pd.DataFrame(rows).assign(LA=0.3, ended=True, round=1)
    assert federated.prior_and_product(part_of(rounds)).verdict == "confirmed"
    worse = rounds.assign(GA=rounds["GA"].mask(rounds["GA"].eq(0.5), 0.7))
    assert federated.prior_and_product(part_of(worse)).verdict == "partly confirmed"


def test_an_error_that_goes_the_other_way_is_not_tracked():
    runs = rounds_table(alphas=(0.01, 1), seeds=20, rounds=1).assign(**{"federation.start": None})
    falling = part_of(runs.assign(AE=1 - runs["GA"]))
    assert laplace.tracks(falling, "GA", "AE").verdict == "confirmed"
    rising = part_of(runs.assign(AE=runs["GA"]))
    assert laplace.tracks(rising, "GA", "AE").verdict == "not confirmed"


def test_every_claim_can_be_checked_on_the_smoke_studies(smoke_store):
    checked = list(claims.check(parts(smoke_store)))
    assert [one.claim.key for one in checked] == [claim.key for claim in claims.CLAIMS]
    assert {claim.figure for claim in claims.CLAIMS} <= {entry.key for entry in CATALOGUE}
    assert {claim.study for claim in claims.CLAIMS} <= set(study_file.names())
    for one in checked:
        text = claims.markdown(one)
        assert one.finding.held
        assert one.finding.verdict in text.lower()
        assert "nan" not in text
    overview = claims.overview(checked)
    assert list(overview) == ["claim", "runs", "verdict"]
    assert len(overview) == len(checked)


def test_a_study_that_lacks_any_of_its_cases_or_strengths_breaks_nothing(smoke_store):
    for part in parts(smoke_store):
        for case in part.runs["case"].unique():
            others = part.only(*(other for other in part.runs["case"].unique() if other != case))
            assert all(one.finding.held for one in claims.check([others]))
    (part,) = parts(smoke_store, "ablation_prior")
    for strength in (0, 100):
        pinned = replace(part, runs=part.runs.loc[part.runs["method.strength"].eq(strength)])
        assert list(claims.check([pinned])) == []


def test_a_study_without_the_cases_of_a_claim_is_passed_over():
    rounds = rounds_table(cases=("SCAFFOLD",), alphas=(0.01, 1), clients=(5, 10))
    part = part_of(rounds, "mnist_first_round")
    assert [one.claim.key for one in claims.check([part])] == ["environment"]
