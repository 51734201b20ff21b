"""What every model must do: `fl_lightning.testing.check_model` and its single checks."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from fl_lightning import streams
from fl_lightning.data.dataset import Dataset
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.models.task import Task
from fl_lightning.params import Params
from fl_lightning.testing.cases import Case, equal_bits, final, largest_difference
from fl_lightning.testing.checks import Check, expect, explained, insist
from fl_lightning.training import Federation, Training

# Gray images of MNIST's size and colour images of CIFAR's, with the numbers of classes that go with them.
PROBLEMS: tuple[tuple[tuple[int, ...], int], ...] = (((1, 28, 28), 10), ((3, 32, 32), 100))

# Sequences of tokens, for models whose constructor asks for a vocabulary.
SEQUENCES: tuple[tuple[tuple[int, ...], int], ...] = (((6,), 5),)

# Called with the shape of one input and the number of classes; those that read tokens also with `vocabulary` and, if
# they like, `per_token`.
Build = Callable[..., nn.Module]


def check_model(build: Build, problems: Sequence[tuple[tuple[int, ...], int]] | None = None) -> None:
    """Raise `Broken` unless a model can be trained by every engine, with numbers that depend on the seed alone.

    Args:
        build: The model's class, or a function of the shape of one input and the number of classes.
        problems: Shapes and numbers of classes to try; a model may refuse some with `UserError`, but not all. None
            takes images, or sequences of tokens for a model that asks for a vocabulary.
    """
    insist(model_checks(build, problems))


def model_checks(build: Build, problems: Sequence[tuple[tuple[int, ...], int]] | None = None) -> list[Check]:
    """The single checks of `check_model`, for `pytest.mark.parametrize`."""
    if problems is None:
        problems = SEQUENCES if reads_tokens(build) else PROBLEMS
    functions = (
        sizes_follow_the_data,
        weights_depend_on_the_seed_alone,
        samples_do_not_depend_on_each_other,
        engines_train_it_alike,
    )
    checks = [Check("a problem is accepted", partial(a_problem_is_accepted, build, problems))]
    checks += [
        Check(f"{function.__name__.replace('_', ' ')}: {shape}", partial(function, build, shape, classes))
        for shape, classes in problems
        for function in functions
    ]
    if isinstance(build, type):
        checks.append(Check("settings are explained", partial(explained, build)))
    return checks


def reads_tokens(build: Build) -> bool:
    """Whether a model asks how many different tokens there are."""
    return "vocabulary" in inspect.signature(build).parameters


def a_problem_is_accepted(build: Build, problems: Sequence[tuple[tuple[int, ...], int]]) -> None:
    """A model that refuses all of them would otherwise pass, since a refusal breaks no promise."""
    refusals = []
    for shape, classes in problems:
        try:
            _built(build, shape, classes)
        except UserError as refusal:
            refusals.append(f"{shape}: {refusal}")
    expect(len(refusals) < len(problems), f"nothing can be checked, because the model refuses {'; '.join(refusals)}")


def sizes_follow_the_data(build: Build, shape: tuple[int, ...], classes: int) -> None:
    """A batch of inputs becomes one row of logits per sample."""
    inputs = torch.zeros(2, *shape, dtype=torch.long if reads_tokens(build) else torch.float32)
    found = tuple(_built(build, shape, classes)(inputs).shape)
    expect(found == (2, classes), f"two inputs of shape {shape} must give logits of shape {(2, classes)}, got {found}")


def weights_depend_on_the_seed_alone(build: Build, shape: tuple[int, ...], classes: int) -> None:
    """Two methods with one seed start from the same weights."""
    first = _weights(build, shape, classes, seed=0)
    torch.rand(3)
    expect(equal_bits(first, _weights(build, shape, classes, seed=0)), "the same seed gives other initial weights")
    expect(not equal_bits(first, _weights(build, shape, classes, seed=1)), "every seed gives the same initial weights")


def samples_do_not_depend_on_each_other(build: Build, shape: tuple[int, ...], classes: int) -> None:
    """Evaluated in larger or smaller batches, a model gives the same logits up to rounding."""
    model = _built(build, shape, classes).double().eval()
    x = _inputs(build, 6, shape, classes)
    with torch.no_grad():
        difference = float((model(x) - torch.cat([model(part) for part in torch.split(x, 2)])).abs().max())
    expect(difference < 1e-9, f"logits of a sample change by {difference:.1e} with the rest of its batch")


def engines_train_it_alike(build: Build, shape: tuple[int, ...], classes: int) -> None:
    """A round of training gives the same numbers up to rounding on every engine, and finite ones."""
    x, y = _inputs(build, 12, shape, classes), torch.arange(12) % classes
    case = Case(
        model=_built(build, shape, classes).double(),
        dataset=Dataset(x[:10], y[:10], x[10:], y[10:], classes),
        clients=[torch.arange(4), torch.arange(4, 10)],
        holdout=torch.arange(0),
        training=Training(lr=0.01, batch_size=3),
        federation=Federation(rounds=1),
    )
    loop = final(case.run(FedAvg(), Functional(chunk=1)))
    for engine in (Lightning(), Functional(chunk=2)):
        difference = largest_difference(final(case.run(FedAvg(), engine)), loop)
        name = type(engine).__name__
        expect(difference < 1e-9, f"the model trained by {name} differs by {difference:.1e} from the plain loop's")
    expect(not equal_bits(loop, case.task().initial.params), "training does not change the model")


def _inputs(build: Build, samples: int, shape: tuple[int, ...], classes: int) -> torch.Tensor:
    stream = streams.generator(0, "testing")
    if reads_tokens(build):
        return torch.randint(classes, (samples, *shape), generator=stream)
    return torch.randn(samples, *shape, generator=stream, dtype=torch.float64)


def _built(build: Build, shape: tuple[int, ...], classes: int, seed: int = 0) -> nn.Module:
    offered = {"vocabulary": classes, "per_token": False}
    given = {key: value for key, value in offered.items() if key in inspect.signature(build).parameters}
    with streams.global_noise(seed, "weights"):
        return build(shape, classes, **given)


def _weights(build: Build, shape: tuple[int, ...], classes: int, seed: int) -> Params:
    return Task(_built(build, shape, classes, seed)).initial.params
