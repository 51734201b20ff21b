"""What every method must do: `fl_lightning.testing.check_method` and its single checks."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any, Literal, get_args, get_origin

import torch
from torch.func import grad

from fl_lightning import discovery
from fl_lightning.engines.base import Engine
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.engines.returned import check_params, check_type
from fl_lightning.errors import UserError
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.method import CountsTraffic, HasEnsemble, HasPosterior, Method, MethodPosterior
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.params import Params, flatten
from fl_lightning.penalty import Penalty
from fl_lightning.record import RoundRecord
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.config.schema import fields_of
from fl_lightning.testing.cases import Case, equal_bits, final, largest_difference, ragged
from fl_lightning.testing.checks import Broken, Check, expect, explained, insist
from fl_lightning.testing.purity import copied, same, watched

ENGINES: Mapping[str, Engine] = {
    "chunks of 3": Functional(chunk=3),
    "one chunk": Functional(chunk=8),
    "lightning": Lightning(),
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 1e-3, "lr_decay": 0.9},
    "clipping": {"clip_norm": 0.5},
    "partial cohorts": {"fraction": 0.5},
    "stragglers": {"straggler_fraction": 0.5, "epochs": 4},
    "full batches": {"batch_size": None},
    "schedule": {"schedule": "linear", "warmup": 0.3, "lr_rounds": 4, "rounds": 2},
    # A large eps: where a gradient is zero up to rounding, Adam would step by the sign of the rounding.
    "adam": {"optimiser": "adam", "lr": 0.02, "eps": 1e-3, "weight_decay": 1e-2, "rounds": 2},
    "adamw with a schedule": {
        "optimiser": "adamw",
        "lr": 0.02,
        "beta1": 0.8,
        "beta2": 0.95,
        "eps": 1e-3,
        "weight_decay": 0.1,
        "schedule": "cosine",
        "warmup": 2,
        "rounds": 2,
    },
}
# A preset has the hooks of what it is made of, which is checked with all settings: what it sends and keeps by
# other defaults is seen in these.
DECIDED_BY_DEFAULTS = ("plain", "partial cohorts")
# Methods that run in between, to see whether anything is left of them: a server that learns and draws, and much state.
OTHERS = ("fedbe", "fola")
# Largest difference of float64 numbers that were computed in another order.
ROUNDING = 1e-12


def check_method(method: Method, at_rest: Method | None = None) -> None:
    """Raise `Broken` unless a method keeps everything that engines, checkpoints and comparisons rely on.

    Args:
        method: An instance of the method.
        at_rest: The method with its server's own learning switched off, if its server learns by itself: with a learning
            rate of 0 a model must stay where it is.
    """
    insist(method_checks(method, at_rest))


def method_checks(method: Method, at_rest: Method | None = None) -> list[Check]:
    """The single checks of `check_method`, for `pytest.mark.parametrize`."""
    is_named = discovery.inherited(type(method)) is not None
    checks = [
        Check(f"engines agree: {engine}, {setting}", partial(engines_agree, method, engine, setting))
        for setting in (DECIDED_BY_DEFAULTS if is_named else SETTINGS)
        for engine in ENGINES
    ]
    checks += [
        Check(f"engines agree: {engine}, {label}", partial(engines_agree_on_choice, method, engine, choice))
        for label, choice in choices_of(type(method)).items()
        for engine in ENGINES
    ]
    plain = [
        a_small_problem_is_accepted,
        hooks_change_no_inputs,
        a_run_leaves_no_trace,
        going_on_after_any_round_changes_nothing,
        results_do_not_depend_on_other_runs,
        clients_do_not_depend_on_each_other,
        penalties_are_differentiated_correctly,
        settings_are_explained,
        states_keep_their_structure,
        traffic_is_counted,
        what_is_measured_are_numbers,
    ]
    checks += [Check(function.__name__.replace("_", " "), partial(function, method)) for function in plain]
    return [*checks, Check("learning rate 0 leaves the model", partial(rests_at_rate_zero, at_rest or method))]


def choices_of(cls: type[Method]) -> dict[str, dict[str, Any]]:
    """Each choice that differs from the default, of every Literal and bool field: by `field=value`, as a setting.

    The choices of a preset are those of what it is made of, and are checked there.
    """
    found: dict[str, dict[str, Any]] = {}
    if discovery.inherited(cls) is not None:
        return found
    for field, item in fields_of(cls).items():
        choices: Sequence[Any] = (True, False) if item.type is bool else ()
        if get_origin(item.type) is Literal:
            choices = get_args(item.type)
        others = [choice for choice in choices if choice != item.default]
        found |= {f"{field}={json.dumps(choice).strip(chr(34))}": {field: choice} for choice in others}
    return found


def engines_agree(method: Method, engine: str, setting: str) -> None:
    """A round gives the same numbers up to rounding on every engine."""
    loop = _in_the_loop(method, setting)
    other = _problem().run(method, ENGINES[engine], **SETTINGS[setting])
    for mine, theirs in zip(loop, other, strict=True):
        pairs = [(mine.after.state.params, theirs.after.state.params)]
        for a, b in zip(mine.clients, theirs.clients, strict=True):
            pairs.append((a.local.params, b.local.params))
            expect(
                math.isclose(a.train_loss, b.train_loss, rel_tol=0, abs_tol=ROUNDING)
                and math.isclose(a.prior_loss, b.prior_loss, rel_tol=1e-9, abs_tol=ROUNDING),
                f"round {mine.round}: losses of client {a.local.client} are {(a.train_loss, a.prior_loss)} in the "
                f"plain loop and {(b.train_loss, b.prior_loss)} on the engine {engine!r}",
            )
        _close(pairs, f"round {mine.round}: models of the plain loop and of the engine {engine!r}", ROUNDING)


def _in_the_loop(method: Method, setting: str) -> list[RoundRecord]:
    """The run, client by client, with which those of the engines are compared; read-only."""
    try:
        hash(method)
    except TypeError:  # it holds what may change
        return _problem().run(method, **SETTINGS[setting])
    return _kept_in_the_loop(method, setting)


@lru_cache(maxsize=16)
def _kept_in_the_loop(method: Method, setting: str) -> list[RoundRecord]:
    return _problem().run(method, **SETTINGS[setting])


def _problem() -> Case:
    """Small, since many runs are compared on it: what a round leaves behind still reaches the next."""
    return ragged(sizes=(11, 7, 0, 17, 1)).changed(rounds=2)


def engines_agree_on_choice(method: Method, engine: str, choice: Mapping[str, Any]) -> None:
    """The same for another value of a Literal or bool setting, with partial cohorts."""
    changed = dataclasses.replace(method, **choice)
    loop = final(_in_the_loop(changed, "partial cohorts"))
    other = final(_problem().run(changed, ENGINES[engine], fraction=0.5))
    size = float(flatten(loop).abs().max())  # a strength may be too large for a choice: both must explode alike
    _close([(loop, other)], f"models of the plain loop and of the engine {engine!r}", ROUNDING * max(1.0, size))


def a_small_problem_is_accepted(method: Method) -> None:
    """A method that refuses every problem would otherwise pass, since a refusal breaks no promise."""
    try:
        _problem().run(method, rounds=1)
    except UserError as refusal:
        raise Broken(f"nothing can be checked, because the method refuses a small network: {refusal}") from refusal


def hooks_change_no_inputs(method: Method) -> None:
    """No hook writes to what it is given, nor to the method itself."""
    original, twin = deepcopy(method), watched(method)
    for record in _problem().run(twin):
        before, after = record.before.state, record.after.state
        twin.diagnose(before, record.cohort, record.reports, after)
        if isinstance(twin, HasPosterior):
            twin.posteriors(record.cohort, record.reports)
    expect(method == original, f"{type(method).__name__} changes its own fields; keep what changes in the state")


def a_run_leaves_no_trace(method: Method) -> None:
    """Task and data are after a run what they were before it, and a second run on them has the same numbers."""
    case = _problem()
    task, data = case.task(), [case.dataset.train_x, case.dataset.train_y, case.clients, case.holdout]
    before = copied((task.initial, data))
    first = copied(final(case.go_on(method, task=task)))
    expect(same((task.initial, data), before), "a run changes the task's initial weights or the data")
    expect(equal_bits(final(case.go_on(method, task=task)), first), "a second run on the same task has other numbers")


def going_on_after_any_round_changes_nothing(method: Method) -> None:
    """The state is all that a method remembers, so that a run can be resumed to the bit."""
    case = ragged().changed(fraction=0.5)
    records = case.go_on(method)
    for done in records[:-1]:
        rest = case.go_on(method, resume=done.after)
        expect(equal_bits(final(rest), final(records)), f"a run that goes on after round {done.round} ends elsewhere")


def results_do_not_depend_on_other_runs(method: Method) -> None:
    """Neither on what else ran in the process, nor on torch's global stream of random numbers."""
    case = _problem()
    alone = final(case.run(method))
    torch.rand(7)
    for other in OTHERS:
        case.run(discovery.find("methods", other)(), rounds=1)
    expect(
        equal_bits(final(case.run(method)), alone),
        "another run in between changes the result; draw random numbers through fl_lightning.streams",
    )


