"""A configuration made real: its data, who holds which of them, and the model; the only place that builds them."""

from dataclasses import replace
from typing import NamedTuple

from fl_lightning.data.client_test_sets import own_tests
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.feature_skew import skew
from fl_lightning.data.partition import (
    check_divisible,
    counted,
    divide,
    held_out,
    kept_classes,
    subset_indices,
    validating,
)
from fl_lightning.data.shares import Shares
from fl_lightning.loop import Problem
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.saved_model import start_from
from fl_lightning.system.plugins import wrong


class Division(NamedTuple):
    """Who holds which training samples.

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
    task = config.model.build(dataset, config.seed, config.compute)
    if config.federation.start is not None:
        start_from(config.federation.start, config.method, task)
    return Problem(task, dataset, division.clients, holdout, config.seed)


def divided(config: RunConfig, dataset: Dataset) -> Division:
    """Divide the training samples among the clients as a run does."""
    check_divisible(dataset, config.split)
    held = divide(dataset.strata, config.split, config.seed, dataset.owners)
    if not config.split.client_test:
        return Division(held, held, None)
    return Division(held, *own_tests(dataset.strata, held, config.split.client_test, config.seed))


def _as_used(config: RunConfig, dataset: Dataset) -> Dataset:
    """The dataset with its validation samples, and the part of its test set that counts."""
    split = config.split
    if split.validation > 0:
        dataset = replace(dataset, validation=validating(dataset.strata, split, config.seed))
    if split.drop_classes:
        dataset = dataset.tested_on(kept_classes(dataset.test_y, split))
    if split.test_subset < 1:
        dataset = dataset.tested_on(subset_indices(dataset.test_strata, split.test_subset))
    return dataset
