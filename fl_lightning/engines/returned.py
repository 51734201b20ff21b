"""What the hooks of a method return: refused in the name of the hook, before it fails elsewhere, or nowhere."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fl_lightning.client_state import ClientMemory
from fl_lightning.method import Cohort, Context, Method, ObservesPath, OwnNetwork, StateFromNetwork, Step
from fl_lightning.optimisers.base import LocalOptimiser
from fl_lightning.params import Params
from fl_lightning.penalty import Penalty
from fl_lightning.system import trees
from fl_lightning.system.plugins import wrong

# What MLflow takes for the name of a metric.
NAME = re.compile(r"[\w. :/-]+", re.ASCII)
FOLLOWS = "the types of a state follow those of params, as torch.zeros_like and new_zeros do"


def check_type(method: object, hook: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    """Refuse what is of another type."""
    if not isinstance(value, kind):
        raise wrong(method, hook, expected, described(value))


def check_params(method: object, hook: str, params: Any, like: Params, what: str, rows: int | None = None) -> None:
    """Refuse parameters that have not the names, shapes and types of the network's, each with so many rows if given."""
    check_type(method, hook, params, dict, f"{what} is a dict of tensors")
    missing, further = [k for k in like if k not in params], [str(k) for k in params if k not in like]
    if missing or further:
        words = [f"{word} {', '.join(some)}"[:200] for word, some in (("without", missing), ("with", further)) if some]
        expected = f"{what} has all parameters of the network and no others"
        raise wrong(method, hook, expected, f"one {' and '.join(words)}")
    if list(params) != list(like):
        raise wrong(method, hook, f"{what} is in the network's order", ", ".join(params)[:200])
    stacked = () if rows is None else (rows,)
    for name, value in like.items():
        expected = f"{value.dtype} of shape {(*stacked, *value.shape)}"
        if described(params[name]) != expected:
            raise wrong(method, hook, f"{what} has {name} as {expected}", described(params[name]))


def check_first_state(method: Method, state: Any, params: Params) -> None:
    """Refuse a state of `init` without the network's parameters."""
    hook = "begin" if isinstance(method, StateFromNetwork) else "init"
    if not hasattr(state, "params"):
        raise wrong(method, hook, "the server's state, a NamedTuple with params", described(state))
    check_params(method, hook, state.params, params, "a state whose params")


def check_state(method: object, hook: str, state: Any, before: Any) -> None:
    """Refuse a state that is not like the one before it: it could not be resumed, or finishes with wrong numbers."""
    if type(state) is not type(before):
        raise wrong(method, hook, f"the next state, a {type(before).__name__}", described(state))
    check_params(method, hook, state.params, before.params, "a state whose params")
    mine, its = _described_leaves(state), _described_leaves(before)
    for path in {**its, **mine}:
        expected, given = its.get(path, "nothing"), mine.get(path, "nothing")
        if expected != given:
            raise wrong(method, hook, f"a state like the one before it ({FOLLOWS}), state{path} {expected}", given)
    if list(mine) != list(its):
        raise wrong(method, hook, "a state in the order of the one before it", ", ".join(mine))


def _described_leaves(state: Any) -> dict[str, str]:
    """What two states must have in common; of clients' memories the row that they began with."""
    blank = trees.map_leaves(
        lambda leaf: leaf.default if isinstance(leaf, ClientMemory) else leaf,
        state,
        is_leaf=lambda leaf: isinstance(leaf, ClientMemory),
    )
    leaves, _ = trees.flatten_with_path(blank)
    return {
        trees.path_text(path): described(leaf) if isinstance(leaf, Tensor) else _word(leaf) for path, leaf in leaves
    }


