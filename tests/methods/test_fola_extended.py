"""The two classes of FOLA: equal bits where both apply, one identity, and old settings that name the extended one."""

import itertools
from pathlib import Path

import pytest
import torch

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.methods.presets import FolaCode
from fl_lightning.runs.config.aliases import SettingAdvice
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.folder import folder_of
from fl_lightning.runs.identity import identity, version_of
from fl_lightning.system import trees
from tests.support.cases import equal_bits, ragged

PAPER = {
    "aggregation": ("product", "average"),
    "strength": (0.0, 20.0),
    "curvature": ("online", "offline"),
    "fisher": ("minibatch", "per_sample"),
    "curvature_form": ("diagonal", "full", "e_full"),
    "eigen_order": ("ascending", "rank_matched"),
}
SETTINGS = [dict(zip(PAPER, values, strict=True)) for values in itertools.product(*PAPER.values())]
SITUATION = {"fraction": 0.75, "straggler_fraction": 0.5, "epochs": 3, "momentum": 0.5, "rounds": 3}


def outcome(method, engine, changes):
    """States and metrics of a run, or why it is refused."""
    case = ragged().changed(**changes)
    try:
        records = case.run(method, engine)
    except UserError as refusal:
        return str(refusal)
    leaves = trees.leaves([record.after.state for record in records])
    tensors = {str(number): torch.as_tensor(leaf) for number, leaf in enumerate(leaves)}
    numbers = [method.diagnose(r.before.state, r.cohort, r.reports, r.after.state) for r in records]
    return tensors, numbers


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_both_classes_give_equal_bits(settings):
    mine, theirs = (outcome(cls(**settings), Functional(chunk=1), SITUATION) for cls in (Fola, FolaExtended))
    if isinstance(theirs, str):
        assert isinstance(mine, str)  # it names fewer forms
        return
    assert equal_bits(mine[0], theirs[0])
    assert mine[1] == theirs[1]


@pytest.mark.parametrize("engine", [Functional(chunk=4), Lightning()], ids=["vmap", "lightning"])
@pytest.mark.parametrize("changes", [{}, SITUATION, {"optimiser": "adam", "lr": 0.01}, {"clip_norm": 0.1}], ids=str)
def test_both_classes_give_equal_bits_on_every_engine(engine, changes):
    mine, theirs = (outcome(cls(strength=20.0), engine, changes) for cls in (Fola, FolaExtended))
    assert equal_bits(mine[0], theirs[0])
    assert mine[1] == theirs[1]


def test_both_are_recorded_under_one_name_and_version():
    plain, extended = configure({"method": "fola"}), configure({"method": "fola_extended"})
    assert (plain.names["method"], extended.names["method"]) == ("fola", "fola_extended")
    assert identity(plain) == identity(extended)
    assert folder_of(plain, Path()) == folder_of(extended, Path())
    assert version_of(Fola) == version_of(FolaExtended) == version_of(FolaCode)


def test_a_preset_is_recorded_with_what_it_changes():
    switches = ("damping", "damping_mode", "damping_place", "normalisation", "round_scaling", "detached_prior")
    spelled = {f"method.{name}": getattr(FolaCode(), name) for name in switches}
    assert identity(configure({"method": "fola_code"})) == identity(configure({"method": "fola_extended", **spelled}))
    assert configure({"method": "fola_code"}).recorded()["method.detached_prior"] is True
    assert identity(configure({"method": "regmean"})) != identity(configure({"method": "fola_extended"}))


def test_a_setting_of_the_extended_method_makes_it_that():
    with pytest.warns(SettingAdvice, match=r"method.cavity is a setting of fola_extended.*write --method"):
        config = configure({"method": "fola", "method.cavity": "true"})
    assert config.method == FolaExtended(cavity=True)
    with pytest.warns(SettingAdvice, match=r"method.curvature_form is a setting of fola_extended"):
        assert configure({"method.curvature_form": "inputs"}).method == FolaExtended(curvature_form="inputs")


def test_settings_of_the_extended_method_at_their_defaults_change_nothing():
    """As older configuration files have them, which name all settings."""
    old = configure({"method": "fola_extended"}).flat() | {"method": "fola"}
    assert configure(old) == configure({"method": "fola"})


def test_a_value_that_neither_knows_is_refused():
    with pytest.raises(UserError, match=r"method.curvature_form must be"):
        configure({"method.curvature_form": "cubic"})