def clients_do_not_depend_on_each_other(method: Method) -> None:
    """A client's training is the same bits in every cohort."""
    case = _problem()
    together = case.run(method, rounds=1)[0]
    if len(together.clients) == 1:
        return
    for result in together.clients:
        member = result.local.client
        lonely = [indices if n == member else indices[:0] for n, indices in enumerate(case.clients)]
        alone = case.run(method, rounds=1, clients=lonely)[0]
        expect(
            equal_bits(alone.clients[0].local.params, result.local.params),
            f"client {member} trains otherwise when it is alone",
        )


def rests_at_rate_zero(method: Method) -> None:
    """Clients that do not move leave the server where it is."""
    records = _problem().run(method, lr=0.0)
    _close([(final(records), records[0].before.state.params)], "models before and after, at lr 0", ROUNDING)


def penalties_are_differentiated_correctly(method: Method) -> None:
    """The closed-form gradient, the autograd node and plain SGD's shortcut all equal autograd of the value."""
    last = _problem().run(method)[-1]
    context = method.broadcast(last.before.state, last.cohort)
    for position, result in enumerate(last.clients):
        penalty = method.penalty(context.of_member(position))
        if penalty is not None:
            _check_penalty(penalty, result.local.params)


def settings_are_explained(method: Method) -> None:
    """The help text of the method and of each of its fields is a sentence, and the defaults survive a configuration."""
    cls = type(method)
    explained(cls)
    if (name := discovery.name_of("methods", cls)) is not None:
        config = configure({"method": name})
        expect(config.method == cls(), f"--method {name} alone is not {cls.__name__}()")
        expect(configure(config.flat()) == config, f"the settings of --method {name} do not survive being written")


