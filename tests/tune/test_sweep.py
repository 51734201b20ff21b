"""Sweeps on a real Ray cluster: the numbers of single runs, nothing twice, everything in MLflow."""

from dataclasses import replace

import pytest
import yaml

from fl_lightning import experiment
from fl_lightning.engines.parallel.ray_cluster import Resources
from fl_lightning.errors import UserError
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.identity import identity
from fl_lightning.runs.tracking.store import store_uri
from tests.support.clusters import alone, check_complete, cluster, timeless, tracked
from tests.support.servers import free_port
from tune.grid import cells
from tune.study_file import load
from tune.sweep import Options, _Runner, sweep

pytestmark = pytest.mark.system


SMALL = {
    "data": "digits",
    "data.subset": 0.2,
    "data.clients": 4,
    "model": "mlp",
    "model.hidden": [8],
    "training.lr": 0.1,
    "engine": "functional",
    "engine.chunk": 1,
}


@pytest.fixture(scope="module")
def address():
    with cluster(2) as made:
        yield made.address


def ignore(status):
    pass


def study_of(folder, name="mine", **content):
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return load(str(path))


def test_a_sweep_equals_the_naive_grid_and_nothing_is_computed_twice(out, tmp_path, address):
    study = load("mnist_first_round", "smoke")
    configs = [config for cell in cells(study) for config in cell.configs]
    seen = []
    outcome = sweep(study, Options(out, address), seen.append)
    assert (outcome.computed, outcome.failures) == (32, {})
    assert (seen[0].finished, seen[0].total) == (0, 32)
    assert seen[-1].finished == 32
    assert seen[-1].best == max(result.final["GA"] for cell in outcome.cells for _, result in cell.runs)
    assert len(configs) == 32
    children, parent = check_complete(configs, out, tmp_path / "naive")
    assert (parent.info.run_id, parent.info.status) == (outcome.run_id, "FINISHED")
    assert parent.data.tags["study.mnist_first_round"] == "smoke"
    for cell in cells(study):
        tags = [children[identity(config)].data.tags for config in cell.configs]
        assert [(tag["case"], tag["study.mnist_first_round"]) for tag in tags] == [(cell.case, "smoke")] * 2
    assert {path.name for path in outcome.folder.iterdir()} >= {"study.yaml", "runs.csv"}
    assert len((outcome.folder / "runs.csv").read_text().splitlines()) == 33

    # Nothing is left to do, so nobody even looks for a cluster.
    again = sweep(study, Options(out, "127.0.0.1:1"), ignore)
    assert (again.computed, again.run_id) == (0, outcome.run_id)
    assert [[timeless(r) for _, r in cell.runs] for cell in again.cells] == [
        [timeless(r) for _, r in cell.runs] for cell in outcome.cells
    ]

    # Another study finds its runs among them.
    part = {key: value.values[:1] for key, value in study.environments.items()}
    spaces = {key: list(value.values) for key, value in study.space.items()}
    other = study_of(
        tmp_path,
        "part",
        base=dict(study.base),
        environments={key: list(values) for key, values in part.items()},
        space=spaces,
        cases=[{"label": "Laplace", "method": "fola"}],
    )
    reused = sweep(other, Options(out, "127.0.0.1:1"), ignore)
    assert (reused.computed, sum(len(cell.runs) for cell in reused.cells)) == (0, 4)
    _, runs = tracked(out)
    assert len([run for run in runs if run.data.tags.get("kind") != "sweep"]) == 32
    marked = {run.data.tags.get("identity") for run in runs if "study.part" in run.data.tags} - {None}
    assert marked == {identity(config) for cell in cells(other) for config in cell.configs}
    assert all(run.info.status == "FINISHED" for run in runs)


def test_the_best_settings_go_on_from_their_checkpoints(out, tmp_path, address):
    study = load("cifar_heterogeneity", "smoke")
    outcome = sweep(study, Options(out, address, max_concurrent=1), ignore)
    assert (outcome.computed, outcome.failures) == (8 + 4, {})
    short = [cell for cell in outcome.cells if cell.cell.config.federation.rounds == 2]
    long = [cell for cell in outcome.cells if cell.cell.config.federation.rounds == 4]
    assert (len(short), len(long)) == (8, 4)
    for cell in long:
        rivals = [one for one in short if one.cell.group == cell.cell.group]
        (best,) = [one for one in rivals if one.cell.point == cell.cell.point]
        assert best.tried.mean == max(one.tried.mean for one in rivals)
        ((config, result),) = cell.runs
        before = best.runs[0][1].history
        # The clock too: these two rounds were read, not computed.
        assert [m.metrics for m in result.history[:2]] == [m.metrics for m in before]
        assert timeless(result) == timeless(alone(config, tmp_path / "alone"))
    again = sweep(study, Options(out, "127.0.0.1:1"), ignore)
    assert (again.computed, len(again.cells)) == (0, 12)


