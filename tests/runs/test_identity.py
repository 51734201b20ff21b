"""By what a run is known: settings that matter, and the versions of the code."""

import copy
import dataclasses
import inspect
import json
from pathlib import Path
from zipfile import ZipFile

import pytest
from mlflow import MlflowClient

from fl_lightning import discovery, experiment
from fl_lightning.__main__ import main
from fl_lightning.data.dataset import Source
from fl_lightning.data.partition import Split
from fl_lightning.data.readers import fingerprint
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.models.tuning import Tuning
from fl_lightning.runs import checkpoint, start_weights
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


def settings_of(cls):
    """The settings of a part or section, by discovery: whatever its constructor takes and has a default for."""
    hidden = getattr(cls, "python_only", ())
    arguments = inspect.signature(cls).parameters.values()
    return [one.name for one in arguments if one.default is not one.empty and one.name not in hidden]


def another(value):
    """Another value; whether it can be run with is no matter here."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else (7,) if isinstance(value, tuple) else "another"


def with_another(config, field, name):
    """The configuration with another value of one setting, past what the part itself refuses."""
    field, _, inner = field.partition(".")
    part = copy.copy(getattr(config, field))
    if inner:
        part = with_another(part, inner, name)
    elif field == "model":
        part = dataclasses.replace(part, options={**part.options, name: another(part.options[name])})
    else:
        object.__setattr__(part, name, another(getattr(part, name)))
    return dataclasses.replace(config, **{field: part})


def identities_by_setting(config, field, cls):
    """The identity of a configuration, and what becomes of it with another value of each setting."""
    found = {name: identity(with_another(config, field, name)) for name in settings_of(cls) if name != "root"}
    return {"": identity(config), **found}


def require_distinct(found):
    twins = {key: [other for other in found if other != key and found[other] == found[key]] for key in found}
    assert {key: others for key, others in twins.items() if others} == {}


@pytest.fixture
def _nothing_is_read(monkeypatch):
    """Settings that name a file or a run count with their name, not with what is there."""
    monkeypatch.setattr(checkpoint, "identity_of", str)
    monkeypatch.setattr(fingerprint, "of_files", str)
    monkeypatch.setattr(start_weights, "content", lambda setting, _: setting)
    for cls in (Source, *discovery.discover("data").values()):
        monkeypatch.setattr(cls, "fingerprint", lambda self: None)
        monkeypatch.setattr(cls, "__post_init__", lambda self: None, raising=False)  # which asks for a path


@pytest.mark.usefixtures("_nothing_is_read")
@pytest.mark.parametrize("key", schema.PARTS)
def test_every_setting_of_every_part_changes_the_identity(key):
    kind, *_ = schema.PARTS[key]
    bare = {"method": "fedavg", "model": "softmax", "engine": "functional"}
    starts = {name: configure({**bare, key: name}) for name in discovery.names(kind)}
    for name, start in starts.items():
        require_distinct(identities_by_setting(start, "source" if key == "data" else key, discovery.find(kind, name)))
    # FOLA with all its settings is FOLA, where none of them is set.
    require_distinct({name: identity(start) for name, start in starts.items() if name != "fola_extended"})


@pytest.mark.usefixtures("_nothing_is_read")
@pytest.mark.parametrize("section", ["split", "model.tuning", *schema.SECTIONS])
def test_every_setting_of_every_section_changes_the_identity(section):
    known = {"split": Split, "model.tuning": Tuning, **schema.SECTIONS}
    found = identities_by_setting(config(), section, known[section])
    require_distinct({**found, "seed": identity(config(seed=1))})


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
