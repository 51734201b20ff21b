"""What one trial computes, without Ray: packs change nothing, a broken run fails alone, rules stop runs."""

import errno
import os

import pytest

from fl_lightning.methods.fedprox import FedProx
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity
from fl_lightning.runs.open_run import RunOptions
from tests.support.clusters import alone, timeless
from tune.work import Instructions, one_after_the_other, side_by_side

BASE = {
    "data": "digits",
    "data.subset": 0.2,
    "data.clients": 4,
    "model": "mlp",
    "model.hidden": [8],
    "training.lr": 0.1,
    "training.epochs": 1,
    "engine": "functional",
    "engine.chunk": 1,
    "federation.rounds": 3,
}
SLIM = RunOptions(pictures=False, checkpoint=False)


@pytest.fixture(autouse=True)
def one_store(out, monkeypatch):
    """For all folders of runs of a test."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{out / 'mlflow.db'}")


def run(**changes):
    return configure({**BASE, **{key.replace("__", "."): value for key, value in changes.items()}})


def compute(work, instructions):
    *_, status = one_after_the_other(work, instructions)
    return status


@pytest.mark.system
def test_packs_equal_runs_that_are_alone(tmp_path):
    configs = [
        run(method=method, training__epochs=epochs, federation__rounds=rounds, seed=seed)
        for method in ("fedavg", "fola", "scaffold")
        for epochs, rounds, seed in ((1, 1, 0), (2, 1, 0), (1, 3, 0), (1, 1, 1))
    ]
    status = compute(configs, Instructions(tmp_path / "packed", SLIM))
    assert (status.finished, dict(status.failures)) == (len(configs), {})
    assert status.rounds == sum(config.federation.rounds for config in configs)
    for config in configs:
        expected = alone(config, tmp_path / "alone")
        assert timeless(run_folder.finished(config, tmp_path / "packed")) == timeless(expected)
    ends = [run_folder.finished(config, tmp_path / "packed").final["GA"] for config in configs]
    assert status.best == max(ends)


@pytest.mark.system
def test_what_was_interrupted_goes_on(tmp_path):
    config = run(method="fola", federation__rounds=4)
    work = one_after_the_other([config], Instructions(tmp_path / "a", SLIM))
    assert [next(work).rounds for _ in range(2)] == [1, 2]
    work.close()
    assert run_folder.latest(config, tmp_path / "a").status == "stopped"
    assert run_folder.finished(config, tmp_path / "a") is None
    status = compute([config], Instructions(tmp_path / "a", SLIM))
    assert (status.finished, status.rounds) == (1, 4)
    assert timeless(run_folder.finished(config, tmp_path / "a")) == timeless(alone(config, tmp_path / "b"))


@pytest.mark.system
def test_a_broken_run_fails_alone_with_its_message(tmp_path):
    good, late = run(method="fedavg"), run(method="fola")
    broken = run(method="fedbe")  # wants data that belong to no client
    status = compute([good, broken, late], Instructions(tmp_path, SLIM))
    assert status.finished == 3
    ((name, reason),) = status.failures.items()
    assert name == f"fedbe seed 0 ({identity(broken)})"
    assert "data.holdout" in reason
    assert run_folder.finished(good, tmp_path).status == run_folder.finished(late, tmp_path).status == "finished"
    assert run_folder.latest(broken, tmp_path) is None


@pytest.mark.system
def test_runs_that_cannot_even_begin_do_not_take_others_with_them(tmp_path):
    nowhere = {"data": "mnist", "data__root": str(tmp_path / "nothing"), "federation__rounds": 1}
    lost = [run(**nowhere, method=method) for method in ("fedavg", "fola")]
    good = run(method="fedavg")
    status = compute([*lost, good], Instructions(tmp_path / "runs", SLIM))
    assert len(status.failures) == 2
    assert all("mnist" in reason.lower() for reason in status.failures.values())
    assert status.finished == 3
    assert run_folder.finished(good, tmp_path / "runs")


@pytest.mark.system
def test_a_bug_of_a_method_is_told_and_tried_again(tmp_path, monkeypatch):
    aggregate = FedProx.aggregate

    def buggy(self, state, cohort, reports):
        if cohort.round == 2:
            raise ZeroDivisionError("a bug in aggregate")
        return aggregate(self, state, cohort, reports)

    work, instructions = [run(method="fedprox"), run(method="fedavg")], Instructions(tmp_path, SLIM)
    monkeypatch.setattr(FedProx, "aggregate", buggy)
    for _ in range(2):
        assert list(compute(work, instructions).failures.values()) == ["ZeroDivisionError: a bug in aggregate"]
        assert run_folder.finished(work[1], tmp_path)
    monkeypatch.setattr(FedProx, "aggregate", aggregate)
    assert not compute(work, instructions).failures
    assert len(run_folder.finished(work[0], tmp_path).history) == 3


@pytest.mark.system
def test_divergence_is_a_result_with_its_round(tmp_path):
    wild = run(method="fedavg", training__lr=1e20, federation__rounds=5)
    status = compute([wild, run(method="fedavg")], Instructions(tmp_path, SLIM))
    assert not status.failures
    result = run_folder.finished(wild, tmp_path)
    assert result.status == "diverged"
    assert f"in round {len(result.history) + 1}" in result.message
    good = run_folder.finished(run(method="fedavg"), tmp_path).final["GA"]
    assert status.best == good  # a diverged run is no best one


@pytest.mark.system
def test_the_stop_rule_ends_runs_and_the_rounds_stay(tmp_path):
    config = run(method="fedavg", federation__rounds=12)
    whole = alone(config, tmp_path / "whole")
    values = [m.metrics["GA"] for m in whole.history]
    expected = next(n for n in range(1, 13) if values[n - 1] >= 0.5)
    assert 1 < expected < 12
    status = compute([config], Instructions(tmp_path / "cut", SLIM, stop=Stop(at_least=0.5)))
    assert (status.finished, status.rounds) == (1, expected)
    result = run_folder.latest(config, tmp_path / "cut")
    assert result.status == "stopped"
    assert timeless(result)[2] == timeless(whole)[2][:expected]
    again = compute([config], Instructions(tmp_path / "cut", SLIM, stop=Stop(at_least=0.5)))
    assert (again.finished, again.rounds) == (1, expected)  # read, and stopped at the same round
    assert len(run_folder.latest(config, tmp_path / "cut").history) == expected


@pytest.mark.system
@pytest.mark.parametrize("changes", [{"metric": "GAA"}, {"stop": Stop("GAA", 0.5)}])
@pytest.mark.parametrize("together", [False, True])
def test_a_metric_that_nobody_measures_is_named(tmp_path, changes, together):
    config, instructions = run(method="fedavg"), Instructions(tmp_path, SLIM, **changes)
    for _ in range(2):
        *_, status = side_by_side([config], instructions) if together else one_after_the_other([config], instructions)
        assert [reason.partition("?")[0] for reason in status.failures.values()] == [
            "unknown metric 'GAA': did you mean 'GA'"
        ]


@pytest.mark.system
def test_seeds_go_side_by_side_and_report_their_mean(tmp_path):
    configs = [run(method="fola", seed=seed) for seed in (0, 1, 2)]
    seen = list(side_by_side(configs, Instructions(tmp_path / "together", SLIM)))
    separate = [alone(config, tmp_path / "alone") for config in configs]
    for number, status in enumerate(seen[:3], start=1):
        expected = [result.history[number - 1].metrics["GA"] for result in separate]
        assert status.value == pytest.approx(sum(expected) / 3, abs=1e-15)
        assert status.rounds == number
    assert (seen[-1].finished, seen[-1].best) == (3, seen[2].value)
    for config, result in zip(configs, separate, strict=True):
        assert timeless(run_folder.finished(config, tmp_path / "together")) == timeless(result)


@pytest.mark.system
def test_seeds_that_stop_early_keep_their_last_value_in_the_mean(tmp_path):
    configs = [run(method="fedavg", seed=seed, federation__rounds=12) for seed in (0, 1)]
    whole = [alone(config, tmp_path / "whole") for config in configs]
    firsts = [next(i for i, m in enumerate(r.history) if m.metrics["GA"] >= 0.45) for r in whole]
    assert firsts[0] != firsts[1]
    *_, last = side_by_side(configs, Instructions(tmp_path / "cut", SLIM, stop=Stop(at_least=0.45)))
    ends = [result.history[first].metrics["GA"] for result, first in zip(whole, firsts, strict=True)]
    assert last.value == pytest.approx(sum(ends) / 2, abs=1e-15)


@pytest.mark.slow
def test_a_setting_whose_seed_diverges_is_worth_nothing(tmp_path):
    configs = [run(method="fedavg", seed=0), run(method="fedavg", training__lr=1e20, federation__rounds=3, seed=1)]
    *_, last = side_by_side(configs, Instructions(tmp_path, SLIM))
    assert last.value == last.best == float("-inf")
    assert last.finished == 2
    assert run_folder.finished(configs[0], tmp_path).status == "finished"


@pytest.mark.system
def test_closing_stops_all_seeds(tmp_path):
    configs = [run(method="fedavg", seed=seed) for seed in (0, 1)]
    work = side_by_side(configs, Instructions(tmp_path, SLIM))
    next(work)
    work.close()
    assert [run_folder.latest(config, tmp_path).status for config in configs] == ["stopped", "stopped"]
    status = compute(configs, Instructions(tmp_path, SLIM))  # their locks are free again
    assert not status.failures


@pytest.mark.system
@pytest.mark.parametrize("compute", [one_after_the_other, side_by_side])
def test_a_full_disk_is_told_apart_from_a_run_s_own_failure(tmp_path, monkeypatch, compute):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    *_, status = compute([run(seed=0), run(seed=1)], Instructions(tmp_path, SLIM))
    assert status.full.endswith("No space left on device; earlier rounds are safe")
