"""What a frozen network makes of the data, computed once: where the head alone is trained, a round costs the head only.

The head's inputs take the place of the images, and the head that of the network, under the names of the whole. Methods,
engines and metrics do not notice. Samples that are not in use are left out.
"""

import hashlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from fl_lightning.data.dataset import Dataset
from fl_lightning.loop import Problem
from fl_lightning.models.inputs import Inputs, each, part
from fl_lightning.models.task import Task
from fl_lightning.models.tuning import head_of
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.system import activity, memory

# Samples that the frozen network is shown at once.
BLOCK = 500
# The share of the free memory that features may take.
SHARE = 0.5


class Head(nn.Module):
    """A part of a network under the name that it has there."""

    def __init__(self, name: str, head: nn.Module) -> None:
        super().__init__()
        self.name = name
        *above, last = name.split(".")
        place: nn.Module = self
        for step in above:
            place.add_module(step, nn.Module())
            place = place.get_submodule(step)
        place.add_module(last, head)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.get_submodule(self.name)(x)
        return outputs


def with_features(config: RunConfig, problem: Problem) -> Problem:
    """The same problem for the head alone, on features; as it is, where more is trained or they do not fit."""
    task, dataset = problem.task, problem.dataset
    is_fixed = config.model.tuning.train == "head" and dataset.augment == "none" and task.mixed is None
    if not (is_fixed and config.compute.keep_features and task.step is None) or task.initial.buffers:
        return problem  # a head has no buffers: those of the network would be missing in what is saved
    first = part(dataset.train_x, slice(1))
    name = head_of(task.model, _on(dataset.inputs(first, task.dtype), task))
    example = _features(task, name, first, dataset)
    if not name or example is None:
        return problem
    number = len(dataset.train_y) + len(dataset.test_y)
    free = memory.available(task.device)
    if free is not None and number * example.numel() * task.dtype.itemsize > SHARE * free:
        return problem
    key = _key(config, problem, name)
    if key not in _latest:
        activity.say("computing the features of the frozen network")
        _latest.clear()
        _latest[key] = _of_training(problem, name), _of_test(task, name, dataset)
    train_x, test_x = _latest[key]
    head = Task(Head(name, deepcopy(task.model.get_submodule(name))), task.likelihood)
    alone = replace(dataset, train_x=train_x, test_x=test_x, vocabulary=None, columns=())
    return problem._replace(task=head, dataset=alone)


# Of the latest run of this process, for others that differ in the method or the seed.
_latest: dict[str, tuple[Tensor, Tensor]] = {}


def _key(config: RunConfig, problem: Problem, name: str) -> str:
    """A hash of all that features depend on: the frozen part, the data, and which samples are looked at."""
    said = [config.names["data"], config.source, config.source.fingerprint(), config.split.test_subset]
    said += [config.split.drop_classes, name, problem.task.dtype, problem.task.device]
    said += [config.names["model"], sorted(config.model.options.items())]  # the same weights with another activation
    if config.split.feature_skew != "none":
        said += [config.split, config.seed]
    found = hashlib.sha256(repr(said).encode())
    for key, value in problem.task.model.state_dict().items():
        if key.rpartition(".")[0] != name:
            found.update(value.cpu().numpy().tobytes())
    found.update(_used(problem).numpy().tobytes())
    return found.hexdigest()


def _of_training(problem: Problem, name: str) -> Tensor:
    """Of the training samples in use; zeros for the others."""
    task, dataset, places = problem.task, problem.dataset, _used(problem)
    made = [_of_block(task, name, part(dataset.train_x, block), dataset) for block in torch.split(places, BLOCK)]
    found = made[0].new_zeros(len(dataset.train_y), *made[0].shape[1:])
    found[places] = torch.cat(made)
    return found


def _of_test(task: Task, name: str, dataset: Dataset) -> Tensor:
    blocks = torch.split(torch.arange(len(dataset.test_y)), BLOCK)
    return torch.cat([_of_block(task, name, part(dataset.test_x, block), dataset) for block in blocks])


def _of_block(task: Task, name: str, raw: Inputs, dataset: Dataset) -> Tensor:
    found = _features(task, name, raw, dataset)
    assert found is not None
    return found


def _features(task: Task, name: str, raw: Inputs, dataset: Dataset) -> Tensor | None:
    """The inputs of the head for some samples; None if its outputs are not those of the network."""
    seen: list[Tensor] = []
    hook = task.model.get_submodule(name).register_forward_hook(lambda _, given, out: seen.extend((given[0], out)))
    try:
        with task.evaluating():
            outputs = task.outputs(_on(dataset.inputs(raw, task.dtype), task))
    finally:
        hook.remove()
    return seen[0] if len(seen) == 2 and torch.equal(seen[1], outputs) else None


def _on(x: Inputs, task: Task) -> Inputs:
    return each(lambda one: one.to(task.device), x)


def _used(problem: Problem) -> Tensor:
    """The training samples in use: those of clients and server, and those that choose settings."""

    def every() -> Iterator[Tensor]:
        yield from problem.clients
        yield problem.holdout
        yield from problem.dataset.client_tests or ()
        if problem.dataset.validation is not None:
            yield problem.dataset.validation

    used: Tensor = torch.unique(torch.cat([places.cpu() for places in every()]))
    return used
