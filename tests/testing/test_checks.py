"""The contract tests of `fl_lightning.testing` find what they are there for: bad parts that break a promise."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import discovery
from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.errors import UserError, require
from fl_lightning.methods.fedavg import FedAvg, Report, State
from fl_lightning.methods.fola import Fola
from fl_lightning.params import average
from fl_lightning.penalty import Quadratic
from fl_lightning.record import RoundRecord
from fl_lightning.testing import (
    Broken,
    check_method,
    check_model,
    check_source,
    method_checks,
    model_checks,
    outcome_of,
    source_checks,
)
from fl_lightning.testing import __main__ as command
from tests.support.cases import equal_bits, final, ragged


@dataclass(frozen=True)
class InAggregate(FedAvg):
    """Writes the mean into the state it was given."""

    def aggregate(self, state, cohort, reports):
        for name, value in average(state.params, [r.params for r in reports], cohort.weights).items():
            state.params[name].copy_(value)
        return state


@dataclass(frozen=True)
class InReports(FedAvg):
    """Overwrites what a client sent, which is the client's model."""

    def aggregate(self, state, cohort, reports):
        after = super().aggregate(state, cohort, reports)
        reports[0].params["0.bias"].zero_()
        return after


@dataclass(frozen=True)
class InInit(FedAvg):
    """Starts from zero by overwriting the task's weights."""

    def init(self, params, num_clients):
        for value in params.values():
            value.zero_()
        return State(params)


@dataclass(frozen=True)
class InBroadcast(FedAvg):
    """Shrinks the model that it sends, and so the one that it keeps."""

    def broadcast(self, state, cohort):
        state.params["0.bias"].mul_(0.5)
        return super().broadcast(state, cohort)


@dataclass(frozen=True)
class InReport(FedAvg):
    """Rounds the client's model in place."""

    def report(self, local, context):
        return Report({name: value.round_(decimals=3) for name, value in local.params.items()})


@dataclass(frozen=True)
class InObserve(Fola):
    """Squares the gradient that it was shown."""

    def observe(self, statistics, step):
        for name, value in statistics.items():
            value.add_(step.grad[name].square_())
        return statistics


@dataclass(frozen=True)
class InDiagnose(FedAvg):
    """Measures the change by subtracting in place."""

    def diagnose(self, before, cohort, reports, after):
        return {"change": float(after.params["0.bias"].sub_(before.params["0.bias"]).norm())}


@dataclass(frozen=True)
class InDict(FedAvg):
    """Replaces a tensor in the dict of the state: no tensor is written to, but the state is."""

    def aggregate(self, state, cohort, reports):
        mean = average(state.params, [r.params for r in reports], cohort.weights)
        state.params["0.bias"] = mean["0.bias"]
        return State(mean)


