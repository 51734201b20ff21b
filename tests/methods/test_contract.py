"""What every method must do, over all methods that are discovered: a new one is tested by existing.

The promises are those of `fl_lightning.testing`, which authors of plugins run, too.
"""

import dataclasses

import pytest

from fl_lightning import discovery
from fl_lightning.curvature.forms import FORMS as FORMS_THERE
from fl_lightning.errors import UserError
from fl_lightning.methods.ep import EP
from fl_lightning.methods.fola import Fola
from fl_lightning.testing import method_checks
from tests.cases import equal_bits, final, ragged

# A precision that is not a Fisher's, or that of single samples, wants a weaker prior than the default's.
FORMS = {f"fola with {form}": Fola(curvature_form=form, strength=0.1) for form in FORMS_THERE if form != "diagonal"}
# Options that act together, or that make another method of one.
VARIANTS = {
    "fola with cavity": Fola(cavity=True),
    "fola with cavity, inputs, trust and backtracking": Fola(
        cavity=True, curvature_form="inputs", strength=0.1, trust=1.0, backtracking=True
    ),
    "ep with vi": EP(inference="vi"),
}
METHODS = sorted(discovery.discover("methods"))
# A server that learns by itself, from what clients draw at random or from a prior moves even when clients do not; so
# does FedLPA's, whose own solver reproduces identical clients only where their factors are alike.
AT_REST = {
    "fedbe": {"server_epochs": 0},
    "fedlpa": {"solver": "cg"},
    "fedsparse": {"gates": "mean"},
    "pfnm": {"sigma0": 1e15},
    "fedma": {"sigma0": 1e15, "gamma": 1e-6},
}


def marks(check):
    """Engines are compared many times, on the same lines: `make quick` does it once for every method."""
    again = check.name.startswith("engines agree: ") and check.name != "engines agree: chunks of 3, plain"
    return [pytest.mark.slow] if again else []


def promises():
    for name in METHODS:
        method = discovery.find("methods", name)()
        at_rest = dataclasses.replace(method, **AT_REST.get(name, {}))
        for check in method_checks(method, at_rest):
            yield pytest.param(check, id=f"{name}: {check}", marks=marks(check))


def promises_of_variants():
    """All promises but those that engines make for every choice of every setting."""
    for name, method in (FORMS | VARIANTS).items():
        for check in method_checks(method):
            engines = "engines agree" in check.name
            if not engines or check.name.endswith((", plain", ", partial cohorts")):
                yield pytest.param(check, id=f"{name}: {check}", marks=marks(check))


@pytest.mark.parametrize("check", [*promises(), *promises_of_variants()])
def test_a_method_keeps_its_promises(check):
    try:
        check.run()
    except UserError as refusal:  # a method may refuse what does not suit it, in one clear line
        if "\n" in str(refusal):
            raise
        pytest.skip(f"refused: {refusal}")


@pytest.mark.slow
def test_no_method_leaves_anything_behind_for_another():
    """Forwards and backwards: between the two runs of each, every other one has run."""
    case = ragged().changed(rounds=1)
    first = {}
    for name in [*METHODS, *reversed(METHODS)]:
        try:
            params = final(case.run(discovery.find("methods", name)()))
        except UserError:
            continue
        assert equal_bits(first.setdefault(name, params), params), f"another method changes the numbers of {name}"
    assert len(first) > 1
