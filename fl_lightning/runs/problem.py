"""A configuration made real: its data, the samples of each client, and the model; the only place that builds them."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning import discovery, streams
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.feature_skew import skew
from fl_lightning.data.model_checks import UNFIT, in_words, reason
from fl_lightning.data.partition import (
    check_divisible,
    counted,
    divide,
    held_out,
    remaining_classes,
    subset_indices,
    validating,
)
from fl_lightning.data.shares import Shares, client_test_sets
from fl_lightning.errors import UserError, require
from fl_lightning.loop import Problem
from fl_lightning.method import HasPosterior, OwnNetwork
from fl_lightning.models.inputs import Inputs, part
from fl_lightning.models.lora import adapt
from fl_lightning.models.task import Task
from fl_lightning.models.tuning import Tuning, fit, freeze, head_of, parameters_of, standing_still, with_new_head
from fl_lightning.runs import start_weights
from fl_lightning.runs.config.compute import Compute, Model
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.saved_model import start_from
from fl_lightning.system.plugins import wrong


class Division(NamedTuple):
    """The training samples of each client.

    Attributes:
        held: All samples of each client.
        clients: Those that it trains on.
        tests: Its own test set, if clients have any.
    """

    held: Shares
    clients: Shares
    tests: Shares | None


def problem_of(config: RunConfig) -> Problem:
    """Load the data, divide them, and make the model.

    Raises:
        UserError: If the data are missing, or the settings do not go together.
    """
    config.compute.apply()
    dataset = config.source.load()
    if not isinstance(dataset, Dataset):
        raise wrong(config.source, "load", "a Dataset", type(dataset).__name__)
    division = divided(config, dataset)
    holdout = held_out(dataset.strata, config.split, config.seed)
    dataset = _as_used(config, skew(dataset, division.held, counted(config.split, dataset.owners), config.seed))
    if division.tests is not None:
        dataset = replace(dataset, client_tests=division.tests)
    require(
        config.model.tuning.train == "all" or not isinstance(config.method, OwnNetwork),
        f"{config.names['method']} trains a network of its own, made from the whole model, so that no part of it can "
        "be frozen; use --model.train all, or another method",
    )
    start = config.model.tuning.weights
    weights = None if start is None else start_weights.read(start, config.model.options)
    model, has_posterior = config.model, isinstance(config.method, HasPosterior)
    if model.lora.freeze_a is None:
        model = replace(model, lora=replace(model.lora, freeze_a=has_posterior))
    require(
        bool(model.lora.freeze_a) or not has_posterior or model.tuning.train != "lora",
        "model.lora.freeze_a false adds what the mean of the clients' adapters misses, expected a method whose server "
        f"averages models, got {config.names['method']}, which merges posteriors; use --model.lora.freeze_a true",
    )
    task = build_task(model, dataset, config.seed, config.compute, weights)
    if config.federation.start is not None:
        start_from(config.federation.start, config.method, task)
    return Problem(task, dataset, division.clients, holdout, config.seed)


def divided(config: RunConfig, dataset: Dataset) -> Division:
    """Divide the training samples among the clients as a run does."""
    check_divisible(dataset, config.split)
    held = divide(dataset.strata, config.split, config.seed, dataset.owners)
    if not config.split.client_test:
        return Division(held, held, None)
    return Division(held, *client_test_sets(dataset.strata, held, config.split.client_test, config.seed))


def _as_used(config: RunConfig, dataset: Dataset) -> Dataset:
    """The dataset with its validation samples, and the part of its test set that counts."""
    split = config.split
    if split.validation > 0:
        dataset = replace(dataset, validation=validating(dataset.strata, split, config.seed))
    if split.drop_classes:
        dataset = dataset.tested_on(remaining_classes(dataset.test_y, split))
    if split.test_subset < 1:
        dataset = dataset.tested_on(subset_indices(dataset.test_strata, split.test_subset))
    return dataset


def build_task(
    model: Model, dataset: Dataset, seed: int, compute: Compute, weights: Mapping[str, Tensor] | None = None
) -> Task:
    """The task, with initial weights that depend on the seed alone, or with those that are given."""
    mixed = compute.mixed  # before anything is computed in this process
    cls = discovery.find("models", model.name)
    positional, named = _of_data(model.name, cls, dataset)
    try:
        with streams.global_noise(seed, "weights"):  # drawn in float32 on the CPU: the same for every device
            network = cls(*positional, **named, **model.options)
    except UNFIT as error:
        raise UserError(
            f"the model {model.name} cannot be made for {in_words(dataset)} and {dataset.num_classes} outputs "
            f"({reason(error)}); use another --model, or correct it"
        ) from error
    still: frozenset[str] = frozenset()
    if weights is not None or model.tuning != Tuning():
        x = dataset.inputs(part(dataset.train_x, slice(1)), torch.float32)
        try:
            network, still = _tuned(network, model, weights, x, dataset.num_classes, seed)
        except UNFIT as error:
            raise UserError(f"the model {model.name} cannot take {in_words(dataset)} ({reason(error)})") from error
    network = network.to(compute.torch_device, compute.dtype)
    return Task.of(network, likelihood=dataset.likelihood, mixed=mixed, still=still)


def _tuned(
    network: nn.Module, model: Model, weights: Mapping[str, Tensor] | None, x: Inputs, outputs: int, seed: int
) -> tuple[nn.Module, frozenset[str]]:
    """A network that starts from weights, of which a part is trained; and the modules that stand still."""
    train = model.tuning.train
    head = head_of(network, x) if model.tuning.new_head else None
    if weights is not None:
        fit(network, weights, str(model.tuning.weights), without=head)
    if head is not None:
        with streams.global_noise(seed, "head"):
            network = with_new_head(network, head, outputs)
    if train == "all":
        return network, frozenset()
    trained = parameters_of(network, "head", x) if head is not None else set()
    if train == "lora":
        with streams.global_noise(seed, "lora"):
            trained |= adapt(network, model.lora, bool(model.lora.freeze_a), without=head)
    else:
        trained |= parameters_of(network, train, x)
    freeze(network, trained)
    return network, standing_still(network, x)


def _of_data(name: str, cls: type[Any], dataset: Dataset) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model's constructor learns of the data: its arguments without a default, or those it takes as `*args`.

    Two of them are the shape of an input and the number of classes, whatever they are called; a LightningModule that
    was written for one problem has none. `vocabulary` and `per_token` are asked for by those that read tokens.

    Raises:
        UserError: If the constructor asks for anything else, or for tokens where there are none.
    """
    known = inspect.signature(cls).parameters.values()
    sizes = (dataset.shape, dataset.num_classes)
    asked = [one for one in known if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    of_tokens = [one.name for one in asked if one.name in ("vocabulary", "per_token")]
    of_sizes = [one.name for one in asked if one.name not in of_tokens]
    if not asked and any(one.kind is one.VAR_POSITIONAL for one in known):
        return sizes, {}
    require(
        len(of_sizes) in (0, 2),
        f"the model {name} must take (shape, num_classes), or have defaults for all its arguments, got "
        f"({', '.join(of_sizes)}); give the others defaults, so that they become settings",
    )
    tokens = dataset.num_tokens if of_tokens else None
    if of_tokens and tokens is None:
        raise UserError(f"the model {name} reads tokens (whole numbers), got {in_words(dataset)}; use --model mlp")
    offered = {"vocabulary": tokens, "per_token": dataset.likelihood.task == "tokens"}
    return sizes if of_sizes else (), {key: offered[key] for key in of_tokens}
