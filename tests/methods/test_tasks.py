"""Tasks and methods: engines agree on every task, and a method that does not suit it says so in one line.

Two methods try every task here; `make exhaustive` tries all methods, forms and optimisers on all tasks.
"""

import math
import random

import pytest
import torch

from fl_lightning import discovery
from fl_lightning.contrib.fedsparse import FedSparse
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.loop import initial
from fl_lightning.method import task_of
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.testing.cases import final, largest_difference
from tests.support.tasks import TASKS, case

# Those that are made of others are checked there.
METHODS = [name for name, cls in discovery.discover("methods").items() if discovery.inherited(cls) is None]
# Methods that count or average classes.
NEED_CLASSES = {"fedbe", "fedma", "pfnm"}
# Methods whose formulas, as they are by default, are about steps of SGD.
NEED_SGD = {"bayes_admm", "ep", "fedivon", "fedpa", "fedsgd", "fedsparse", "scaffold"}
OPTIMISERS = ({}, *({"optimiser": name, "schedule": "cosine"} for name in ("adam", "adamw")))
FORMS = ("inputs", "kron", "last_layer", "full", "e_full")


def agree(method, task, **training):
    problem = case(task).changed(**training)
    loop = problem.run(method, Functional(chunk=1))
    # Several clients at once draw other gates, of the same distribution.
    engines = (Lightning(),) if isinstance(method, FedSparse) else (Functional(chunk=3), Lightning())
    for engine in engines:
        other = problem.run(method, engine)
        assert largest_difference(final(loop), final(other)) < 1e-12, engine
        for mine, theirs in zip(loop[-1].clients, other[-1].clients, strict=True):
            assert mine.train_loss == pytest.approx(theirs.train_loss, abs=1e-12)
    assert (
        largest_difference(
            final(loop), initial(method, task_of(method, problem.task()), 2, problem.dataset).state.params
        )
        > 0
    )


def check_refused(name, task, **training):
    """The method says in one line that the task, or the optimiser, does not suit it; whether it does."""
    refusals = [r"expected training\.optimiser sgd, got adam"] * (name in NEED_SGD and "optimiser" in training)
    if name in NEED_CLASSES and task != "classification":
        refusals.append(f"needs a task of classification.*got {task}|got Embedding")
    if refusals:
        with pytest.raises(UserError, match="|".join(refusals)) as caught:
            case(task).changed(**training).run(discovery.find("methods", name)())
        assert "\n" not in str(caught.value)
    return bool(refusals)


def check_a_round_of_adam(name, task):
    if check_refused(name, task, optimiser="adam"):
        return
    (record,) = case(task).changed(optimiser="adam", rounds=1, epochs=1).run(discovery.find("methods", name)())
    assert all(torch.isfinite(value).all() for value in record.after.state.params.values())
    assert all(math.isfinite(client.train_loss) for client in record.clients)


@pytest.fixture
def draw(request):
    return random.Random(f"{request.config.option.choice_seed} {request.node.name}")


@pytest.mark.parametrize("name", sorted(NEED_CLASSES))
def test_a_method_that_needs_classes_refuses_other_tasks(name, draw):
    assert check_refused(name, draw.choice(TASKS[1:]))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_a_round_of_adam_or_refuses_it(name):
    check_a_round_of_adam(name, "classification")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", [FedAvg(), Fola(strength=1)], ids=["fedavg", "fola"])
def test_engines_agree_on_every_task(method, task, draw):
    agree(method, task, **draw.choice(OPTIMISERS))


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_curvature_on_some_task(form, draw):
    agree(Fola(curvature_form=form, strength=0.1), draw.choice(TASKS[1:]))


def test_squares_of_single_samples_on_some_task(draw):
    agree(Fola(fisher="per_sample", strength=1), draw.choice(TASKS[1:]))


@pytest.mark.exhaustive("every method on every task: engines agree, or one line of refusal")
@pytest.mark.parametrize("task", TASKS[1:])
@pytest.mark.parametrize("name", METHODS)
def test_engines_agree_for_every_method(name, task):
    if not check_refused(name, task):
        agree(discovery.find("methods", name)(), task)


@pytest.mark.exhaustive("every method on every task: a round of Adam, or one line of refusal")
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", METHODS)
def test_a_round_of_adam_for_every_method(name, task):
    check_a_round_of_adam(name, task)


@pytest.mark.exhaustive("every task with every optimiser: engines agree")
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("training", OPTIMISERS, ids=str)
@pytest.mark.parametrize("method", [FedAvg(), Fola(strength=1)], ids=["fedavg", "fola"])
def test_engines_agree_with_every_optimiser(method, training, task):
    agree(method, task, **training)


@pytest.mark.exhaustive("every form of curvature on every task: engines agree")
@pytest.mark.parametrize("task", TASKS[1:])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_curvature_on_every_task(form, task):
    agree(Fola(curvature_form=form, strength=0.1), task)


@pytest.mark.exhaustive("squares of single samples on every task: engines agree")
@pytest.mark.parametrize("task", TASKS[1:])
def test_squares_of_single_samples(task):
    agree(Fola(fisher="per_sample", strength=1), task)
