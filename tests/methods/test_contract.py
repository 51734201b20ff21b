"""What every method must do, over all methods that are discovered: a new one is tested by existing."""

import contextlib
import dataclasses
from copy import deepcopy

import pytest
import torch
from torch.func import grad
from torch.utils import _pytree as pytree

from fl_lightning import discovery
from fl_lightning.config import configure, fields_of
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.loop import federate
from fl_lightning.params import flatten
from fl_lightning.penalty import prior_loss
from tests.cases import equal_bits, final, largest_difference, ragged
from tests.methods.variants import method_of, variants

METHODS = discovery.names("methods")
ENGINES = {"chunks of 3": Functional(chunk=3), "one chunk": Functional(chunk=8), "lightning": Lightning()}
SETTINGS = {
    "plain": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 1e-3, "lr_decay": 0.9},
    "clipping": {"clip_norm": 0.5},
    "partial cohorts": {"fraction": 0.5},
    "stragglers": {"straggler_fraction": 0.5, "epochs": 4},
    "full batches": {"batch_size": None},
}


# A server that learns by itself moves even when the clients do not.
AT_REST = {"fedbe": {"server_epochs": 0}}


def run_or_skip(case, method, engine=None, **changes):
    """Run, unless the method refuses the setting: then the refusal must be one clear line."""
    try:
        return case.run(method, engine, **changes)
    except UserError as refusal:
        if "\n" in str(refusal):
            raise
        pytest.skip(f"refused: {refusal}")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", METHODS)
