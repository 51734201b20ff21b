"""The numbers of one worker, to the bit, for any number of them: all methods, all choices, all engines."""

import dataclasses

import torch
from torch.utils import _pytree as pytree

from fl_lightning import discovery
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import Diverged, UserError
from fl_lightning.loop import federate
from fl_lightning.method import task_of
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.scaffold import Scaffold
from fl_lightning.probes.accuracy import ClientJudge, measure
from fl_lightning.testing.methods import choices_of
from fl_lightning.workers.parallel import Parallel
from tests.cases import network, ragged
from tests.pictures import pictures
from tests.test_evaluation import with_tests
from tests.test_own_module import Plain

# What choices of FOLA go with, by the field; the forms by layers stand no large strength on this problem.
INPUTS, KRON = ({"curvature_form": form, "strength": 0.1} for form in ("inputs", "kron"))
COMPANIONS = {
    "curvature_form": {"strength": 0.1},
    "eigen_order": {"curvature_form": "e_full"},
    "rest": {"curvature_form": "last_layer", "strength": 0.1},
    **dict.fromkeys(("first_layer", "prior"), INPUTS),
    **dict.fromkeys(("slopes", "solver", "projection"), KRON),
}


def variants():
    for name, cls in discovery.discover("methods").items():
        yield name, cls()
        for label, choice in choices_of(cls).items():
            (field,) = choice
            companions = COMPANIONS.get(field, {}) if name == "fola" else {}
            yield f"{name} {label}", dataclasses.replace(cls(), **{**companions, **choice})


def told(case, method, engine, judged):
    """Everything that a run tells, but for the clock; or how it fails."""
    task, everything = task_of(method, case.task()), []
    try:
        records = federate(
            method,
            task,
            case.dataset,
            case.clients,
            case.training,
            case.federation,
            engine,
            case.seed,
            case.holdout,
            judge=ClientJudge(task) if judged else None,
        )
        for record in records:
            metrics, clients = measure(method, task, case.dataset, record)
            timeless = {k: v for k, v in metrics.items() if not k.startswith(("seconds", "workers"))}
            models = [(result.local.params, result.local.buffers) for result in record.clients]
            everything += [timeless, clients, models, record.reports, record.after]
    except (UserError, Diverged) as refusal:
        everything.append(str(refusal))
    return everything


def same_bits(one, other):
    left, left_shape = pytree.tree_flatten(one)
    right, right_shape = pytree.tree_flatten(other)
    return left_shape == right_shape and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b or (a != a and b != b)  # NaN
        for a, b in zip(left, right, strict=True)
    )


def differing(cases, *pools):
    """The names of those that are not the same in workers as in this process."""
    for name, case, method, engine in cases:
        alone = told(case, method, engine, judged=False)
        assert not isinstance(alone[-1], str), f"{name} is refused, so nothing is compared: {alone[-1]}"
        for pool in pools:
            if not same_bits(told(case, method, Parallel(engine, pool), judged=True), alone):
                yield f"{name} with {pool.number} workers"


def test_every_method_and_choice(two, three):
    case = ragged().changed(rounds=2)
    cases = [(name, case, method, Functional(chunk=1)) for name, method in variants()]
    assert list(differing(cases, two, three)) == []


def test_every_engine(two, three):
    """Chunks stay together, dropout draws its own masks, pictures are augmented alike, cohorts and epochs differ."""
    dropout = ragged()._replace(model=network(dropout=0.5)).changed(rounds=2)
    many = ragged(sizes=(9, 3, 8, 12, 1, 7, 5)).changed(rounds=2)
    unequal = ragged().changed(rounds=3, fraction=0.5, straggler_fraction=0.5, epochs=3)
    cases = [
        ("chunks of 2", many, Scaffold(), Functional(chunk=2)),
        ("chunks of 3", dropout, Fola(), Functional(chunk=3)),
        ("chunks by themselves", many, Fola(), Functional()),
        ("stragglers", unequal, Scaffold(), Functional(chunk=1)),
        ("pictures", pictures("paper").changed(rounds=1), Fola(curvature="offline"), Functional(chunk=1)),
        ("lightning", dropout.changed(rounds=1), Fola(), Lightning()),
        ("a module of the user's own", ragged()._replace(model=Plain(0.5)).changed(rounds=2), Fola(), Lightning()),
        ("such a one in the loop", ragged()._replace(model=Plain()).changed(rounds=2), Scaffold(), Functional(chunk=1)),
        ("tests of the clients' own", with_tests(many), Fola(), Functional(chunk=1)),
    ]
    assert list(differing(cases, two, three)) == []


def test_the_first_client_that_diverges_is_named_whoever_comes_first(two):
    case = ragged().changed(lr=1e3, weight_decay=1e3, epochs=60, rounds=1)
    alone = told(case, Fola(), Functional(chunk=1), judged=False)
    assert "is not finite in round 1" in alone[-1]
    assert told(case, Fola(), Parallel(Functional(chunk=1), two), judged=True) == alone
