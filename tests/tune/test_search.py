"""A fair search: the same budget for all, judged among equals, remembered over restarts."""

import json
import math
from types import SimpleNamespace

import pytest
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from fl_lightning.runs.identity import identity
from tune.search import FairAsha, FairSearch
from tune.study import Case, Range, Search, Study

BASE = {"data": "digits", "model": "softmax", "engine": "functional", "federation.rounds": 9}
STUDY = Study(
    "mine",
    "",
    base=BASE,
    environments={"data.alpha": Range("grid", (0.1, 1))},
    space={"training.lr": Range("loguniform", (0.001, 1.0)), "training.batch_size": Range("grid", (8, 16))},
    cases=(
        Case("FedAvg", {"method": "fedavg"}),
        Case(
            "FOLA",
            {"method": "fola"},
            {"method.strength": Range("uniform", (0, 2)), "training.epochs": Range("choice", (1, 2))},
        ),
    ),
    seeds=(0, 4),
    search=Search("optuna", samples=6, scheduler="asha", reduction=2),
)


def searcher(folder, known=()):
    return FairSearch(STUDY, folder / "proposals.json", lambda config: identity(config) not in known)


def quality(proposal):
    """The best rate is 0.1."""
    return -abs(math.log10(proposal["settings"][0]["training.lr"]) + 1)


def go(search, number, failing=()):
    proposals = []
    for index in range(number):
        name = f"trial{len(search.proposed)}"
        proposals.append(search.suggest(name))
        if index in failing:
            search.on_trial_complete(name, error=True)
        else:
            result = {"value": quality(proposals[-1]), "training_iteration": 9, "rounds": 9, "failures": {}}
            search.on_trial_result(name, result)
            search.on_trial_complete(name, result)
    return proposals


def test_every_case_in_every_environment_gets_the_same_budget(tmp_path):
    search = searcher(tmp_path)
    assert (search.budget, search.rounds) == (24, 9)
    proposals = go(search, 24)
    assert search.suggest("one more") == Searcher.FINISHED
    counts = {}
    for number, proposal in enumerate(proposals, start=1):
        counts[proposal["comparison"]] = counts.get(proposal["comparison"], 0) + 1
        assert max(counts.values()) - min(counts.values()) <= 1 or number < 4, "some are ahead of others"
    assert list(counts.values()) == [6, 6, 6, 6]
    assert len(search.proposed) == 24
    assert len(search.new) == 48
    for cell, proposal in zip(search.proposed, proposals, strict=True):
        first, second = proposal["settings"]
        assert [config.flat() for config in cell.configs] == [first, second]
        assert (first["seed"], second["seed"]) == (0, 4)
        assert 0.001 <= first["training.lr"] <= 1
        assert first["training.batch_size"] in (8, 16)
        assert first["data.alpha"] == cell.environment["data.alpha"]
        assert first["method"] == {"FedAvg": "fedavg", "FOLA": "fola"}[cell.case] == proposal["case"].lower()
        if cell.case == "FOLA":
            assert 0 <= first["method.strength"] <= 2
            assert first["training.epochs"] in (1, 2)


def test_it_learns(tmp_path):
    study = Study(
        "mine",
        "",
        base=BASE,
        cases=STUDY.cases[:1],
        space={"training.lr": STUDY.space["training.lr"]},
        search=Search("optuna", 40),
    )
    search = FairSearch(study, tmp_path / "proposals.json", lambda _: True)
    values = [quality(proposal) for proposal in go(search, 40)]
    assert sum(values[20:]) / 20 > -0.5  # -0.83 by chance


def test_a_restart_proposes_what_was_proposed_and_then_goes_on_as_before(tmp_path):
    whole = [p["settings"] for p in go(searcher(tmp_path), 24)]
    (tmp_path / "proposals.json").unlink()
    first = searcher(tmp_path)
    begun = go(first, 10)
    known = {identity(config) for cell in first.proposed for config in cell.configs}
    again = searcher(tmp_path, known)
    proposals = go(again, 24)
    assert [p["settings"] for p in proposals[:10]] == [p["settings"] for p in begun] == whole[:10]
    assert [p["number"] for p in proposals[:8]] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert len(again.new) == 2 * (24 - 10)
    assert again.suggest("one more") == Searcher.FINISHED
    assert {name: len(points) for name, points in json.loads((tmp_path / "proposals.json").read_text()).items()} == {
        proposal["comparison"]: 6 for proposal in proposals
    }
    third = searcher(tmp_path, {identity(config) for cell in again.proposed for config in cell.configs})
    assert [p["settings"] for p in go(third, 24)] == [p["settings"] for p in proposals]
    assert third.new == []


def test_settings_that_fail_use_up_their_budget_and_nothing_else(tmp_path):
    search = searcher(tmp_path)
    assert len(go(search, 24, failing=(0, 5, 6))) == 24
    assert search.suggest("one more") == Searcher.FINISHED


def trial(comparison, number):
    config = {"comparison": comparison, "number": number, "settings": [{"federation.rounds": 9}]}
    return SimpleNamespace(config=config, trial_id=f"{comparison}{number}")


def judged(scheduler, one, rounds, value, **more):
    return scheduler.on_trial_result(None, one, {"rounds": rounds, "value": value, "failures": {}, **more})


@pytest.fixture
def asha(tmp_path):
    def make():
        return FairAsha(STUDY, 9, tmp_path / "stops.json")

    return make


def begin(scheduler, *trials):
    for one in trials:
        scheduler.on_trial_add(None, one)
    return trials


def test_asha_compares_within_a_contest_only(asha):
    scheduler = asha()
    good, bad, other = begin(scheduler, trial("a", 1), trial("a", 2), trial("b", 1))
    assert judged(scheduler, good, 1, 0.9) == TrialScheduler.CONTINUE
    assert judged(scheduler, other, 1, 0.1) == TrialScheduler.CONTINUE  # bad, but the only one of its kind
    assert judged(scheduler, bad, 1, 0.2) == TrialScheduler.STOP
    assert judged(scheduler, good, 2, 0.9) == TrialScheduler.CONTINUE


def test_asha_stops_what_it_stopped_before_a_restart_at_the_same_round(asha):
    scheduler = asha()
    good, bad = begin(scheduler, trial("a", 1), trial("a", 2))
    for rounds in (1, 2):
        judged(scheduler, good, rounds, 0.9)
    assert judged(scheduler, bad, 1, 0.95) == TrialScheduler.CONTINUE
    assert judged(scheduler, bad, 2, 0.2) == TrialScheduler.STOP
    scheduler = asha()
    good, bad = begin(scheduler, trial("a", 1), trial("a", 2))
    assert judged(scheduler, bad, 1, 0.95) == TrialScheduler.CONTINUE  # the first comes first this time
    assert judged(scheduler, bad, 2, 0.2) == TrialScheduler.STOP


def test_asha_does_not_judge_what_has_ended_and_ends_what_diverged(asha):
    scheduler = asha()
    good, bad, wild = begin(scheduler, trial("a", 1), trial("a", 2), trial("a", 3))
    judged(scheduler, good, 1, 0.9)
    assert judged(scheduler, bad, 1, 0.1, done=True) == TrialScheduler.CONTINUE
    assert judged(scheduler, bad, 9, 0.1) == TrialScheduler.CONTINUE
    assert judged(scheduler, wild, 1, float("-inf")) == TrialScheduler.STOP
    scheduler.on_trial_complete(None, wild, {"rounds": 1, "value": float("-inf")})
    scheduler.on_trial_complete(None, good, {"rounds": 9, "value": 0.9})
