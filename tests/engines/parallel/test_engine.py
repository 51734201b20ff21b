"""The numbers of one worker, to the bit, for any number of them: all methods, all engines, drawn choices."""

import dataclasses
import random
from copy import deepcopy

import pytest
import torch

from fl_lightning import discovery
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.engines.parallel.engine import Parallel
from fl_lightning.errors import Diverged, UserError
from fl_lightning.loop import federate
from fl_lightning.method import task_of
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.scaffold import Scaffold
from fl_lightning.metrics.round_metrics import ClientEvaluator, measure
from fl_lightning.models.task import Task
from fl_lightning.system import trees
from fl_lightning.testing.methods import choices_of
from tests.engines.test_user_module import Plain
from tests.metrics.test_round_metrics import with_tests
from tests.support.cases import Case, network, ragged
from tests.support.pictures import pictures

pytestmark = pytest.mark.system


# What choices of FOLA go with, by the field; the forms by layers stand no large strength on this problem.
INPUTS, KRON = ({"curvature_form": form, "strength": 0.1} for form in ("inputs", "kron"))
COMPANIONS = {
    "curvature_form": {"strength": 0.1},
    "eigen_order": {"curvature_form": "e_full"},
    "rest": {"curvature_form": "last_layer", "strength": 0.1},
    **dict.fromkeys(("first_layer", "prior"), INPUTS),
    **dict.fromkeys(("slopes", "solver", "projection"), KRON),
}


class HalfPrecision(Case):
    """Networks are computed in float16, whose losses each client scales by a factor of its own."""

    def task(self):
        return Task(deepcopy(self.model), self.dataset.likelihood, mixed=torch.float16)


def variants():
    """Every method, and by its name each of its choices."""
    for name, cls in discovery.discover("methods").items():
        choices = {}
        for label, choice in choices_of(cls).items():
            (field,) = choice
            companions = COMPANIONS.get(field, {}) if name in ("fola", "fola_extended") else {}
            choices[f"{name} {label}"] = dataclasses.replace(cls(), **{**companions, **choice})
        yield name, cls(), choices


def told(case, method, engine, judged):
    """Everything that a run tells, but for the clock; or how it fails."""
    task, everything = task_of(method, case.task()), []
    try:
        problem = case.problem()._replace(task=task, evaluate_clients=ClientEvaluator(task) if judged else None)
        records = federate(method, problem, case.training, case.federation, engine)
        for record in records:
            metrics, clients = measure(method, task, case.dataset, record)
            timeless = {k: v for k, v in metrics.items() if not k.startswith(("seconds", "workers"))}
            models = [(result.local.params, result.local.buffers) for result in record.clients]
            everything += [timeless, clients, models, record.reports, record.after]
    except (UserError, Diverged) as refusal:
        everything.append(str(refusal))
    return everything


def same_bits(one, other):
    left, left_shape = trees.flatten(one)
    right, right_shape = trees.flatten(other)
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


def in_the_loop(methods):
    case = ragged().changed(rounds=2)
    return [(name, case, method, Functional(chunk=1)) for name, method in methods]


def test_every_method_and_one_of_its_choices(two, request):
    draw, methods = random.Random(request.config.option.choice_seed), []
    for name, plain, choices in variants():
        methods.append((name, plain))
        if choices:
            methods.append(draw.choice(sorted(choices.items(), key=lambda item: item[0])))
    assert list(differing(in_the_loop(methods), two)) == []


@pytest.mark.exhaustive("every method with every choice: the bits of one worker for two and for three")
def test_every_method_and_choice(two, three):
    methods = [pair for name, plain, choices in variants() for pair in ((name, plain), *choices.items())]
    assert list(differing(in_the_loop(methods), two, three)) == []


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
        ("lightning in 16-mixed", HalfPrecision(*ragged(torch.float32)).changed(rounds=2), Fola(), Lightning()),
        ("lightning's clipping", ragged().changed(rounds=2, clip_norm=0.3, momentum=0.5), Fola(), Lightning()),
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
