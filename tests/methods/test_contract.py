"""What every method must do, over all methods that are discovered: a new one is tested by existing.

The promises are those of `fl_lightning.testing`, which authors of plugins run, too. A session draws one setting of each
method (`--choice-seed`); `make exhaustive` tries them all.
"""

import dataclasses
import random

import pytest

from fl_lightning import discovery
from fl_lightning.errors import UserError
from fl_lightning.methods.ep import EP
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.methods.parts.forms_by_name import FORMS as FORMS_THERE
from fl_lightning.testing import method_checks
from tests.support.cases import equal_bits, final, ragged

# A precision that is not a Fisher's, or that of single samples, wants a weaker prior than the default's.
FORMS = {
    f"fola with {form}": FolaExtended(curvature_form=form, strength=0.1) for form in FORMS_THERE if form != "diagonal"
}
# Options that act together, or that make another method of one.
VARIANTS = {
    "fola with cavity": FolaExtended(cavity=True),
    "fola with cavity, inputs, trust and backtracking": FolaExtended(
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
    "fola_code": {"damping": 0.0},
    "pfnm": {"sigma0": 1e15},
    "fedma": {"sigma0": 1e15, "gamma": 1e-6},
}
# A preset that emulates the published code breaks what that code breaks: its prior loss has no gradient.
EMULATES = {("fola_code", "penalties are differentiated correctly")}


# What a preset could break by its defaults alone. All other promises are of hooks, which it has from another method.
OF_DEFAULTS = ("accepted", "explained", "going on", "traffic", "measured", "learning rate 0", "differentiated")
DRAWN_VARIANTS = 2


def checks_of(name):
    """All checks of a method by its name."""
    method = discovery.find("methods", name)()
    at_rest = dataclasses.replace(method, **AT_REST.get(name, {}))
    return [check for check in method_checks(method, at_rest) if (name, check.name) not in EMULATES]


def setting_of(check):
    """The setting in which a check compares engines; None for the other checks."""
    engines, _, setting = check.name.partition(", ")
    return setting if engines.startswith("engines agree: ") else None


def drawn(name, draw):
    """The plain form and one other setting on every engine, and all promises that need no engine."""
    checks = checks_of(name)
    chosen = ("plain", draw.choice(sorted({setting_of(check) for check in checks} - {None, "plain"})))
    is_preset = discovery.inherited(discovery.find("methods", name)) is not None
    for check in checks:
        setting = setting_of(check)
        is_seen = not is_preset or any(word in check.name for word in OF_DEFAULTS)
        if setting in chosen or (setting is None and is_seen):
            yield name, check


def samples(seed):
    """What every session checks: each method by itself, and two of the variants."""
    for name in METHODS:
        yield from drawn(name, random.Random(f"{seed} {name}"))
    variants = FORMS | VARIANTS
    for name in random.Random(seed).sample(sorted(variants), DRAWN_VARIANTS):
        yield from ((name, check) for check in method_checks(variants[name]) if in_short(check))


def in_short(check):
    """For variants engines are compared in the plain form and in partial cohorts."""
    return setting_of(check) in {None, "plain", "partial cohorts"}


def products():
    """Every check of every method and variant."""
    yield from ((name, check) for name in METHODS for check in checks_of(name))
    for name, method in (FORMS | VARIANTS).items():
        yield from ((name, check) for check in method_checks(method) if in_short(check))


def marks(check):
    """Engines are compared many times, on the same lines: `make quick` does it once for every method."""
    is_again = setting_of(check) is not None and check.name != "engines agree: chunks of 3, plain"
    return [pytest.mark.slow] if is_again else []


def pytest_generate_tests(metafunc):
    if "promise" in metafunc.fixturenames:
        is_exhaustive = metafunc.definition.get_closest_marker("exhaustive") is not None
        found = list(products() if is_exhaustive else samples(metafunc.config.option.choice_seed))
        params = [pytest.param(promise, id=f"{promise[0]}: {promise[1]}", marks=marks(promise[1])) for promise in found]
        metafunc.parametrize("promise", params)


def keep(promise):
    """A method may refuse what does not suit it, in one clear line."""
    try:
        promise[1].run()
    except UserError as refusal:
        if "\n" in str(refusal):
            raise
        pytest.skip("the method refuses these settings")


def test_a_method_keeps_its_promises(promise):
    keep(promise)


@pytest.mark.exhaustive("every promise of every method and variant, on every engine with every choice of every setting")
def test_a_method_keeps_its_promises_with_every_choice(promise):
    keep(promise)


def test_a_seed_draws_the_same_again_and_every_choice_has_its_turn():
    names = [[f"{name}: {check}" for name, check in samples(seed)] for seed in (1, 1, 2)]
    assert names[0] == names[1] != names[2]
    every = {setting_of(check) for check in checks_of("fola")} - {None}
    assert {setting_of(check) for seed in range(200) for _, check in drawn("fola", random.Random(seed))} == every | {
        None
    }


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
