"""The optional hooks: a network of the method's own, a start of each client's own, frozen parameters, counted bits."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.loop import federate
from fl_lightning.method import MIXINS, Context, CountsTraffic, Method, ObservesPath, OwnNetwork, task_of
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.metrics.scores import score
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import count, flatten, zeros, zip_map
from fl_lightning.penalty import Quadratic
from fl_lightning.testing import method_checks
from tests.support import references
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged

TRICKY = {"momentum": 0.9, "weight_decay": 0.1, "clip_norm": 0.5, "epochs": 3}


class State(NamedTuple):
    params: dict


class Seen(NamedTuple):
    """A report with the sum of all gradients that were shown."""

    params: dict
    grads: dict


class Noisy(nn.Module):
    """Any module, whose outputs are scaled: by a random factor in training, shared by the batch."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        noise = torch.rand(3, dtype=x.dtype) if self.training else 0.5
        return self.inner(x) * self.scale * noise


@dataclass(frozen=True)
class NoisyAvg(FedAvg, OwnNetwork):
    """Averages noisy networks."""

    def network(self, module):
        nn.Linear(3, 3)  # draws from the global stream
        return Noisy(module)


@dataclass(frozen=True)
class Apart(Method, ObservesPath):
    """Client n starts n steps away from the server's model, is pulled back there, and counts by its id."""

    def init(self, params, num_clients):
        return State(params)

    def broadcast(self, state, cohort):
        ids = torch.tensor(cohort.members, dtype=torch.float64)
        start = zip_map(lambda p: p + 0.01 * ids.view(-1, *[1] * p.dim()), state.params)
        return Context(start, shared=torch.ones(2), own=ids, own_start=True)

    def penalty(self, context):
        assert not context.own_start
        return Quadratic(context.start, 0.3)

    def path_statistics(self, context):
        return (context.own, zip_map(torch.clone, context.start))

    def observe(self, statistics, step):
        return statistics

    def report(self, local, context):
        assert float(local.path_statistics[0]) == local.client
        assert equal_bits(local.path_statistics[1], context.start)
        return State(local.params)

    def aggregate(self, state, cohort, reports):
        return State(reports[-1].params)


@dataclass(frozen=True)
class Frozen(FedProx, ObservesPath, OwnNetwork):
    """FedProx whose first weight matrix and last bias stay; `pull` acts on them, too."""

    names: tuple[str, ...] = ("0.weight", "2.bias")

    def frozen(self, context):
        return frozenset(self.names)

    def path_statistics(self, context):
        return zeros(context.start)

    def observe(self, statistics, step):
        return zip_map(torch.add, statistics, step.grad)

    def report(self, local, context):
        return Seen(local.params, local.path_statistics)


@dataclass(frozen=True)
class Watching(FedProx, ObservesPath):
    """FedProx that folds up its gradients."""

    path_statistics, observe, report = Frozen.path_statistics, Frozen.observe, Frozen.report


# --- network ----------------------------------------------------------------------------------------------------------


def test_without_a_network_the_task_is_itself():
    task = ragged().task()
    assert task_of(FedAvg(), task) is task


def test_a_network_is_made_once_from_the_initial_weights_and_leaves_the_model_alone():
    case = ragged()
    task = case.task()
    torch.manual_seed(3)
    expected = torch.rand(1)
    task.load(Weights(zeros(task.initial.params), {}))  # whatever a run has left on the workbench
    torch.manual_seed(3)
    made = task_of(NoisyAvg(), task)
    assert torch.equal(torch.rand(1), expected)
    assert made is task_of(NoisyAvg(), task)
    assert made is task_of(NoisyAvg(), made)
    assert (made.dtype, made.num_params) == (torch.float64, task.num_params + 3)
    for name, value in task.initial.params.items():
        assert torch.equal(made.initial.params[f"inner.{name}"], value)
        assert made.initial.params[f"inner.{name}"].data_ptr() != value.data_ptr()


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_network_trains_as_the_same_network_given_as_the_model(engine):
    case = ragged()
    by_hand = case._replace(model=Noisy(deepcopy(case.model)).double())
    for mine, theirs in zip(case.run(NoisyAvg(), engine), by_hand.run(FedAvg(), engine), strict=True):
        assert equal_bits(mine.after.state.params, theirs.after.state.params)
        assert mine.bytes_down == mine.bytes_up == theirs.bytes_up == 4 * 4 * (case.task().num_params + 3)


