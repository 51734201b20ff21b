"""The posterior of whole runs: in a run, after it, in MLflow, loaded again, and what is refused."""

import math
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.tables import TABLES
from fl_lightning import Uncertainty, configure, experiment, load_model, posterior_of
from fl_lightning.__main__ import main
from fl_lightning.data.partition import Split, held_out, partition, validating
from fl_lightning.errors import UserError
from fl_lightning.metrics.uncertainty import posterior_file
from fl_lightning.runs.identity import identity
from fl_lightning.runs.load import measure_posterior
from fl_lightning.runs.open_run import RunOptions
from fl_lightning.runs.problem import problem_of

pytestmark = pytest.mark.system


SETTINGS = {
    "method": "fedavg",
    "data": "digits",
    "data.clients": 3,
    "data.subset": 0.2,
    "data.test_subset": 0.3,
    "data.validation": 0.1,
    "model.hidden": [8],
    "training.lr": 0.1,
    "training.epochs": 1,
    "federation.rounds": 2,
    "engine": "functional",
    "compute.precision": "float64",
}
ENDING = {
    "uncertainty.final_round": True,
    "uncertainty.predictive": ["probit", "ensemble"],
    "uncertainty.ood": ["noise"],
}


@pytest.fixture(scope="module")
def out(tmp_path_factory, empty_store):
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


@pytest.fixture(scope="module")
def ended(out):
    """A run with a final round."""
    return experiment.run(configure(SETTINGS | ENDING), out)


@pytest.fixture(scope="module")
def plain(out):
    """The same run without one."""
    return experiment.run(configure(SETTINGS), out)


def latest(result, out):
    from mlflow import MlflowClient

    from fl_lightning.runs.tracking.store import store_uri

    return MlflowClient(tracking_uri=store_uri(out)).get_run(result.run_id).data


def test_the_final_round_adds_numbers_to_the_last_round_and_changes_none(ended, plain):
    for with_one, without in zip(ended.history, plain.history, strict=True):
        same = {name: value for name, value in without.metrics.items() if not name.startswith("seconds")}
        assert {name: with_one.metrics[name] for name in same} == same
    assert not any("/" in name for name in ended.history[0].metrics)
    final = ended.final
    assert final["map/NLL"] == pytest.approx(final["NLL"], rel=1e-12)
    assert final["map/ECE"] == pytest.approx(final["ECE"], rel=1e-9)
    assert final["map/Brier"] == pytest.approx(final["Brier"], rel=1e-12)
    assert final["map/accuracy"] == final["GA"]
    assert {f"{kind}/AUROC/noise" for kind in ("map", "temperature", "probit", "ensemble")} <= final.keys()
    assert 0 < final["posterior/bytes_up"] < 1e6


def test_everything_is_in_mlflow_and_in_the_folder(ended, out):
    data = latest(ended, out)
    assert data.metrics["probit/NLL"] == ended.final["probit/NLL"]
    names = {path.name for path in ended.folder.iterdir()}
    assert {"posterior.safetensors", "uncertainty.npz", "uncertainty.png", "model.safetensors"} <= names
    stored = {path.name for path in (out / "artifacts" / ended.run_id / "artifacts").iterdir()}
    assert {"uncertainty.npz", "uncertainty.png", "model.safetensors"} <= stored


def test_settings_of_the_final_round_are_no_part_of_a_run_without_one():
    usual = configure(SETTINGS)
    assert not any(key.startswith("uncertainty") for key in usual.varied())
    assert identity(configure(SETTINGS | ENDING)) != identity(usual)


def test_the_posterior_is_saved_and_loaded(ended):
    posterior = posterior_of(ended)
    raw = configure(SETTINGS).source.load().test_x[:20]
    found = posterior.predict(raw)
    model = load_model(ended)
    torch.testing.assert_close(posterior.predict(raw, "map").probabilities, model(raw.double()).detach().softmax(1))
    assert found.probabilities.sum(1).tolist() == pytest.approx([1.0] * 20)
    assert posterior.prior_precision == ended.final["posterior/prior_precision"]
    made = posterior_of(ended, replace(configure(SETTINGS | ENDING).uncertainty))
    torch.testing.assert_close(made.predict(raw).probabilities, found.probabilities)
    again = posterior_of(ended.run_id, out=ended.folder.parent)
    assert torch.equal(again.predict(raw, "nn").probabilities, posterior.predict(raw, "nn").probabilities)
    assert torch.equal(again.predict(raw, "ensemble").spread, posterior.predict(raw, "ensemble").spread)


