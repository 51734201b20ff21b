"""Every method on every task: all engines agree, or the method says in one line that the task is not for it."""

import math

import pytest
import torch

from fl_lightning import discovery
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.loop import initial
from fl_lightning.method import task_of
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedsparse import FedSparse
from fl_lightning.methods.fola import Fola
from fl_lightning.testing.cases import final, largest_difference
from tests.tasks import TASKS, case

# Those that are made of others are checked there.
METHODS = [name for name, cls in discovery.discover("methods").items() if discovery.inherited(cls) is None]
# Methods that count or average classes.
NEED_CLASSES = {"fedbe", "fedma", "pfnm"}
# Methods whose formulas, as they are by default, are about steps of SGD.
NEED_SGD = {"bayes_admm", "ep", "fedivon", "fedpa", "fedsgd", "fedsparse", "scaffold"}
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


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS[1:])
@pytest.mark.parametrize("name", METHODS)
def test_engines_agree_on_every_task(name, task):
    method = discovery.find("methods", name)()
    if name in NEED_CLASSES:
        with pytest.raises(UserError, match=f"needs a task of classification.*got {task}|got Embedding") as caught:
            case(task).run(method)
        assert "\n" not in str(caught.value)
    else:
        agree(method, task)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", METHODS)
def test_a_round_of_adam(name, task):
    """Every method takes it on every task, but for those above, which say so in one line."""
    method, problem = discovery.find("methods", name)(), case(task).changed(optimiser="adam", rounds=1, epochs=1)
    refusals = [r"expected training\.optimiser sgd, got adam"] * (name in NEED_SGD)
    refusals += [f"needs a task of classification.*got {task}|got Embedding"] * (
        name in NEED_CLASSES and task != "classification"
    )
    if refusals:
        with pytest.raises(UserError, match="|".join(refusals)) as caught:
            problem.run(method)
        assert "\n" not in str(caught.value)
    else:
        (record,) = problem.run(method)
        assert all(torch.isfinite(value).all() for value in record.after.state.params.values())
        assert all(math.isfinite(client.train_loss) for client in record.clients)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
@pytest.mark.parametrize("method", [FedAvg(), Fola(strength=1)], ids=["fedavg", "fola"])
def test_engines_agree_with_every_optimiser(method, optimiser, task):
    agree(method, task, optimiser=optimiser, schedule="cosine")


@pytest.mark.parametrize("task", TASKS[1:])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_curvature_on_every_task(form, task):
    agree(Fola(curvature_form=form, strength=0.1), task)


@pytest.mark.parametrize("task", TASKS[1:])
def test_squares_of_single_samples(task):
    agree(Fola(fisher="per_sample", strength=1), task)