@pytest.mark.parametrize(
    ("bad", "hook"),
    [
        (InAggregate(), "InAggregate.aggregate"),
        (InReports(), "InReports.aggregate"),
        (InInit(), "InInit.init"),
        (InBroadcast(), "InBroadcast.broadcast"),
        (InReport(), "InReport.report"),
        (InObserve(), "InObserve.observe"),
        (InDiagnose(), "InDiagnose.diagnose"),
        (InDict(), "InDict.aggregate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hook_that_writes_into_its_inputs_is_named(bad, hook):
    check = next(check for check in method_checks(bad) if check.name == "hooks change no inputs")
    with pytest.raises(Broken, match=f"{hook} writes into its inputs"):
        check.run()


@pytest.mark.parametrize("bad", [InAggregate(), InInit(), InBroadcast(), InDict()], ids=lambda bad: type(bad).__name__)
def test_the_loop_is_not_harmed_by_writing_in_place(bad):
    case = ragged()
    task = case.task()
    kept = {name: value.clone() for name, value in task.initial.params.items()}
    first = {name: value.clone() for name, value in final(case.go_on(bad, task=task)).items()}
    assert equal_bits(task.initial.params, kept)
    assert equal_bits(final(case.go_on(bad, task=task)), first)
    expected: list[RoundRecord] = case.run(FedAvg())
    assert equal_bits(final(case.go_on(FedAvg(), task=task)), final(expected))


@dataclass(frozen=True)
class Remembering(FedAvg):
    """Keeps a counter in itself instead of in the state."""

    rounds: list = field(default_factory=list)

    def aggregate(self, state, cohort, reports):
        self.rounds.append(cohort.round)
        rate = 1 / len(self.rounds)
        return State(average(state.params, [r.params for r in reports], cohort.weights, rate))


@dataclass(frozen=True)
class Gambling(FedAvg):
    """Draws from torch's global stream."""

    def aggregate(self, state, cohort, reports):
        mean = average(state.params, [r.params for r in reports], cohort.weights)
        return State({name: value + 1e-3 * torch.randn_like(value) for name, value in mean.items()})


@dataclass(frozen=True)
class Narrowing(FedAvg):
    """Returns a state of another type than it began with."""

    def aggregate(self, state, cohort, reports):
        mean = average(state.params, [r.params for r in reports], cohort.weights)
        return State({name: value.float() for name, value in mean.items()})


class WrongGradient(Quadratic):
    """A penalty whose gradient is twice the derivative of its value."""

    def grad(self, params):
        return {name: 2 * value for name, value in super().grad(params).items()}


@dataclass(frozen=True)
class Pulling(FedAvg):
    """FedAvg with a pull whose gradient is wrong."""

    def penalty(self, context):
        return WrongGradient(context.start, 1.0)


@dataclass(frozen=True)
class Silent(FedAvg):
    """A setting without a word.

    Attributes:
        rate: Explained.
    """

    rate: float = 1.0
    secret: float = 0.0


@pytest.mark.parametrize(
    ("bad", "promise"),
    [
        (Remembering(), "hooks change no inputs"),
        (Remembering(), "a run leaves no trace"),
        (Gambling(), "results do not depend on other runs"),
        (Narrowing(), "states keep their structure"),
        (Pulling(), "penalties are differentiated correctly"),
        (Silent(), "settings are explained"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_broken_promise_is_found(bad, promise):
    outcome = outcome_of(next(check for check in method_checks(bad) if check.name == promise))
    assert outcome.status == "broken"
    assert outcome.message


def test_check_method_names_all_broken_promises():
    with pytest.raises(Broken) as caught:
        check_method(Narrowing())
    assert "states keep their structure: Narrowing.aggregate must return a state" in str(caught.value)
    assert "got torch.float32 of shape (6, 5)" in str(caught.value)


@dataclass(frozen=True)
class Refusing(FedAvg):
    """Refuses everything, and so would pass every check."""

    def check(self, training, server):
        require(False, "nothing suits this method; use another")


def test_a_method_that_refuses_everything_passes_nothing():
    with pytest.raises(Broken, match="nothing can be checked, because the method refuses"):
        check_method(Refusing())


@pytest.mark.slow
def test_the_parts_of_the_package_pass():
    check_method(FedAvg())
    check_source(discovery.find("data", "digits")())


# The large ones, and those for text, are checked in tests/models/test_networks.py with small settings.
@pytest.mark.parametrize("name", sorted({*discovery.names("models")} - {"torchvision", "lstm", "transformer"}))
def test_models_keep_their_promises(name):
    check_model(discovery.find("models", name))


class Constant(nn.Module):
    """Weights that no seed changes."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.layer = nn.Linear(int(np.prod(shape)), num_classes)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        return self.layer(x.flatten(1))


class Mixing(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.layer = nn.Linear(int(np.prod(shape)), num_classes)

    def forward(self, x):
        return self.layer(x.flatten(1) - x.flatten(1).mean(0))


class TenClasses(Constant):
    """Ten classes, whatever the data have."""

    def __init__(self, shape, num_classes):
        super().__init__(shape, 10)


@pytest.mark.parametrize(
    ("model", "promise"),
    [
        (Constant, "weights depend on the seed alone: (1, 28, 28)"),
        (Mixing, "samples do not depend on each other: (1, 28, 28)"),
        (TenClasses, "sizes follow the data: (3, 32, 32)"),
    ],
)
def test_bad_models_are_found(model, promise):
    assert outcome_of(next(c for c in model_checks(model) if c.name == promise)).status == "broken"


@dataclass(frozen=True)
class Random(Source):
    """Other samples each time."""

    def load(self):
        x, y = torch.randn(30, 4), torch.arange(30) % 3
        return Dataset(x[:20], y[:20], x[20:], y[20:], num_classes=3)


def test_a_source_that_draws_from_the_global_stream_is_found():
    outcomes = {check.name: outcome_of(check).status for check in source_checks(Random())}
    assert outcomes["it always loads the same"] == "broken"
    assert outcomes["it loads a dataset"] == "kept"


def test_the_command_says_what_is_kept(capsys):
    assert command.main(["--data", "digits", "--model", "softmax"]) == 0
    printed = capsys.readouterr().out
    assert "kept     it always loads the same" in printed
    assert "0 broken" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "say what to check"), (["--method", "fedagv"], "did you mean 'fedavg'"), (["--what"], "unrecognized")],
)
def test_the_command_explains_mistakes(arguments, message, capsys):
    assert command.main(arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1


def test_a_refusal_is_no_failure():
    refused = [outcome_of(c) for c in method_checks(discovery.find("methods", "scaffold")()) if "momentum" in c.name]
    assert refused
    assert {outcome.status for outcome in refused} == {"refused"}
    with pytest.raises(UserError):
        next(c for c in method_checks(discovery.find("methods", "scaffold")()) if "momentum" in c.name).run()