def test_a_search_gives_everybody_the_same_budget_and_is_resumed(out, tmp_path, address):
    study = study_of(
        tmp_path,
        base={**SMALL, "federation.rounds": 4},
        environments={"data.alpha": [0.1, 10]},
        space={"training.lr": {"loguniform": [0.001, 1]}, "model.hidden": [[8], [4]]},
        cases=["fedavg", {"label": "FOLA", "method": "fola", "space": {"method.strength": {"choice": [1, 10]}}}],
        seeds=2,
        search={"algorithm": "optuna", "samples": 4, "scheduler": "asha", "reduction": 2},
    )
    outcome = sweep(study, Options(out, address), ignore)
    assert (outcome.failures, outcome.computed) == ({}, 2 * 16)
    groups = [cell.cell.group for cell in outcome.cells]
    assert sorted(groups.count(group) for group in set(groups)) == [4, 4, 4, 4]
    rounds = {}
    for cell in outcome.cells:
        for config in cell.cell.configs:
            result = run_folder.latest(config, out)
            rounds[identity(config)] = len(result.history)
            assert result.status == ("finished" if rounds[identity(config)] == 4 else "stopped")
    assert len(rounds) == 32
    assert 32 < sum(rounds.values()) < 128  # some were stopped early
    best = [cell for cell in outcome.cells if cell.runs]
    assert {cell.cell.group for cell in best} == set(groups)
    config, result = best[0].runs[0]
    assert timeless(result) == timeless(alone(config, tmp_path / "alone"))

    again = sweep(study, Options(out, address, max_concurrent=1), ignore)
    assert again.computed == 0
    assert {identity(config) for cell in again.cells for config in cell.cell.configs} == set(rounds)
    for cell in again.cells:
        for config in cell.cell.configs:
            assert len(run_folder.latest(config, out).history) == rounds[identity(config)]
    _, runs = tracked(out)
    assert len(runs) == 33


def test_broken_diverging_and_stopped_runs_leave_the_others_alone(out, tmp_path, address):
    study = study_of(
        tmp_path,
        base={**SMALL, "federation.rounds": 8},
        cases=["fedavg", "fedbe", {"label": "wild", "method": "fedavg", "training.lr": 1e20}],
        stop={"at_least": 0.3},
    )
    outcome = sweep(study, Options(out, address, max_concurrent=1), ignore)
    ((name, reason),) = outcome.failures.items()
    assert name.startswith("fedbe seed 0")
    assert "data.holdout" in reason
    stopped, broken, wild = outcome.cells
    assert broken.runs == []
    assert outcome.computed == 2  # not the failure
    assert wild.runs[0][1].status == "diverged"
    ((_, result),) = stopped.runs
    assert result.final["GA"] >= 0.3 > result.history[-2].metrics["GA"]
    assert len(result.history) < 8
    _, runs = tracked(out)
    found = {run.data.tags["case"]: run for run in runs if "case" in run.data.tags}
    assert found["wild"].data.tags["diverged"].startswith("round 1, client ")
    assert found["fedavg"].info.status == "KILLED"
    (parent,) = [run for run in runs if run.data.tags.get("kind") == "sweep"]
    assert (parent.info.status, parent.data.metrics["failures"]) == ("FAILED", 1)
    # The failure is tried again, the rest is not.
    remedied = replace(study, cases=tuple(case for case in study.cases if case.label != "fedbe"))
    assert sweep(remedied, Options(out, "127.0.0.1:1"), ignore).computed == 0


def test_resources_that_no_node_has_are_refused(out, address):
    with pytest.raises(UserError, match=r"no node of the cluster can offer 3 CPU and 0 GPU .*: 2 CPU, 0 GPU\)"):
        sweep(load("demo", "smoke"), Options(out, address, Resources(3)), ignore)
    with pytest.raises(UserError, match=r"can offer 1 CPU and 0.5 GPU .*: 2 CPU, 0 GPU\)"):
        sweep(load("demo", "smoke"), Options(out, address, Resources(1, 0.5)), ignore)
    with pytest.raises(UserError, match="not both 0"):
        sweep(load("demo", "smoke"), Options(out, address, Resources(0, 0)), ignore)
    _, runs = tracked(out)
    assert [run.info.status for run in runs] == ["FAILED"]  # the parent alone