def test_noise_is_drawn_per_client_and_round_and_the_same_on_both_engines():
    case = ragged()
    loop, trainer = case.run(NoisyAvg()), case.run(NoisyAvg(), Lightning())
    assert largest_difference(final(loop), final(trainer)) < 1e-12
    still = case._replace(seed=1).run(NoisyAvg())
    assert largest_difference(final(loop), final(still)) > 1e-4
    for chunk in (3, 8):
        first, again = (final(case.run(NoisyAvg(), Functional(chunk=chunk))) for _ in range(2))
        assert equal_bits(first, again)
        assert largest_difference(first, final(loop)) > 1e-6  # other noise of the same distribution


def test_networks_are_measured_without_noise():
    case = ragged()
    task = case.task()
    record = next(federate(NoisyAvg(), case.problem()._replace(task=task), case.training))
    found = [measure(NoisyAvg(), given, case.dataset, record) for given in (task, task_of(NoisyAvg(), task))]
    params = record.after.state.params
    plain = {name.removeprefix("inner."): value for name, value in params.items() if name != "scale"}
    logits = case.task().logits(Weights(plain, {}), case.dataset.test_x) * params["scale"] * 0.5
    accuracy = float((logits.argmax(1) == case.dataset.test_y).double().mean())
    assert found[0].metrics["GA"] == found[1].metrics["GA"] == accuracy
    nll = nn.functional.cross_entropy(logits, case.dataset.test_y)
    assert found[0].metrics["NLL"] == pytest.approx(float(nll), abs=1e-12)


def test_the_contract_holds_for_a_deterministic_network():
    @dataclass(frozen=True)
    class Wide(FedAvg, OwnNetwork):
        """Averages networks with another layer.

        Attributes:
            stragglers: As FedAvg has it.
        """

        def network(self, module):
            return nn.Sequential(module, nn.Linear(3, 3))

    for check in method_checks(Wide()):
        if "lightning" not in check.name:  # slow, and the same for the network as for the model
            check.run()


# --- a start of each client's own -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("settings", [{}, TRICKY, {"fraction": 0.75}], ids=["plain", "tricky", "partial"])
def test_every_client_starts_at_its_own_model(engine, settings):
    case = ragged().changed(rounds=2, **settings)
    for record in case.run(Apart(), engine):
        for result in record.clients:
            n = result.local.client
            start = zip_map(lambda p, n=n: p + 0.01 * n, record.before.state.params)
            alone = case._replace(clients=[c if i == n else c[:0] for i, c in enumerate(case.clients)])
            task = Task(deepcopy(case.model))
            task.load(Weights(start, {}))
            task.initial = task.weights()
            if record.round == 1:
                expected = alone.changed(rounds=1, fraction=1.0).go_on(FedProx(mu=0.3), task=task)[0]
                assert largest_difference(result.local.params, expected.clients[0].local.params) < 1e-12
                assert result.prior_loss == pytest.approx(expected.clients[0].prior_loss, rel=1e-9)


def test_own_starts_keep_the_contract_and_are_sent_once_to_each():
    case = ragged()
    record = case.run(Apart(), rounds=1)[0]
    assert record.bytes_down == 4 * 4 * (case.task().num_params + 2)
    assert record.bytes_up == 4 * 4 * case.task().num_params


def test_a_context_gives_rows():
    context = Context({"w": torch.arange(6.0).view(3, 2)}, own=torch.arange(3), own_start=True)
    second = context.of_member(1)
    assert (second.start["w"].tolist(), int(second.own), second.own_start) == ([2.0, 3.0], 1, False)
    some = context.of_members(lambda leaf: leaf[1:])
    assert (some.start["w"].tolist(), some.own.tolist(), some.own_start) == ([[2, 3], [4, 5]], [1, 2], True)
    common = Context({"w": torch.zeros(3, 2)}, own=torch.arange(3)).of_member(2)
    assert (common.start["w"].shape, int(common.own)) == ((3, 2), 2)


