"""A comparison is a small study: the same numbers on one core and on several, and a name to select it by."""

from dataclasses import replace

import pytest

from analysis import runs
from fl_lightning import experiment
from fl_lightning.cli.compare import overshooting, printed
from fl_lightning.engines.parallel.ray_cluster import Resources
from fl_lightning.errors import UserError
from fl_lightning.metrics.metric import Measurement
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.folder import Result
from tests.support.clusters import timeless
from tune import comparison
from tune.comparison import study_of
from tune.grid import cells
from tune.outcome import CellOutcome
from tune.sweep import Options

pytestmark = pytest.mark.system


QUICK = {
    "data": "digits",
    "data.subset": 0.2,
    "data.clients": 4,
    "model": "softmax",
    "engine": "functional",
    "federation.rounds": 2,
    "training.lr": 0.1,
}
VARIANTS = ["fedavg", "product only:fola+strength=0"]


def ignore(status):
    pass


def by_seed(found):
    return {(one.cell.case, config.seed): result for one in found for config, result in one.runs}


def alone(method, seed, out):
    return experiment.run(configure({**QUICK, **comparison.variant_settings(method), "seed": seed}), out)


def test_all_cores_and_one_give_the_numbers_of_single_runs(out, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "WORTH_SECONDS", 0.0)  # Ray, however short the runs are
    study = study_of(QUICK, VARIANTS, [0, 1], "mine")
    found, failures = comparison.compare(study, Options(out), ignore)
    assert failures == {}
    assert set(by_seed(found)) == {(v, s) for v in ("fedavg", "product only") for s in (0, 1)}
    seen = []
    once, _ = comparison.compare(study, Options(tmp_path / "one", max_concurrent=1), seen.append)
    for (label, seed), one in by_seed(found).items():
        variant = next(variant for variant in VARIANTS if comparison.label_of(variant) == label)
        reference = alone(variant, seed, tmp_path / "alone")
        assert timeless(one) == timeless(by_seed(once)[label, seed]) == timeless(reference)
    assert [status.finished for status in seen][-1] == 4
    assert seen[-1].rounds == 8
    selected = runs.load(out, study="mine").runs
    assert sorted(selected["case"].unique()) == ["FedAvg", "product only"]
    assert len(selected) == 4


def test_a_comparison_without_a_name_is_known_by_what_it_compares():
    name = study_of(QUICK, VARIANTS, [0]).name
    assert name.startswith("fedavg-product_only-")
    assert study_of(dict(QUICK), list(VARIANTS), (0, 1)).name == name  # more seeds of the same
    others = {study_of(QUICK, VARIANTS[:1], [0]).name, study_of({**QUICK, "data.alpha": 1}, VARIANTS, [0]).name}
    assert len(others | {name}) == 3
    assert study_of(QUICK, VARIANTS, [0], "mine").name == "mine"


def test_ray_is_not_started_for_what_is_done_sooner(out, monkeypatch):
    monkeypatch.setattr("tune.sweep.connected", lambda *place: pytest.fail("a cluster was started"))
    found, _ = comparison.compare(study_of(QUICK, VARIANTS, [0]), Options(out), ignore)
    assert len(found) == 2


def test_what_cannot_run_is_refused_before_anything_is_computed(out):
    study = study_of({**QUICK, "training.epochs": 1}, ["fedavg", "fedpa"], [0])
    with pytest.raises(UserError, match=r"method\.burn_in must be less"):
        comparison.compare(study, Options(out), ignore)
    assert not list(out.glob("*-digits-*"))


def test_gpus_that_are_not_there_are_refused_before_anything_is_measured(out, monkeypatch):
    monkeypatch.setattr(comparison, "_seconds", lambda todo: pytest.fail("a run was measured"))
    with pytest.raises(UserError, match=r"can offer 1 CPU and 64 GPU to one process \(this machine: "):
        comparison.compare(study_of(QUICK, VARIANTS, [0]), Options(out, resources=Resources(1, 64)), ignore)


def test_a_prior_loss_that_overshoots_is_named_once_for_each_method(tmp_path):
    history = [Measurement({"GA": 0.5, "LA": 0.4, "prior_stability": number}, {}) for number in (0.5, 3.0, 4.0)]
    result = Result("finished", "", "", tmp_path, history)
    both = cells(study_of(QUICK, ["fedavg", "fola"], [0, 1]))
    found = [CellOutcome(cell, "GA", [(config, result) for config in cell.configs]) for cell in both]
    (line,) = overshooting(found)
    assert line.startswith("warning: fola, seed 0, after round 2: prior_stability, ")
    assert line.endswith("lower training.lr or method.strength")


def test_arrivals_are_not_rounded_away(tmp_path):
    study = study_of(QUICK, ["fola"], [0, 1, 2])
    (cell,) = cells(study)

    def arriving(*numbers):
        histories = [[Measurement({"GA": 0.9 * (i >= n), "LA": 0.0}, {}) for i in range(1, 7)] for n in numbers]
        runs = [Result("finished", "", "", tmp_path, history) for history in histories]
        found = CellOutcome(cell, "GA", list(zip(cell.configs, runs, strict=False)))
        (head, line) = printed([found], replace(study, thresholds=(0.8,)), markdown=True).splitlines()[::2]
        return dict(zip(*([text.strip() for text in row.strip("|").split("|")] for row in (head, line)), strict=True))

    assert arriving(4, 5)["rounds to 80%"] == "4.5 ± 0.7"
    assert arriving(4)["rounds to 80%"] == "4.0"
    assert arriving(4, 5, 9)["rounds to 80%"] == "4.5 ± 0.7 (2/3)"
    assert list(arriving(4)) == ["method", "GA (%)", "LA (%)", "rounds to 80%", "runs"]