def check_context(method: Method, context: Any, cohort: Cohort, params: Params) -> None:
    """Refuse what a round cannot start from, and client hooks that give no penalty, rule or names."""
    check_type(method, "broadcast", context, Context, "a Context")
    rows = len(cohort.members)
    check_params(
        method, "broadcast", context.start, params, "a Context whose start", rows if context.own_start else None
    )
    for leaf in trees.leaves(context.own):
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (rows,):
            expected = f"a Context whose own has a row for each of the {rows} members"
            raise wrong(method, "broadcast", expected, described(leaf))
    mine = context.of_member(0)
    check_type(
        method, "local_optimiser", method.local_optimiser(cohort.training, mine), LocalOptimiser, "a LocalOptimiser"
    )
    if isinstance(method, OwnNetwork):
        frozen = method.frozen(mine)
        check_type(method, "frozen", frozen, (set, frozenset), "a frozenset of names of parameters")
        if not frozen < params.keys():
            expected = "names of parameters of the network, never all"
            raise wrong(method, "frozen", expected, ", ".join(map(str, frozen))[:200])
    penalty = method.penalty(mine)
    check_type(method, "penalty", penalty, (Penalty, type(None)), "a Penalty or None")
    if penalty is not None:
        _check_penalty(method, penalty, mine.start)


def _check_penalty(method: Method, penalty: Penalty, params: Params) -> None:
    value, gradient = penalty.value_and_grad(params)
    if not isinstance(value, Tensor) or value.ndim:
        raise wrong(method, "penalty", "a Penalty whose value is a tensor with one number", described(value))
    check_params(method, "penalty", gradient, params, "a Penalty whose grad")


def observed(method: ObservesPath, statistics: Any, step: Step) -> Any:
    """The statistics of the path after a step."""
    after = method.observe(statistics, step)
    if after is None:
        raise wrong(method, "observe", "the statistics", "None")
    return after


def check_traffic(method: Method, number: Any) -> None:
    """Refuse anything but a count of numbers."""
    if not isinstance(number, int | float) or not 0 <= number < math.inf:
        raise wrong(method, "traffic", "how many numbers are sent, from 0 on", described(number))


def check_samples(method: Method, indices: Any, clients: int) -> None:
    """Refuse samples of another number of clients."""
    expected = f"a tensor of indices for each of the {clients} clients"
    check_type(method, "local_data", indices, Sequence, expected)
    if len(indices) != clients:
        raise wrong(method, "local_data", expected, f"{len(indices)} of them")


def diagnosed(
    method: Method, diagnosis: Any, members: int, is_taken: Callable[[str], bool]
) -> dict[str, float | list[float]]:
    """What `diagnose` has found as plain numbers, one for the round or one for each member of the cohort."""
    check_type(method, "diagnose", diagnosis, Mapping, "a dict of numbers by name")
    found: dict[str, float | list[float]] = {}
    for name, value in diagnosis.items():
        check_type(method, "diagnose", name, str, "a dict of numbers whose names are text")
        if NAME.fullmatch(name) is None:
            raise wrong(method, "diagnose", "numbers with names of letters, digits and _ - . : /", repr(name))
        if is_taken(name):
            raise wrong(method, "diagnose", "numbers by names of its own", f"{name}, which the run itself measures")
        several = isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.ndim == 1)
        if several and len(value) != members:
            expected = f"for {name} a number, or a list with one for each of the {members} members"
            raise wrong(method, "diagnose", expected, f"{len(value)} numbers")
        found[name] = [_number(method, name, one) for one in value] if several else _number(method, name, value)
    return found


def _number(method: Method, name: str, value: Any) -> float:
    try:
        if not isinstance(value, str | bytes) and getattr(value, "ndim", 0) == 0:
            number = float(value)
            return value if type(value) is int else number
    except (TypeError, ValueError, OverflowError):
        pass
    expected = f"for {name} a number, or a list with one for each member"
    raise wrong(method, "diagnose", expected, described(value))


def described(value: Any) -> str:
    """What a value is, in a few words."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"{_word(value)} {value!r}"[:80] if isinstance(value, int | float | str) else _word(value)


def _word(value: Any) -> str:
    return "None" if value is None else type(value).__name__
