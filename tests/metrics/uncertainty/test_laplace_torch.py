"""Agreement with laplace-torch, on the pooled data of one and of several clients."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.metrics.uncertainty.test_posterior import clients_of, final_round, posterior_of, problem

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports
    import laplace
    from laplace import curvature

pytestmark = pytest.mark.filterwarnings("ignore")
PARTS = {"one client": [range(40)], "four clients": [range(3), range(3, 20), range(20, 31), range(31, 40)]}


def plain(task):
    """The network as laplace-torch takes it; its backends leave hooks behind, so each has a copy."""
    return copy.deepcopy(task.model).eval()


def fitted(task, dataset, cls, backend, **options):
    found = cls(plain(task), "classification", backend=backend, prior_precision=2.0, **options)
    found.fit(DataLoader(TensorDataset(dataset.train_x, dataset.train_y), batch_size=16))
    return found


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize(("slopes", "backend"), [("exact", "BackPackGGN"), ("empirical", "BackPackEF")])
def test_the_diagonal_is_theirs(parts, slopes, backend):
    task, dataset = problem()
    theirs = fitted(task, dataset, laplace.DiagLaplace, getattr(curvature, backend))
    ours = final_round(task, task.initial, clients_of(dataset, *parts), "diagonal", slopes)
    flat = torch.cat([value.flatten() for value in ours.curvature.values()])
    torch.testing.assert_close(40 * flat, theirs.H, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_kronecker_factors_are_theirs(parts, model):
    """They treat weight and bias as independent blocks, so the comparison is of the weights' block."""
    task, dataset = problem(model)
    theirs = fitted(task, dataset, laplace.KronLaplace, curvature.AsdlGGN)
    ours = final_round(task, task.initial, clients_of(dataset, *parts), "kron", "exact").curvature
    weights = [name for name in task.initial.params if name.endswith("weight")]
    blocks = [block for block in theirs.H_facs.kfacs if len(block) == 2]
    for name, (slopes, inputs) in zip(weights, blocks, strict=True):
        a = ours[f"inputs:{name}"]
        expected = torch.kron(slopes, inputs)
        torch.testing.assert_close(
            40 * torch.kron(ours[f"slopes:{name}"], a[:-1, :-1]), expected, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_the_full_matrix_is_theirs_up_to_their_rounding(parts):
    task, dataset = problem()
    theirs = fitted(task, dataset, laplace.FullLaplace, curvature.BackPackGGN)
    ours = final_round(task, task.initial, clients_of(dataset, *parts), "full", "exact")
    torch.testing.assert_close(40 * ours.curvature["matrix"], theirs.H, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("form", "cls"), [("diagonal", "DiagLaplace"), ("full", "FullLaplace")])
def test_the_probit_prediction_is_theirs(form, cls):
    task, dataset = problem()
    theirs = fitted(task, dataset, getattr(laplace, cls), curvature.BackPackGGN)
    ours = posterior_of(task, dataset, form, PARTS["four clients"], tau=2.0)
    expected = theirs(dataset.test_x, pred_type="glm", link_approx="probit")
    torch.testing.assert_close(ours.predict(dataset.test_x).probabilities, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_the_last_layer_is_theirs(parts):
    task, dataset = problem()
    model = nn.Sequential(*plain(task))
    theirs = laplace.FullLLLaplace(
        model, "classification", backend=curvature.BackPackGGN, prior_precision=2.0, last_layer_name="3"
    )
    theirs.fit(DataLoader(TensorDataset(dataset.train_x, dataset.train_y), batch_size=16))
    ours = posterior_of(task, dataset, "last_layer", parts, tau=2.0)
    matrix = final_round(task, task.initial, clients_of(dataset, *parts), "last_layer", "exact").curvature["matrix"]
    torch.testing.assert_close(40 * matrix, theirs.H, rtol=1e-6, atol=1e-7)
    expected = theirs(dataset.test_x, pred_type="glm", link_approx="probit")
    torch.testing.assert_close(ours.predict(dataset.test_x).probabilities, expected, rtol=1e-6, atol=1e-7)


def test_the_marginal_likelihood_is_theirs():
    task, dataset = problem()
    theirs = fitted(task, dataset, laplace.FullLaplace, curvature.BackPackGGN)
    ours = posterior_of(task, dataset, "full", tau=2.0)
    assert ours.log_marginal_likelihood() == pytest.approx(float(theirs.log_marginal_likelihood()), rel=1e-6)
