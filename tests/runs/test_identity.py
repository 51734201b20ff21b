"""By what a run is known: settings that matter, and the versions of the code."""

import dataclasses
import json
from pathlib import Path
from zipfile import ZipFile

import pytest
from mlflow import MlflowClient

from fl_lightning import experiment
from fl_lightning.__main__ import main
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config import schema
from fl_lightning.runs.config.run_config import configure, read_yaml
from fl_lightning.runs.config.schema import Field, fields_of
from fl_lightning.runs.identity import identity, settings_hash, trajectory, versions
from fl_lightning.runs.tracking.store import store_uri
from fl_lightning.training import Training
from tests.golden import identities

SETTINGS = {"method": "fedavg", "model": "softmax", "data.subset": 0.1, "federation.rounds": 2, "engine": "functional"}


def config(**changes):
    return configure({**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}})


def test_a_raised_version_makes_another_run_of_the_same_settings(monkeypatch):
    before = identity(config()), settings_hash(config()), trajectory(config())
    monkeypatch.setattr(FedAvg, "version", 2)
    assert identity(config()) != before[0]
    assert settings_hash(config()) == before[1]
    assert trajectory(config()) != before[2]
    assert versions(config())["method"] == 2
    assert identity(config(method="fedprox")) == identity(config(method="fedprox"))


def test_the_version_of_one_method_says_nothing_about_another(monkeypatch):
    before = identity(config(method="fedprox"))
    monkeypatch.setattr(FedAvg, "version", 2)
    assert identity(config(method="fedprox")) == before
    monkeypatch.setattr("fl_lightning.runs.identity.LOOP_VERSION", 2)
    assert identity(config(method="fedprox")) != before


def test_the_version_of_a_choice_says_nothing_about_runs_without_it(monkeypatch):
    chosen = {"method": "fola_extended", "method__curvature_form": "kron", "method__projection": "nearest"}
    before = identity(config(method="fola")), identity(config(**chosen))
    monkeypatch.setattr(FolaExtended, "revised", {"projection=nearest": 3})
    assert identity(config(method="fola")) == before[0]
    assert identity(config(**chosen)) != before[1]


def test_a_new_setting_with_its_default_orphans_nobody(monkeypatch):
    """What a later version adds: here a field of the training settings that today's runs do not know."""
    before = identity(config()), identity(config(training__lr=0.5))

    @dataclasses.dataclass(frozen=True)
    class Later(Training):
        nesterov: bool = False

    monkeypatch.setitem(schema.SECTIONS, "training", Later)
    assert isinstance(fields_of(Later)["nesterov"], Field)
    assert (identity(config()), identity(config(training__lr=0.5))) == before
    assert identity(config(training__nesterov=True)) not in before


def test_more_rounds_are_the_same_trajectory():
    assert trajectory(config(federation__rounds=1)) == trajectory(config(federation__rounds=30))
    assert identity(config(federation__rounds=1)) != identity(config(federation__rounds=30))


@pytest.mark.slow
def test_a_run_of_another_version_is_found_said_and_computed_again(out, monkeypatch):
    old = experiment.run(config(), out)
    assert run_folder.of_other_versions([config()], out) == {}
    monkeypatch.setattr(FedAvg, "version", 2)
    name = run_folder.folder_of(config(), out).name
    assert run_folder.of_other_versions([config(), config(seed=1)], out) == {name: [old.folder]}
    new = experiment.run(config(), out)
    assert not new.reused
    assert new.folder != old.folder
    assert old.folder.exists()
    assert new.run_id != old.run_id


@pytest.mark.slow
def test_a_run_records_what_made_it(out):
    result = experiment.run(config(), out)
    tags = MlflowClient(store_uri(out)).get_run(result.run_id).data.tags
    assert json.loads(tags["versions"]) == versions(config())
    assert tags["settings"] == settings_hash(config())
    assert tags["package"].startswith("fl_lightning ")
    assert tags["torch"]
    assert tags["device"]
    assert len(tags["mlflow.source.git.commit"]) == 40


@pytest.mark.parametrize("key", ["method", "data", "model", "engine", "loop", "partition", "augmentation"])
def test_every_part_has_a_version(key):
    assert versions(config())[key] == 1


@pytest.mark.slow
def test_the_command_says_that_another_version_had_finished_the_run(out, monkeypatch, capsys):
    flags = [f"--{key}={value}" for key, value in SETTINGS.items()]
    assert main(["run", *flags, "--runs", str(out)]) == 0
    assert "another version" not in capsys.readouterr().out
    monkeypatch.setattr(FedAvg, "version", 2)
    assert main(["run", *flags, "--runs", str(out)]) == 0
    said = capsys.readouterr().out
    assert (
        "this run is also there from another version of the code (method version 1, now 2), which is not used" in said
    )
    assert "had finished before" not in said


ARCHIVES = sorted((Path(__file__).parents[2] / "docs" / "runs").glob("*.zip"))


@pytest.mark.filterwarnings("ignore::fl_lightning.runs.config.aliases.SettingAdvice")
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.stem)
def test_every_archived_run_is_found_under_its_name(archive, tmp_path):
    with ZipFile(archive) as packed:
        for entry in (name for name in packed.namelist() if name.endswith("config.yaml")):
            settings = configure(read_yaml(packed.extract(entry, tmp_path)))
            assert run_folder.folder_of(settings, tmp_path).name == Path(entry).parent.name


@pytest.mark.slow
def test_the_runs_of_every_study_are_found_under_their_names():
    assert identities.of_studies() == json.loads(identities.FILE.read_text())
