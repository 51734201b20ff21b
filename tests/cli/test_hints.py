"""What a user is told: names that other programs use, commands that work as printed, advice of a method."""

import shutil
import subprocess
import sys

import pytest
import torch

from fl_lightning.cli import hints
from fl_lightning.cli.flags import flags_to_settings
from fl_lightning.cli.progress import Progress
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcurv import FedCurv
from fl_lightning.methods.fola import Fola
from fl_lightning.metrics.metric import Measurement
from fl_lightning.penalty import overshoot_warning
from fl_lightning.runs.config.aliases import USUAL
from fl_lightning.runs.config.run_config import configure
from fl_lightning.system import activity

pytestmark = pytest.mark.system


def refused(*flags):
    with pytest.raises(UserError) as caught:
        configure(flags_to_settings(flags))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr", "training.lr"),
        ("learning_rate", "training.lr"),
        ("training.learning_rate", "training.lr"),
        ("learning-rate", "training.lr"),
        ("E", "training.epochs"),
        ("epochs", "training.epochs"),
        ("B", "training.batch_size"),
        ("batch", "training.batch_size"),
        ("batch-size", "training.batch_size"),
        ("alpha", "data.alpha"),
        ("N", "data.clients"),
        ("clients", "data.clients"),
        ("federation.clients", "data.clients"),
        ("lambda", "method.strength"),
        ("gamma", "method.damping"),
        ("rounds", "federation.rounds"),
        ("R", "federation.rounds"),
        ("device", "compute.device"),
        ("dataset", "data"),
    ],
)
def test_usual_names_lead_to_the_setting(given, meant):
    assert f"unknown setting {given!r}: did you mean {meant!r}?" in refused(f"--{given}", "1")


def test_every_usual_name_leads_to_a_setting_of_fola():
    known = configure({"method": "fola"}).flat()
    assert set(USUAL.values()) <= known.keys()
    assert not USUAL.keys() & known.keys()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "fedavg", "--method.strength", "1"], "the method fedavg does not have it, fedcurv, "),
        (["--method", "fedavg", "--lambda", "1"], "(method.strength here): the method fedavg does not have it"),
        (["--method", "fola", "--mu", "1"], "(method.mu here): the method fola does not have it, fednova, fedprox do"),
        (["--data", "digits", "--data.path", "x"], "the data digits does not have it, arrays, "),
    ],
)
def test_a_setting_of_another_part_names_its_owners(flags, message):
    assert message in refused(*flags)


def test_an_object_in_place_of_a_name_says_where_objects_go():
    with pytest.raises(UserError, match=r"model must be a name.*type Linear.*`federate`"):
        configure({"model": torch.nn.Linear(2, 2)})


def measurement(**metrics):
    return Measurement({"GA": 0.5, "LA": 0.4, **metrics}, {})


def test_a_measurement_is_read_by_the_name_of_a_metric():
    found = measurement(NLL=1.0)
    assert (found["GA"], found["NLL"]) == (0.5, 1.0)
    assert found[0] == found.metrics
    assert tuple(found) == (found.metrics, found.clients)
    with pytest.raises(UserError, match="unknown metric 'GAA': did you mean 'GA'"):
        found["GAA"]


@pytest.mark.parametrize("method", [Fola(), FedCurv()])
def test_methods_with_a_stiff_penalty_advise_on_it(method):
    advice = method.traits.overshoot_advice
    assert overshoot_warning(advice, {"prior_stability": 0.9}) == ""
    assert "is 1.5; above 1" in overshoot_warning(advice, {"prior_stability": 1.5})
    assert overshoot_warning(FedAvg().traits.overshoot_advice, {"prior_stability": 1.5}) == ""


def test_the_bar_shows_whatever_the_method_says_once(capsys):
    with Progress(3, "mine", advice=lambda metrics: f"NLL is {metrics['NLL']:g}" * (metrics["NLL"] > 1)) as bar:
        for number, nll in enumerate([0.5, 2, 3], start=1):
            activity.say("training")
            bar.show(number, measurement(NLL=nll))
    text = capsys.readouterr().err
    assert text.count("warning") == 1
    assert "warning: after round 2: NLL is 2" in text


def test_the_bar_starts_at_zero_and_tells_of_resuming(capsys):
    with Progress(3, "mine") as bar:
        activity.say("0 of 4 clients trained")
        bar.show(1, measurement())
    text = capsys.readouterr().err
    assert "0/3" in text
    assert "going on" not in text
    with Progress(3, "mine") as bar:
        bar.show(1, measurement())
        bar.show(2, measurement())
        activity.say("0 of 4 clients trained")
        bar.show(3, measurement())
    text = capsys.readouterr().err
    assert "mine: going on after round 2" in text
    assert "2/3" in text
    assert "0/3" not in text


def test_what_is_waited_for_before_the_first_round_starts_no_bar(capsys):
    with Progress(3, "mine") as bar:
        activity.wait("starting Ray on this machine")
        assert bar._bar is None  # its rate would count the seconds that Ray takes
        activity.say("0 of 4 clients trained")
        assert bar._bar is not None
        activity.wait("waiting for a worker to start")
    assert "0/3" in capsys.readouterr().err


def test_a_finished_run_shows_no_bar_and_a_quiet_one_nothing(capsys):
    with Progress(2, "mine") as bar:
        bar.show(1, measurement())
    with Progress(2, "mine", quiet=True) as bar:
        activity.say("training")
        bar.show(1, measurement())
    assert capsys.readouterr().err == ""


def test_what_to_look_at_works_as_it_is_printed(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(f"{hints.command('--version')}", shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fl_lightning ")
    assert hints.look(tmp_path / "my runs") == f"{hints.program()} ui --runs 'my runs'"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert hints.look(tmp_path) == "http://tracking:5000"


def test_the_program_is_called_by_its_name_only_where_the_shell_finds_it(tmp_path, monkeypatch):
    script = tmp_path / ".venv" / "bin" / "fl-lightning"
    script.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert hints.program() == ".venv/bin/python -m fl_lightning"
    script.touch()
    assert hints.program() == ".venv/bin/fl-lightning"
    monkeypatch.setattr(shutil, "which", lambda name: str(script))
    assert hints.program() == "fl-lightning"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/fl-lightning")
    assert hints.program() == str(script)


@pytest.mark.parametrize("given", ["stop.patience", "out", "workers", "fresh"])
def test_what_is_said_beside_the_settings_is_said_to_be(given):
    with pytest.raises(UserError, match=rf"unknown setting '{given}': it is said beside the settings, as an argument"):
        configure({given: 2})