def test_engines_agree(name, engine, setting):
    case, method = ragged(), method_of(name)
    loop = run_or_skip(case, method, Functional(chunk=1), **SETTINGS[setting])
    other = run_or_skip(case, method, ENGINES[engine], **SETTINGS[setting])
    for mine, theirs in zip(loop, other, strict=True):
        assert largest_difference(mine.after.state.params, theirs.after.state.params) < 1e-12
        for a, b in zip(mine.clients, theirs.clients, strict=True):
            assert largest_difference(a.local.params, b.local.params) < 1e-12
            assert a.train_loss == pytest.approx(b.train_loss, abs=1e-12)
            assert a.prior_loss == pytest.approx(b.prior_loss, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("variant", variants())
def test_engines_agree_on_every_choice(variant, engine):
    case, method = ragged(), method_of(variant)
    loop = run_or_skip(case, method, Functional(chunk=1), fraction=0.5)
    other = run_or_skip(case, method, ENGINES[engine], fraction=0.5)
    size = float(flatten(final(loop)).abs().max())  # a strength may be too large for a choice: both must explode alike
    assert largest_difference(final(loop), final(other)) < 1e-12 * max(1.0, size)


@pytest.mark.parametrize("name", METHODS)
def test_no_hook_changes_its_inputs(name):
    case, method = ragged(), method_of(name)
    record = run_or_skip(case, method)[-1]
    kept = deepcopy((record.before, record.reports, [result.local.params for result in record.clients]))
    context = method.broadcast(record.before.state, record.cohort)
    for position in range(len(record.clients)):
        method.penalty(context.of_member(position))
    after = method.aggregate(record.before.state, record.cohort, record.reports)
    method.diagnose(record.before.state, record.cohort, record.reports, after)
    now = (record.before, record.reports, [result.local.params for result in record.clients])
    for was, is_now in zip(pytree.tree_leaves(kept), pytree.tree_leaves(now), strict=True):
        assert torch.equal(was, is_now) if isinstance(was, torch.Tensor) else was == is_now


@pytest.mark.parametrize("name", METHODS)
def test_going_on_after_any_round_changes_nothing(name):
    case, method = ragged(), method_of(name)
    records = run_or_skip(case, method, fraction=0.5)
    case = case.changed(fraction=0.5)
    arguments = (
        case.dataset,
        case.clients,
        case.training,
        case.federation,
        Functional(chunk=1),
        case.seed,
        case.holdout,
    )
    for done in records[:-1]:
        rest = list(federate(method, case.task(), *arguments, resume=done.after))
        assert [r.round for r in rest] == [r.round for r in records[done.round :]]
        assert equal_bits(final(rest), final(records))


@pytest.mark.parametrize("name", METHODS)
def test_a_result_does_not_depend_on_other_runs(name):
    case, method = ragged(), method_of(name)
    alone = final(run_or_skip(case, method))
    torch.rand(7)
    for other in METHODS:
        with contextlib.suppress(UserError):
            case.run(method_of(other), rounds=1)
    assert equal_bits(final(case.run(method)), alone)


@pytest.mark.parametrize("name", METHODS)
def test_chunks_of_one_train_every_client_alone(name):
    """A client's training is the same bits whoever else is in the cohort."""
    case, method = ragged(), method_of(name)
    together = run_or_skip(case, method, rounds=1)[0]
    for result in together.clients:
        if len(together.clients) == 1:
            continue
        lonely = [c if n == result.local.client else c[:0] for n, c in enumerate(case.clients)]
        alone = run_or_skip(case, method, rounds=1, clients=lonely)[0]
        assert equal_bits(alone.clients[0].local.params, result.local.params)


@pytest.mark.parametrize("name", METHODS)
def test_learning_rate_zero_leaves_the_model(name):
    method = dataclasses.replace(method_of(name), **AT_REST.get(name, {}))
    records = run_or_skip(ragged(), method, lr=0.0)
    start = records[0].before.state.params
    assert largest_difference(final(records), start) < 1e-12


@pytest.mark.parametrize("name", METHODS)
def test_penalties_are_differentiated_correctly(name):
    """The closed-form gradient, the autograd node and plain SGD's shortcut all equal autograd of the value."""
    case, method = ragged(), method_of(name)
    last = run_or_skip(case, method)[-1]
    context = method.broadcast(last.before.state, last.cohort)
    for position, result in enumerate(last.clients):
        penalty = method.penalty(context.of_member(position))
        if penalty is None:
            continue
        params = result.local.params
        expected = grad(penalty.value)(params)
        assert largest_difference(penalty.grad(params), expected) < 1e-12
        leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
        attached = torch.autograd.grad(3 * prior_loss(penalty, leaves)[0], list(leaves.values()))
        assert (
            largest_difference(dict(zip(leaves, attached, strict=True)), {k: 3 * v for k, v in expected.items()})
            < 1e-11
        )
        stepped = {k: v.clone() for k, v in params.items()}
        penalty.descent(0.1)(stepped)
        assert largest_difference(stepped, {k: v - 0.1 * expected[k] for k, v in params.items()}) < 1e-12


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_is_explained_and_configurable(name):
    cls = discovery.find("methods", name)
    assert discovery.summary(cls).endswith(".")
    for field, item in fields_of(cls).items():
        assert item.help.endswith("."), f"{name}.{field} has no explanation"
    config = configure({"method": name})
    assert config.method == cls()
    assert configure(config.flat()) == config


@pytest.mark.parametrize("name", METHODS)
def test_states_keep_their_structure(name):
    case, method = ragged(), method_of(name)
    records = run_or_skip(case, method, fraction=0.5)
    fresh = method.init(case.task().initial.params, len(case.clients))
    for record in records:
        leaves, structure = pytree.tree_flatten(record.after.state)
        expected, expected_structure = pytree.tree_flatten(fresh)
        assert structure == expected_structure
        for leaf, like in zip(leaves, expected, strict=True):
            if isinstance(like, torch.Tensor):
                assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)


@pytest.mark.parametrize("name", METHODS)
def test_traffic_is_counted_for_every_member(name):
    case, method = ragged(), method_of(name)
    record = run_or_skip(case, method, rounds=1)[0]
    if not method.traffic(record.after.state.params):  # everything is in one place
        assert record.bytes_down == record.bytes_up == 0
        return
    size = case.task().num_params
    assert record.bytes_down >= 4 * size * len(record.cohort.members)
    assert record.bytes_up >= 4 * size * len(record.cohort.members)