@pytest.mark.parametrize("search", [{}, {"algorithm": "optuna", "samples": 2}], ids=["grid", "optuna"])
@pytest.mark.parametrize(
    ("base", "resources", "message"),
    [
        ({}, Resources(1, 64), r"can offer 1 CPU and 64 GPU to one process \(this machine: "),
        ({"compute.device": "cuda:7"}, Resources(), "compute.device is 'cuda:7', but torch sees"),
        ({"compute.device": "cpu", "compute.precision": "16-mixed"}, Resources(), "16-mixed is for a GPU"),
    ],
)
def test_what_this_machine_lacks_is_refused_before_ray_starts(
    out, tmp_path, monkeypatch, base, resources, message, search
):
    monkeypatch.setattr("tune.sweep.connected", lambda *place: pytest.fail("a cluster was started"))
    study = study_of(
        tmp_path, base={**SMALL, **base}, cases=["fedavg"], search=search, space={"training.lr": [0.1, 0.2]}
    )
    with pytest.raises(UserError, match=message):
        sweep(study, Options(out, resources=resources), ignore)


def test_gpus_for_runs_on_the_cpu_are_refused(out, tmp_path):
    study = study_of(tmp_path, base={**SMALL, "compute.device": "cpu"}, cases=["fedavg"])
    with pytest.raises(UserError, match=r"compute\.device is cpu, but --resources\.gpu asks for GPUs"):
        sweep(study, Options(out, "127.0.0.1:1", Resources(1, 0.5)), ignore)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:6379", "nonsense", "host:port"])
def test_a_cluster_that_does_not_answer_is_named(out, address):
    with pytest.raises(UserError, match=address) as caught:
        sweep(load("demo", "smoke"), Options(out, address), ignore)
    assert "\n" not in str(caught.value)
    assert not list(out.glob("*-digits-*"))


def test_a_tracking_server_that_does_not_answer_stops_no_sweep(out, tmp_path, address, monkeypatch, capfd):
    study = study_of(tmp_path, base={**SMALL, "federation.rounds": 2}, cases=["fedavg"])
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
        outcome = sweep(study, Options(out, address, Resources(1, 0)), ignore)
    assert (outcome.computed, outcome.failures, outcome.run_id) == (1, {}, "")
    words = capfd.readouterr().err
    assert words.count("does not answer; the computation goes on") == 1
    assert "the same command sends them" in words
    told = sweep(study, Options(out, address, Resources(1, 0)), ignore)
    assert told.computed == 0
    (child,) = [run for run in tracked(out)[1] if "identity" in run.data.tags]
    assert child.data.tags["mlflow.parentRunId"] == told.run_id


def test_settings_that_cannot_be_are_refused_before_anything_is_written(out):
    with pytest.raises(UserError, match=r"did you mean 'training\.lr'"):
        sweep(load("demo", "smoke", {"training.lrr": "1"}), Options(out), ignore)
    assert tracked(out)[1] == []


def test_runs_of_another_store_are_told_to_the_present_one(out, tmp_path, monkeypatch):
    study = study_of(tmp_path, base={**SMALL, "federation.rounds": 2}, cases=["fedavg"])
    (cell,) = cells(study)
    first = experiment.run(cell.config, out)
    assert sweep(study, Options(out), ignore).computed == 0
    old = tracked(out)[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'other.db'}")
    outcome = sweep(study, Options(out), ignore)
    assert outcome.computed == 0
    client, runs = tracked(out)
    (child,) = [run for run in runs if "identity" in run.data.tags]
    assert child.data.tags["mlflow.parentRunId"] == outcome.run_id
    assert child.info.run_id != first.run_id
    assert [p.value for p in client.get_metric_history(child.info.run_id, "GA")] == [
        m.metrics["GA"] for m in first.history
    ]
    assert outcome.run_id not in {run.info.run_id for run in old}
    assert run_folder.finished(cell.config, out).store == store_uri(out)


def test_fresh_computes_again_once(out, tmp_path, address):
    study = study_of(tmp_path, base={**SMALL, "federation.rounds": 2}, cases=["fedavg"])
    ((_, first),) = sweep(study, Options(out, address), ignore).cells[0].runs
    outcome = sweep(study, Options(out, address, fresh=True), ignore)
    ((_, again),) = outcome.cells[0].runs
    assert outcome.computed == 1
    assert again.run_id != first.run_id
    assert timeless(again) == timeless(first)


@pytest.mark.parametrize(
    ("room", "at_once", "trials", "workers"),
    [(8, None, 20, 1), (8, None, 3, 2), (8, 1, 20, 8), (8, 2, 20, 4), (8, 2, 1, 8), (2, None, 0, 2)],
)
def test_auto_gives_all_cores_to_the_trials_that_run_at_once(tmp_path, room, at_once, trials, workers):
    options = Options(tmp_path, workers="auto", max_concurrent=at_once, address="elsewhere")
    runner = _Runner(None, options, None, tmp_path, lambda: room, None, {})
    assert runner._workers(trials) == workers
