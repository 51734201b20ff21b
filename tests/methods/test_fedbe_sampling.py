"""FedBE's teachers: models drawn from a Gaussian or Dirichlet over the clients' models."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_lightning.method import Cohort, Server
from fl_lightning.methods.fedbe import FedBE, Report, State
from fl_lightning.training import Training

# A student that moves visibly, in batches that do not divide the 12 held-out samples: 18 steps, SWA at 8, 12 and 16.
LIVELY = FedBE(samples=3, server_epochs=6, server_lr=0.2, server_batch_size=5, swa_start=5, swa_frequency=4)
SAMPLERS = ("gaussian_paper", "gaussian_code", "dirichlet", "dirichlet_weighted")

# --- samplers ---------------------------------------------------------------------------------------------------------


def toy_round(models, weights, start=None, seed=0, round=1):
    """A round whose models are plain vectors; no network is needed to draw samples."""
    start = {"w": torch.zeros_like(models[0])} if start is None else start
    server = Server(task=None, sizes=(1,) * len(models), holdout=None, seed=seed)
    members = tuple(range(len(models)))
    ones = (1,) * len(models)
    cohort = Cohort(round, members, tuple(weights), tuple(weights), ones, len(models), Training(), server)
    return State(start), cohort, [Report({"w": model}) for model in models]


def drawn(method, *arguments, **options):
    method = replace(method, mean_teaches=False, clients_teach=False)
    return torch.stack([model["w"] for model in method.teachers(*toy_round(*arguments, **options))])


def test_the_teachers_are_samples_then_average_then_clients():
    models, weights = [torch.tensor([0.0, 4.0]), torch.tensor([2.0, 0.0])], (0.75, 0.25)
    teachers = [teacher["w"].tolist() for teacher in FedBE(samples=2).teachers(*toy_round(models, weights))]
    assert teachers[2:] == [[0.5, 3.0], [0.0, 4.0], [2.0, 0.0]]
    assert len(list(FedBE(samples=2, mean_teaches=False).teachers(*toy_round(models, weights)))) == 4
    assert len(list(FedBE(samples=2, clients_teach=False).teachers(*toy_round(models, weights)))) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_models_give_samples_equal_to_their_average(dtype):
    model = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=dtype)
    weights = (0.3, 0.3, 0.4)
    near = drawn(FedBE(samples=4), [model] * 3, weights)
    assert near.dtype == dtype
    assert (near - model).abs().max() < 1e-14  # in float32: exactly
    for sampler in ("dirichlet", "dirichlet_weighted"):
        assert (drawn(FedBE(sampler=sampler), [model] * 3, weights) - model).abs().max() < 1e-14
    # The published code's floor on the variance scatters them all the same.
    assert (drawn(FedBE(sampler="gaussian_code"), [model] * 3, weights) - model).abs().max() > 1e-4


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_models_that_did_not_move_give_finite_samples(sampler):
    start = {"w": torch.ones(4)}
    samples = drawn(FedBE(sampler=sampler), [torch.ones(4)] * 2, (0.5, 0.5), start=start)
    assert torch.equal(samples, torch.ones(10, 4))


def test_the_gaussian_has_the_weighted_moments():
    models = [torch.tensor([0.0, 1.0, -2.0]), torch.tensor([4.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 5.0])]
    weights = (0.5, 0.2, 0.3)
    samples = drawn(FedBE(samples=6_000), [model.double() for model in models], weights)
    mean = sum(w * model for w, model in zip(weights, models, strict=True))
    variance = sum(w * (model - mean) ** 2 for w, model in zip(weights, models, strict=True))
    assert torch.allclose(samples.mean(0), mean.double(), atol=0.1)
    assert torch.allclose(samples.var(0), variance.double(), rtol=0.08, atol=1e-12)
    correlation = torch.corrcoef(samples[:, [0, 2]].T)[0, 1]
    assert abs(correlation) < 0.05


@pytest.mark.parametrize("concentration", [1e-6, 0.1, 1.0, 100.0])
def test_dirichlet_coefficients_are_a_mixture(concentration):
    """Of unit vectors as models, a sample is the vector of coefficients itself."""
    units, weights = list(torch.eye(3, dtype=torch.float64)), (0.6, 0.3, 0.1)
    plain = drawn(FedBE("dirichlet", 500, concentration), units, weights)
    weighted = drawn(FedBE("dirichlet_weighted", 500, concentration), units, weights)
    for shares in (plain, weighted):
        assert shares.min() >= -1e-15
        assert (shares.sum(1) - 1).abs().max() < 1e-12
    products = plain * torch.tensor(weights, dtype=torch.float64)
    assert torch.allclose(weighted, products / products.sum(1, keepdim=True), atol=1e-12)
    assert torch.allclose(plain.mean(0), torch.full((3,), 1 / 3, dtype=torch.float64), atol=0.08)


def test_samples_are_keyed_by_seed_round_and_number():
    models, weights = [torch.zeros(5), torch.ones(5)], (0.5, 0.5)
    for sampler in SAMPLERS:
        method = FedBE(sampler=sampler, samples=3)
        once = drawn(method, models, weights)
        torch.rand(3)
        np.random.rand(3)
        assert torch.equal(drawn(method, models, weights), once)
        assert torch.equal(drawn(replace(method, samples=7), models, weights)[:3], once)
        others = [drawn(method, models, weights, seed=1), drawn(method, models, weights, round=2), once.roll(1, 0)]
        assert all((other - once).abs().amax(1).min() > 1e-6 for other in others)
