"""Expectation propagation: its presets, what it logs and advises, and what it refuses."""

import pytest
import torch

from fl_lightning.errors import UserError
from fl_lightning.methods.ep import EP
from fl_lightning.methods.presets import PVI, FedEP, FedLapCov, FedSEP, Virtual
from fl_lightning.params import flatten
from fl_lightning.runs.config.run_config import configure
from tests.support.cases import equal_bits, final, ragged


def test_diagnostics():
    case, method = ragged(), EP(prior=0.5)
    first, second = case.run(method, rounds=2)
    numbers = [method.diagnose(r.before.state, r.cohort, r.reports, r.after.state) for r in (first, second)]
    assert numbers[0]["stiffness"] == pytest.approx([0.1 * 0.5 / m for m in (20, 7, 33, 1)])
    before = second.before.state
    expected = [
        0.1 * float((flatten(before.precision) - flatten(before.factors[n].precision)).max()) / len(case.clients[n])
        for n in second.cohort.members
    ]
    assert numbers[1]["stiffness"] == pytest.approx(expected, rel=1e-12)
    assert numbers[1]["prior_stability"] == max(numbers[1]["stiffness"])
    assert numbers[1]["cavity_clips"] == [0.0] * 4
    assert numbers[1]["precision_mean"] == pytest.approx(float(flatten(second.after.state.precision).mean()))


def test_advice_where_a_step_overshoots():
    assert "--method.prior_step implicit" in EP(prior_step="explicit").traits.overshoot_advice
    for quiet in (EP(), EP(prior_step="explicit", inference="vi")):
        assert quiet.traits.overshoot_advice == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"damping": 0.0},
        {"damping": 1.5},
        {"prior": -1.0},
        {"temperature": 0.0},
        {"scale": 0.0},
        {"floor": -1.0},
        {"shrinkage": -1.0},
        {"burn_in": -1},
        {"curvature_start": 0.0},
        {"gradient_decay": 1.0},
        {"curvature_decay": 1.5},
    ],
    ids=str,
)
def test_refuses_impossible_settings(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(UserError, match=rf"method\.{name} must .*, got {value}"):
        EP(**wrong)


def test_refuses_what_does_not_go_together():
    case = ragged()
    with pytest.raises(UserError, match=r"burn_in must be less than training.epochs, which is 2, got 2"):
        case.run(EP(inference="samples", burn_in=2))
    with pytest.raises(UserError, match=r"expected training.momentum 0, got 0.9"):
        case.run(EP(inference="vi"), momentum=0.9)
    normed = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()
    with pytest.raises(UserError, match=r"method.inference laplace needs a model whose samples"):
        case._replace(model=normed, clients=[case.clients[0]]).run(EP())
    case._replace(model=normed, clients=[case.clients[0]]).run(EP(inference="identity"), rounds=1)


def test_settings_from_the_command_line():
    method = configure(
        {"method": "ep", "method.inference": "vi", "method.memory": "sep", "method.damping": "0.1"}
    ).method
    assert method == EP(inference="vi", memory="sep", damping=0.1)
    with pytest.raises(UserError, match="one of ep, sep, adf, got pep"):
        configure({"method": "ep", "method.memory": "pep"})


NAMED = {
    FedEP(): EP(inference="identity"),
    FedSEP(): EP(memory="sep"),
    FedLapCov(): EP(curvature="end"),
    PVI(): EP(inference="vi", temperature=0.1),
    Virtual(): EP(inference="vi", temperature=0.1, prior=1.0),
}


@pytest.mark.parametrize(("named", "made_of"), NAMED.items(), ids=[type(method).__name__ for method in NAMED])
def test_a_named_setting_is_what_it_is_made_of(named, made_of):
    case = ragged().changed(fraction=0.5)
    assert equal_bits(final(case.run(named)), final(case.run(made_of)))
