"""Presets: methods that are another one with other defaults, found and known like any method."""

import ast
import dataclasses
import inspect
import sys

import pytest

from fl_lightning import discovery
from fl_lightning.methods.fedopt import FedOpt
from fl_lightning.methods.presets import FedAdam
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.config.schema import fields_of
from fl_lightning.runs.identity import identity, version_of
from tests.support.cases import equal_bits, final, ragged
from tests.support.variants import method_of

NAMED = [name for name in discovery.names("methods") if discovery.made_of("methods", name)]


def test_there_are_some():
    assert {"fedavgm", "fedadagrad", "fedadam", "fedyogi"} <= set(NAMED)
    assert discovery.made_of("methods", "fedavgm") == "fedopt+optimiser=sgd+server_lr=1"
    assert discovery.made_of("methods", "fedopt") == ""


@pytest.mark.parametrize("name", NAMED)
def test_it_changes_defaults_and_nothing_else(name):
    """A hook of its own would make it a method of its own."""
    (node,) = ast.parse(inspect.getsource(discovery.find("methods", name))).body
    text, *lines = node.body
    assert isinstance(text, ast.Expr)
    assert all(isinstance(line, ast.AnnAssign) for line in lines)
    mine = discovery.find("methods", name)
    above = discovery.inherited(mine)
    assert list(fields_of(mine)) == list(fields_of(above))


@pytest.mark.parametrize("name", NAMED)
def test_it_is_to_the_bit_what_it_says_it_is_made_of(name):
    named, made_of = discovery.find("methods", name)(), method_of(discovery.made_of("methods", name))
    assert dataclasses.asdict(named) == dataclasses.asdict(made_of)
    assert type(made_of) is discovery.inherited(type(named))
    case = ragged().changed(fraction=0.5, rounds=2)
    assert equal_bits(final(case.run(named)), final(case.run(made_of)))


@pytest.mark.parametrize("name", NAMED)
def test_its_version_moves_with_that_of_what_it_is_made_of(name, monkeypatch):
    mine = discovery.find("methods", name)
    config = configure({"method": name})
    known = identity(config)
    assert version_of(mine) == version_of(discovery.inherited(mine)) or "version" in vars(mine)
    monkeypatch.setattr(discovery.inherited(mine), "version", 99)
    assert str(version_of(mine)).startswith("99")
    assert identity(config) != known


def test_a_changed_default_has_a_version_of_its_own(monkeypatch):
    monkeypatch.setattr(FedAdam, "version", 2, raising=False)
    assert (version_of(FedAdam), version_of(FedOpt)) == (f"{FedOpt.version}.2", FedOpt.version)


def test_a_named_setting_of_a_plug_in_moves_with_what_it_is_made_of(tmp_path, monkeypatch):
    text = "from dataclasses import dataclass\nfrom fl_lightning.methods.fedopt import FedOpt\n\n\n"
    text += "@dataclass(frozen=True)\nclass Mine(FedOpt):\n    '''Mine.'''\n\n    server_lr: float = 0.5\n"
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.setenv(discovery.PLUGINS, str(tmp_path))
    try:
        mine = discovery.find("methods", "mine")
        assert configure({"method": "mine"}).method.server_lr == 0.5
        assert discovery.made_of("methods", "mine") == "fedopt+server_lr=0.5"
        assert version_of(mine) == f"{FedOpt.version}.{discovery.plugin_hash(mine)}"
    finally:
        sys.modules.pop(f"{discovery.PLUGIN_PACKAGE}.mine", None)


@pytest.mark.parametrize("name", NAMED)
def test_list_and_help_say_what_it_is_made_of(name, capsys):
    from fl_lightning.__main__ import main

    made_of = discovery.made_of("methods", name)
    main(["list", "methods"])
    assert f"Made of {made_of}." in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["run", "--method", name, "--help"]))
    assert not ended.value.code
    assert f"Made of {made_of}." in capsys.readouterr().out