# --- frozen parameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("settings", [{}, TRICKY, {"momentum": 0.9}], ids=["plain", "tricky", "momentum"])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_frozen_parameters_stay_to_the_bit_and_the_others_train_without_them(engine, settings, mu):
    """As a network in which they are no parameters at all."""
    case, method = ragged().changed(**settings), Frozen(mu=mu)
    model = deepcopy(case.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in method.names)
    without = case._replace(model=model)
    records, expected = case.run(method, engine), without.run(Watching(mu=mu))
    initial = references.initial(case)
    for mine, theirs in zip(records, expected, strict=True):
        for a, b in zip(mine.clients, theirs.clients, strict=True):
            assert all(torch.equal(a.local.params[name], initial[name]) for name in method.names)
            assert largest_difference({k: a.local.params[k] for k in b.local.params}, b.local.params) < 1e-12
        for a, b in zip(mine.reports, theirs.reports, strict=True):
            assert not any(a.grads[name].any() for name in method.names)
            assert largest_difference({k: a.grads[k] for k in b.params}, b.grads) < 1e-12
    assert flatten(records[0].reports[0].grads).abs().sum() > 0.01


# --- traffic ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bits(FedAvg, CountsTraffic):
    """Sends signs: a bit for each number."""

    def traffic(self, message: Any) -> float:
        sent, buffers = message
        if isinstance(sent, Context):
            return count((sent.start, buffers))
        return count(sent) / 32 + count(buffers)


def test_messages_can_be_counted_in_bits():
    case = ragged()
    record = case.run(Bits(), rounds=1)[0]
    number = case.task().num_params
    assert number % 8 != 0
    assert (record.bytes_down, record.bytes_up) == (4 * 4 * number, 4 * -(-number // 8))


def test_buffers_are_sent_beside_what_a_method_counts():
    case = ragged(sizes=(20, 7))
    case = case._replace(model=nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double())
    record = case.run(Bits(), rounds=1)[0]
    number = case.task().num_params
    assert record.bytes_up == 2 * (-(-number // 8) + 4 * 13)


def test_scores_of_a_network_do_not_depend_on_the_mode_of_the_workbench():
    case = ragged()
    task = task_of(NoisyAvg(), case.task())
    task.model.train()
    first, second = (score(task, [task.initial], case.dataset) for _ in range(2))
    assert first == second


# --- hooks that would never be called ---------------------------------------------------------------------------------


def defined(bases, **members):
    return type("Mine", bases, {"__doc__": "A method.", **members})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rule", "local_optimiser"),
        ("trace", "path_statistics, and derive the class from ObservesPath"),
        ("advice", "Traits.overshoot_advice"),
        ("one_by_one", "Traits.one_by_one"),
    ],
)
@pytest.mark.parametrize("kind", [lambda hook: hook, property], ids=["function", "property"])
def test_a_hook_by_an_earlier_name_is_refused_with_the_new_one(old, new, kind):
    with pytest.raises(UserError, match=rf"Mine.{old} is a hook of an earlier interface; its name is now {new}"):
        defined((FedAvg,), **{old: kind(lambda self, *inputs: None)})


@pytest.mark.parametrize("mixin", MIXINS, ids=lambda mixin: mixin.__name__)
def test_a_hook_without_its_mixin_is_refused_and_with_it_is_called(mixin):
    for hook in (name for name in vars(mixin) if not name.startswith("_")):
        expected = rf"Mine.{hook} is a hook of {mixin.__name__}.*: write class Mine\(FedAvg, {mixin.__name__}\)"
        with pytest.raises(UserError, match=expected):
            defined((FedAvg,), **{hook: lambda self, *inputs: None})
        assert isinstance(defined((FedAvg, mixin), **{hook: lambda self, *inputs: None}), type)


def test_a_setting_may_have_the_name_of_a_hook():
    @dataclass(frozen=True)
    class Mine(FedAvg):
        """A method with settings.

        Attributes:
            rule: Any.
            network: Any.
        """

        rule: str = "of thumb"
        network: str = "small"

    assert (Mine().rule, Mine().network) == ("of thumb", "small")


def test_a_method_has_nine_members():
    """What few methods need is a mixin: every author reads this class."""
    members = {name for name in vars(Method) if not name.startswith("_")}
    data = {"version", "revised", "display_name"}
    hooks = {"traits", "check", "init", "broadcast", "penalty", "local_optimiser", "report", "aggregate", "diagnose"}
    assert members == data | hooks
