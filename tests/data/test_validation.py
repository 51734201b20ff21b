"""Validation data: stratified, apart from the holdout and all clients, and nothing changes where there are none."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from fl_lightning import experiment
from fl_lightning.data.partition import Split, held_out, partition, subset_indices, validating
from fl_lightning.errors import UserError
from fl_lightning.loop import federate
from fl_lightning.metrics.scores import score
from fl_lightning.models.task import Weights
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity
from fl_lightning.runs.problem import problem_of
from tests.support.splits import Problem, problems

LABELS = torch.arange(10).repeat(60)[torch.randperm(600, generator=torch.Generator().manual_seed(0))]
SMALL = {"data": "digits", "data.subset": 0.3, "data.clients": 3, "model": "softmax", "engine": "functional"}


@given(problems(holdout=True))
@settings(max_examples=60, deadline=None)
def test_without_validation_data_the_partition_is_the_same_to_the_bit(problem: Problem) -> None:
    labels, split, seed, owners = problem
    assert len(validating(labels, split, seed)) == 0
    parts = partition(labels, split, seed, owners)
    assert torch.equal(
        torch.cat([held_out(labels, split, seed), *parts]).sort().values, subset_indices(labels, split.subset)
    )


@pytest.mark.parametrize("kind", ["dirichlet", "iid", "shards"])
@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_nobody_else_has_them_and_nothing_is_lost(kind, holdout):
    split = Split(clients=4, partition=kind, subset=0.5, holdout=holdout, validation=0.25)
    parts = [validating(LABELS, split, 1), held_out(LABELS, split, 1), *partition(LABELS, split, 1)]
    assert torch.equal(torch.cat(parts).sort().values, subset_indices(LABELS, 0.5))
    assert len(parts[0]) == round(0.25 * 300)


def test_they_are_stratified_drawn_by_the_seed_and_leave_the_holdout_as_it_is():
    labels = torch.tensor([0] * 300 + [1] * 100)
    split = Split(clients=2, holdout=0.1, validation=0.1)
    drawn = validating(labels, split, 0)
    assert labels[drawn].bincount().tolist() == [31, 9]  # of the 280 and 80 that the balanced holdout leaves
    assert torch.equal(drawn, validating(labels, replace(split, alpha=9.0, clients=5), 0))
    assert not torch.equal(drawn, validating(labels, split, 1))
    assert torch.equal(held_out(labels, split, 0), held_out(labels, replace(split, validation=0.0), 0))
    assert len(validating(labels, Split(validation=1e-9), 0)) == 1


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"validation": 1.0}, r"data\.validation must be >= 0 and < 1, got 1"),
        ({"validation": -0.1}, r"data\.validation must be >= 0 and < 1"),
        ({"validation": 0.5, "holdout": 0.5}, r"data\.holdout \+ data\.validation must be < 1"),
    ],
)
def test_shares_that_leave_nothing_are_refused(shares, message):
    with pytest.raises(UserError, match=message):
        Split(**shares)


def test_too_many_clients_for_what_is_left_names_the_remedy():
    with pytest.raises(UserError, match=r"lower data\.validation"):
        partition(LABELS[:20], Split(clients=15, validation=0.5), 0)


@pytest.mark.slow
def test_every_round_measures_the_servers_model_on_them(out):
    config = configure({**SMALL, "data.validation": 0.2, "federation.rounds": 2, "method": "fedavg"})
    result = experiment.run(config, out)
    assert all("GA_validation" in one.metrics for one in result.history)
    problem = problem_of(config)
    dataset = problem.dataset
    places = validating(dataset.train_y, config.split, config.seed)
    assert torch.equal(dataset.validation, places)
    assert not set(places.tolist()) & set(torch.cat(list(problem.clients)).tolist())
    swapped = replace(dataset, test_x=dataset.train_x[places], test_y=dataset.train_y[places])
    records = federate(config.method, problem, config.training, config.federation, config.engine)
    for record, measured in zip(records, result.history, strict=True):
        server = Weights(record.after.state.params, record.after.buffers)
        (expected,) = score(problem.task, [server], swapped)
        assert measured.metrics["GA_validation"] == expected.accuracy


def test_runs_without_them_are_the_runs_they_were():
    assert "data.validation" in configure(SMALL).flat()
    assert identity(configure(SMALL)) == identity(configure({**SMALL, "data.validation": 0}))
    assert identity(configure(SMALL)) != identity(configure({**SMALL, "data.validation": 0.1}))
    assert problem_of(configure(SMALL)).dataset.validation is None