def states_keep_their_structure(method: Method) -> None:
    """Every state has the structure, shapes and types of `init`'s, so that checkpoints can be read: the loop insists.

    A `ClientMemory` grows with the clients that have taken part; all its rows are like the one it began with.
    """
    ragged().run(method, fraction=0.5)


def traffic_is_counted(method: Method) -> None:
    """Every member is sent a model and sends one, unless a method counts otherwise; nothing travels in one place."""
    case = ragged()
    record = case.run(method, rounds=1)[0]
    is_sent = record.bytes_down > 0  # or everything is in one place
    least = 1 if isinstance(method, CountsTraffic) else 4 * case.task().num_params * len(record.cohort.members)
    for way, number in (("down", record.bytes_down), ("up", record.bytes_up)):
        enough = number >= least if is_sent else number == 0
        expect(enough, f"bytes {way}: expected {f'at least {least}' if is_sent else '0'}, got {number}")


def what_is_measured_are_numbers(method: Method) -> None:
    """`diagnose`, `posteriors`, `ensemble` and `posterior` return what a run takes from them."""
    case = ragged()
    last = case.run(method, fraction=0.5)[-1]
    measure(method, case.task(), case.dataset, last)
    cohort, state = last.cohort, last.after.state
    if isinstance(method, HasEnsemble):
        for model in method.ensemble(last.before.state, cohort, last.reports):
            check_params(method, "ensemble", model, state.params, "models, each of which")
    if not isinstance(method, HasPosterior):
        return
    posteriors = method.posteriors(cohort, last.reports)
    are_gaussians = all(isinstance(one, Gaussian) for one in posteriors)
    expect(are_gaussians, f"posteriors must be Gaussians, got {posteriors!r:.80}")
    found = method.posterior(state, last.round, cohort.training, cohort.server.sizes)
    check_type(method, "posterior", found, (MethodPosterior, type(None)), "an MethodPosterior or None")


def _check_penalty(penalty: Penalty, params: Params) -> None:
    expected = grad(penalty.value)(params)
    _close([(penalty.grad(params), expected)], "the penalty's grad and autograd of its value", ROUNDING)
    _close([(penalty.along_path()(params)[1], expected)], "the penalty's grad along a path and autograd", ROUNDING)
    stepped = {name: value.clone() for name, value in params.items()}
    penalty.descent(0.1)(stepped)
    by_hand = {name: value - 0.1 * expected[name] for name, value in params.items()}
    _close([(stepped, by_hand)], "the penalty's descent and a step along its gradient", ROUNDING)


def _close(pairs: Sequence[tuple[Params, Params]], what: str, tolerance: float) -> None:
    for a, b in pairs:
        difference = largest_difference(a, b)
        expect(difference < tolerance, f"{what} differ by {difference:.1e}, expected less than {tolerance:.1e}")
