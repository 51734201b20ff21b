"""Hooks are pure: a method that is watched compares the inputs of every hook before and after its call.

The statistics of the path are private to the method, so `observe` may write into them.
"""

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fl_lightning.method import Method
from fl_lightning.system import trees
from fl_lightning.testing.checks import Broken

HOOKS = (
    "adapt",
    "check",
    "local_data",
    "init",
    "begin",
    "prepare",
    "broadcast",
    "penalty",
    "local_optimiser",
    "path_statistics",
    "observe",
    "report",
    "aggregate",
    "diagnose",
    "posteriors",
)


def watched(method: Method) -> Method:
    """The same method, which raises `Broken` as soon as one of its hooks has changed what it was given.

    The copy is taken before each call: comparing what is left after a round would come too late, since a state that
    was overwritten looks like one that was always so.
    """
    cls = type(method)
    own = [hook for hook in HOOKS if hasattr(cls, hook)]
    subclass = type(cls.__name__, (cls,), {hook: _watching(cls, hook) for hook in own})
    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.init}
    twin: Method = subclass(**values)
    return twin


def _watching(cls: type[Method], hook: str) -> Callable[..., Any]:
    original = getattr(cls, hook)

    @wraps(original)
    def call(self: Method, *inputs: Any, **named: Any) -> Any:
        others = _of_others(hook, *inputs, **named)
        before = copied(others)
        output = original(self, *inputs, **named)
        if not same(others, before):
            raise Broken(
                f"{cls.__name__}.{hook} writes into its inputs; it must return new tensors "
                "(torch.add instead of add_, a new dict instead of an assignment)"
            )
        return output

    return call


def _of_others(hook: str, *inputs: Any, **named: Any) -> Any:
    """The inputs of a hook that are not the method's own."""
    if hook == "observe":  # of statistics and step
        return inputs[1:], {name: value for name, value in named.items() if name != "statistics"}
    return inputs, named


def copied(tree: Any) -> Any:
    """A tree with copies of its tensors; everything beside tensors and containers stays what it is."""
    return trees.map_tensors(torch.clone, tree)


def same(tree: Any, other: Any) -> bool:
    """Whether two trees have the same structure, and equal leaves to the bit."""
    leaves, structure = trees.flatten(tree)
    others, other_structure = trees.flatten(other)
    return structure == other_structure and all(map(_equal, leaves, others))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return a is b or bool(a == b)