@pytest.mark.parametrize("form", ["diagonal", "kron", "last_layer", "full"])
def test_every_form_survives_the_disk(form, ended, tmp_path):
    posterior = posterior_of(ended, Uncertainty(form=form))
    path = posterior_file.save(posterior, tmp_path / "my.safetensors")
    again = posterior_file.load(path, load_model(ended))
    raw = configure(SETTINGS).source.load().test_x[:5]
    assert torch.equal(again.predict(raw).probabilities, posterior.predict(raw).probabilities)


def test_the_models_and_the_posterior_need_nothing_of_this_package(ended, tmp_path):
    """The snippet of docs/uncertainty.md, in a process that cannot import us."""
    script = """
import json, sys
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

sys.modules["fl_lightning"] = None
folder = sys.argv[1]
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)).double()
state = load_file(f"{folder}/model.safetensors")
model.load_state_dict({name.removeprefix("layers."): value for name, value in state.items()})
with safe_open(f"{folder}/posterior.safetensors", framework="pt") as posterior:
    about = json.loads(posterior.metadata()["about"])
    for place, block in enumerate(about["blocks"]):
        spectrum = posterior.get_tensor(f"block.{place}.spectrum")
        precision = spectrum * about["samples"] / about["temperature"] + about["prior_precision"]
        noise = torch.randn(precision.shape, dtype=torch.float64) / precision.sqrt()
        out_basis, in_basis = (posterior.get_tensor(f"block.{place}.{side}_basis") for side in ("out", "in"))
        offset = out_basis @ noise @ in_basis.T
        assert offset[:, :-1].shape == state[block["weight"]].shape
        assert offset[:, -1].shape == state[block["bias"]].shape
print(model(torch.zeros(1, 64).double()).sum().item())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(ended.folder)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = load_model(ended)(torch.zeros(1, 1, 8, 8).double()).sum().item()
    assert float(done.stdout) == pytest.approx(expected)


def test_the_command_adds_a_final_round_to_a_finished_run(plain, out, capsys):
    flags = ["--uncertainty.form", "diagonal", "--ood", "[noise,rotated]"]
    assert main(["uncertainty", plain.run_id[:8], "--runs", str(out), *flags]) == 0
    text, bar = capsys.readouterr()
    assert "probit" in text
    assert "rotated" in text
    assert "1/1" in bar.rpartition("final round:")[2]  # how the bar is left
    for entry in (one for one in TABLES if one.key in ("calibration", "detection")):
        assert entry.about in " ".join(text.split())  # the words of the report
    first = experiment.run(configure(SETTINGS), out)
    assert first.reused
    assert first.final["probit/AUROC/rotated"] == latest(first, out).metrics["probit/AUROC/rotated"]
    # Again, with other settings: the latest numbers count, whether larger or smaller, and the others are gone.
    for prior in (1e-4, 1e4):
        result = measure_posterior(plain.folder, Uncertainty(form="diagonal", prior_precision=prior, ood=()))
        assert latest(result, out).metrics["probit/NLL"] == result.final["probit/NLL"]
        assert latest(result, out).metrics["posterior/prior_precision"] == prior
    assert math.isnan(latest(result, out).metrics["probit/AUROC/rotated"])
    assert latest(result, out).metrics["GA"] == plain.final["GA"]


def test_a_run_of_more_rounds_goes_on_from_one_that_has_ended(ended, out):
    longer = experiment.run(configure(SETTINGS | ENDING | {"federation.rounds": 3}), out)
    whole = experiment.run(configure(SETTINGS | ENDING | {"federation.rounds": 3}), out, fresh=True)
    assert [set(m.metrics) for m in longer.history] == [set(m.metrics) for m in whole.history]
    assert longer.final["probit/NLL"] == whole.final["probit/NLL"]
    shorter = experiment.run(configure(SETTINGS | ENDING | {"federation.rounds": 1}), out)
    assert "probit/NLL" in shorter.final


def test_classes_that_nobody_has():
    labels = torch.arange(10).repeat(20)
    split = Split(clients=4, partition="iid", drop_classes=(3, 7), holdout=0.1, validation=0.1)
    parts = [*partition(labels, split, 0), held_out(labels, split, 0), validating(labels, split, 0)]
    assert sorted(torch.cat(parts).tolist()) == [i for i, y in enumerate(labels.tolist()) if y not in (3, 7)]
    config = configure(
        SETTINGS | {"data.drop_classes": [9], "uncertainty.final_round": True, "uncertainty.ood": ["dropped_classes"]}
    )
    problem = problem_of(config)
    assert 9 not in problem.dataset.test_y.tolist()
    assert 9 not in problem.dataset.train_y[torch.cat(list(problem.clients))].tolist()
    with pytest.raises(UserError, match=r"drop_classes must name classes of the data, 0 to 9, got \[12\]"):
        partition(labels, Split(drop_classes=(12,)), 0)
    with pytest.raises(UserError, match="must leave at least two classes"):
        partition(labels, Split(drop_classes=tuple(range(9))), 0)


def test_dropped_classes_are_strange(out):
    config = configure(
        SETTINGS | {"data.drop_classes": [9], "uncertainty.final_round": True, "uncertainty.ood": ["dropped_classes"]}
    )
    assert 0 <= experiment.run(config, out).final["probit/AUROC/dropped_classes"] <= 1


def test_own_inputs_are_strange(out, tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((5, 1, 8, 8), np.float32))
    config = configure(SETTINGS | {"uncertainty.final_round": True, "uncertainty.ood": [str(path)]})
    assert "probit/AUROC/mine" in experiment.run(config, out).final


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"uncertainty.ood": ["cifar11"]}, "unknown dataset 'cifar11'"),
        ({"uncertainty.ood": ["dropped_classes"]}, "needs classes that no client has"),
        ({"uncertainty.ood": ["no.npz"]}, "cannot read the inputs no.npz"),
        ({"data.validation": 0, "uncertainty.prior_precision": "holdout"}, "needs data that no client trains on"),
        ({"uncertainty.prior_precision": -1}, "must be a finite number >= 0"),
        ({"uncertainty.temperature": 0}, "temperature must be finite and > 0"),
        ({"uncertainty.slopes": "empirical", "uncertainty.form": "full"}, "goes with the forms diagonal and kron"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(settings, message):
    with pytest.raises(UserError, match=message) as caught:
        experiment.check(configure(SETTINGS | {"uncertainty.final_round": True} | settings))
    assert "\n" not in str(caught.value)


def test_inputs_of_another_shape_are_refused(tmp_path):
    path = tmp_path / "large.npy"
    np.save(path, np.zeros((5, 1, 9, 9), np.float32))
    with pytest.raises(UserError, match=r"inputs of shape \(1, 9, 9\), which cannot be made \(1, 8, 8\) by padding"):
        experiment.check(configure(SETTINGS | {"uncertainty.final_round": True, "uncertainty.ood": [str(path)]}))


def test_runs_that_are_not_there_and_files_that_are_damaged(ended, out, tmp_path, capsys):
    for run, message in (
        (str(tmp_path / "nowhere"), "there is no such folder"),
        ("0123456789abcdef", "no run has it"),
    ):
        assert main(["uncertainty", run, "--runs", str(out)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    with pytest.raises(UserError, match="expected a saved posterior"):
        posterior_file.load(tmp_path / "none.safetensors", load_model(ended))
    content = bytearray((ended.folder / posterior_file.FILE).read_bytes())
    content[-9] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        posterior_file.load(tmp_path / "damaged.safetensors", load_model(ended))
    with pytest.raises(UserError, match="is the posterior of another model"):
        posterior_file.load(ended.folder / posterior_file.FILE, torch.nn.Linear(2, 2))


def test_a_run_without_its_models_is_told_apart(out):
    config = configure(SETTINGS | {"seed": 5})
    result = experiment.complete(config, out, RunOptions(checkpoint=False))
    with pytest.raises(UserError, match="has ended without keeping its checkpoint"):
        posterior_of(result)
    kept = experiment.complete(config, out, RunOptions(checkpoint=False, model=True, fresh=True))
    with pytest.raises(UserError, match="needs the clients' models of the last round"):
        measure_posterior(kept, Uncertainty(predictive=("ensemble",)))
    assert posterior_of(kept).samples == sum(map(len, problem_of(config).clients))
