"""Every likelihood against its distribution: loss, metric, curvature at the outputs and in the parameters."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import nn
from torch.func import functional_call

from fl_lightning import Task, measure
from fl_lightning.curvature import full, gauss_newton, last_layer
from fl_lightning.curvature.fisher import diagonal_fisher
from fl_lightning.curvature.kronecker_factors import factors
from fl_lightning.curvature.per_sample import squared_gradients
from fl_lightning.curvature.softmax_hessian import class_major_order
from fl_lightning.data.batches import ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.metrics import scores
from fl_lightning.models.likelihoods import PADDING, Binary, Classification, MultiLabel, Regression, Tokens
from fl_lightning.params import flatten, unflatten
from tests.support.tasks import TASKS, case, loss_of

OTHERS = TASKS[1:]


def outputs_and_targets(task):
    problem = case(task)
    x, y = problem.dataset.train_x, problem.dataset.train_y
    return problem.dataset.likelihood, problem.model(x).detach(), y


def curvature_by_autograd(task, f, y):
    """d^2 loss / d f^2 of one sample, as a matrix."""
    flat = f.flatten()
    return torch.autograd.functional.hessian(lambda v: loss_of(task, v.view(f.shape), y), flat)


@pytest.mark.parametrize("task", TASKS)
def test_losses_are_those_of_the_distribution(task):
    likelihood, f, y = outputs_and_targets(task)
    expected = torch.stack([loss_of(task, f[i], y[i]) for i in range(len(y))])
    assert torch.allclose(likelihood(f, y, reduction="none"), expected, atol=1e-14)
    assert torch.allclose(likelihood(f, y), expected.mean(), atol=1e-14)
    assert torch.allclose(likelihood(f, y, reduction="sum"), expected.sum(), atol=1e-13)


@pytest.mark.parametrize("task", TASKS)
def test_curvature_at_the_outputs_is_the_second_derivative(task):
    likelihood, f, y = outputs_and_targets(task)
    size = f[0].numel()
    expected = torch.stack([curvature_by_autograd(task, f[i], y[i]) for i in range(len(y))])
    unit = torch.eye(size, dtype=f.dtype).view(*f.shape[1:], size).expand(len(f), *f.shape[1:], size)
    product = likelihood.product(f, y, unit).reshape(len(f), size, size)
    assert torch.allclose(product, expected, atol=1e-13)
    roots = torch.stack(list(likelihood.roots(f, y))).flatten(2)
    assert torch.allclose(torch.einsum("kia,kib->iab", roots, roots), expected, atol=1e-13)
    vectors = torch.randn(f.shape, generator=torch.Generator().manual_seed(2), dtype=f.dtype)
    quadratic = torch.einsum("ia,iab,ib->", vectors.flatten(1), expected, vectors.flatten(1))
    assert float(likelihood.quadratic(f, y, vectors)) == pytest.approx(float(quadratic), rel=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_sampled_slopes_have_the_curvature_as_second_moment(task):
    likelihood, f, y = outputs_and_targets(task)
    f, y, draws = f[:2], y[:2], 20_000
    stream = torch.Generator().manual_seed(3)
    uniform = torch.rand(draws, 2, likelihood.num_draws(f), generator=stream, dtype=torch.float64)
    many, targets = f.repeat(draws, *[1] * (f.dim() - 1)), y.repeat(draws, *[1] * (y.dim() - 1))
    slopes = likelihood.sampled(many, targets, uniform.flatten(0, 1)).view(draws, 2, -1)
    expected = torch.stack([curvature_by_autograd(task, f[i], y[i]) for i in range(2)])
    assert slopes.mean(0).abs().max() < 0.05
    assert (torch.einsum("sia,sib->iab", slopes, slopes) / draws - expected).abs().max() < 0.06


def by_hand(task, problem):
    """(1/m) sum_i J_i^T H_i J_i, sample by sample."""
    model, params = problem.model, {name: p.detach() for name, p in problem.model.named_parameters()}
    total = 0.0
    for x, y in zip(problem.dataset.train_x, problem.dataset.train_y, strict=True):

        def f(v, x=x):
            return functional_call(model, unflatten(v, params), (x[None],))[0]

        jacobian = torch.autograd.functional.jacobian(f, flatten(params)).flatten(0, -2)
        total = total + jacobian.T @ curvature_by_autograd(task, f(flatten(params)).detach(), y) @ jacobian
    return total / len(problem.dataset.train_y)


@pytest.mark.parametrize("task", OTHERS)
def test_the_gauss_newton_matrix_follows_the_likelihood(task, monkeypatch):
    problem = case(task)
    expected, workbench = by_hand(task, problem), problem.task()
    x, y = problem.dataset.train_x, problem.dataset.train_y
    assert (gauss_newton.matrix(workbench, workbench.initial, x, y) - expected).abs().max() < 1e-14
    monkeypatch.setattr(gauss_newton, "LARGEST_BLOCK", 1)
    data = ClientData(0, problem.dataset, torch.arange(len(y)), torch.float64)
    assert (full.at(workbench, workbench.initial, data) - expected).abs().max() < 1e-14
    vector = unflatten(torch.linspace(-1, 1, len(expected), dtype=torch.float64), workbench.initial.params)
    (found,) = gauss_newton.quadratics(workbench, workbench.initial, data.blocks(4), [vector])
    assert found == pytest.approx(float(flatten(vector) @ expected @ flatten(vector)), rel=1e-12)


def test_the_fisher_of_a_gaussian_and_of_a_bernoulli_by_hand():
    x = torch.tensor([[2.0, -1.0], [0.5, 3.0]], dtype=torch.float64)
    tilde = torch.cat([x, torch.ones(2, 1, dtype=torch.float64)], 1)
    model = nn.Linear(2, 1).double()
    for likelihood, h in ((Regression(0.5), torch.tensor([4.0, 4.0])), (Binary(), model(x).sigmoid()[:, 0])):
        h = h.double() * (1 - h.double()) if isinstance(likelihood, Binary) else h.double()
        y = torch.zeros(2, dtype=torch.long) if isinstance(likelihood, Binary) else torch.zeros(2, dtype=torch.float64)
        task = Task(model, likelihood)
        expected = sum(h[i] * torch.outer(tilde[i], tilde[i]) for i in range(2)) / 2
        assert torch.allclose(gauss_newton.matrix(task, task.initial, x, y), expected.detach(), atol=1e-15)


@pytest.mark.parametrize("task", OTHERS)
def test_squares_of_single_samples_follow_the_likelihood(task):
    problem = case(task)
    workbench = problem.task()
    params = {name: p.detach() for name, p in problem.model.named_parameters()}
    squares = 0.0
    for x, y in zip(problem.dataset.train_x, problem.dataset.train_y, strict=True):

        def loss(v, x=x, y=y):
            return loss_of(task, functional_call(problem.model, unflatten(v, params), (x[None],))[0], y)

        squares = squares + torch.autograd.functional.jacobian(loss, flatten(params)).square()
    expected = squares / len(problem.dataset.train_y)
    found = squared_gradients(workbench, workbench.initial, problem.dataset.train_x, problem.dataset.train_y)
    assert torch.allclose(flatten(found), expected, atol=1e-15)
    data = ClientData(0, problem.dataset, torch.arange(len(problem.dataset.train_y)), torch.float64)
    offline = diagonal_fisher(workbench, workbench.initial, data, "per_sample", None)
    assert torch.allclose(flatten(offline), expected, atol=1e-15)


@pytest.mark.parametrize("task", OTHERS)
def test_kronecker_factors_of_one_sample_are_the_exact_block_of_the_last_layer(task):
    problem = case(task)
    workbench = problem.task()
    place = torch.tensor([0 if task != "tokens" else 2])  # of tokens, a sample with one position that counts
    data = ClientData(0, problem.dataset, place, torch.float64)
    found = factors(workbench, workbench.initial, data, "exact")
    names = [name for name in workbench.names if not name.startswith("0.")] if task != "tokens" else workbench.names
    weight, bias = names[-2:]
    size = sum(workbench.initial.params[name].numel() for name in (weight, bias))
    x, y = data.fetch(place)
    matrix = gauss_newton.matrix(workbench, workbench.initial, x, y)[-size:, -size:]
    if task != "tokens":
        outputs = len(workbench.initial.params[bias])
        whole = torch.kron(found.gradients[weight], found.inputs[weight])
        order = class_major_order(outputs, found.inputs[weight].shape[0] - 1)
        assert torch.allclose(whole[order][:, order], matrix, atol=1e-15)
    else:  # the mean over positions of G, times the sum over positions of A: only its trace is exact
        positions = problem.dataset.train_x.shape[1]
        assert float(found.gradients[weight].trace()) * positions == pytest.approx(
            float(torch.einsum("kk->", matrix[-3:, -3:])), rel=1e-12
        )


@pytest.mark.parametrize("task", TASKS)
def test_the_last_layer_alone(task):
    problem = case(task)
    workbench = problem.task()
    x, y = problem.dataset.train_x, problem.dataset.train_y
    inputs = nn.Sequential(*list(problem.model)[:-1])(x).detach()
    tilde = torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)
    own = {name: workbench.initial.params[name] for name in workbench.names[-2:]}
    rows = last_layer.rows(problem.dataset.likelihood, tilde, problem.model(x).detach(), y)
    found = sum(torch.einsum("nkl,ni,nj->kilj", h / len(y), a, a) for a, h in rows)
    size, outputs = len(flatten(own)), tilde.shape[-1]
    places = torch.arange(size).view(-1, outputs)  # a row for each output: its weights, then its bias
    order = torch.cat([places[:, :-1].flatten(), places[:, -1]])
    expected = gauss_newton.matrix(workbench, workbench.initial, x, y)[-size:, -size:]
    assert (found.reshape(size, size)[order][:, order] - expected).abs().max() < 1e-14


@pytest.mark.parametrize("task", TASKS)
def test_metrics_do_not_depend_on_the_blocks(task, monkeypatch):
    problem = case(task)
    (whole,) = scores.score(problem.task(), [problem.task().initial], problem.dataset, calibrated=1)
    monkeypatch.setattr(scores, "BLOCK", 2)
    (parts,) = scores.score(problem.task(), [problem.task().initial], problem.dataset, calibrated=1)
    assert parts.accuracy == pytest.approx(whole.accuracy, rel=1e-12)
    assert parts.nll == pytest.approx(whole.nll, rel=1e-12)
    assert (parts.brier is None) == (whole.brier is None) == (task == "regression")
    assert (parts.others or {}) == pytest.approx(whole.others or {})


def test_metrics_are_those_of_scikit_learn():
    stream = torch.Generator().manual_seed(0)
    f = torch.randn(50, 3, generator=stream, dtype=torch.float64)
    real = f + torch.randn(50, 3, generator=stream, dtype=torch.float64)
    real[:, 2] = 1.0  # a target that does not vary
    found = Regression().metrics(Regression().tally(f, real), real)
    assert found["R2"] == pytest.approx(sklearn_metrics.r2_score(real, f))
    assert found["RMSE"] == pytest.approx(np.sqrt(sklearn_metrics.mean_squared_error(real, f)))
    labels = torch.randint(2, (50, 3), generator=stream)
    found = MultiLabel().metrics(MultiLabel().tally(f, labels), labels)
    assert found["accuracy"] == pytest.approx(1 - sklearn_metrics.hamming_loss(labels, f > 0))
    assert found["F1"] == pytest.approx(sklearn_metrics.f1_score(labels, f > 0, average="micro"))
    yes = labels[:, 0]
    found = Binary().metrics(Binary().tally(f[:, :1], yes), yes)
    assert found == {"accuracy": pytest.approx(sklearn_metrics.accuracy_score(yes, f[:, 0] > 0))}


def test_padding_counts_nowhere():
    problem = case("tokens")
    f, y = problem.model(problem.dataset.test_x).detach(), problem.dataset.test_y
    counts = y != PADDING
    found = Tokens().metrics(Tokens().tally(f, y), y)["accuracy"]
    assert found == pytest.approx(float((f.argmax(2) == y)[counts].double().mean()))
    other = f.clone()
    other[~counts] += 100 * torch.randn(int((~counts).sum()), 3, dtype=torch.float64)
    assert torch.equal(Tokens()(other, y, reduction="none"), Tokens()(f, y, reduction="none"))
    assert Tokens()(f[:1], torch.full_like(y[:1], PADDING)).item() == 0.0
    alike = y[counts.all(1)]
    torch_loss = nn.functional.cross_entropy(f[counts.all(1)].flatten(0, 1), alike.flatten())
    assert torch.allclose(Tokens()(f[counts.all(1)], alike), torch_loss, atol=1e-15)


def test_what_a_round_of_regression_measures():
    problem = case("regression")
    record = problem.run(FedAvg())[-1]
    found = measure(FedAvg(), problem.task(), problem.dataset, record)
    with torch.no_grad():
        outputs = functional_call(problem.model, record.after.state.params, (problem.dataset.test_x,))
    assert found.metrics["GA"] == pytest.approx(sklearn_metrics.r2_score(problem.dataset.test_y, outputs))
    assert {"RMSE", "NLL"} <= found.metrics.keys()
    assert not {"Brier", "ECE"} & found.metrics.keys()
    assert len(found.clients["R2"]) == 2
    assert "accuracy" not in found.clients


def test_data_are_divided_by_what_stands_for_a_class():
    y = torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0, 9.0, 8.0, 7.0, 6.0, 0.0])
    assert Regression().strata(y).tolist() == (y >= 5).long().tolist()
    assert Regression().strata(torch.arange(100.0)).bincount().tolist() == [10] * 10
    assert MultiLabel().strata(torch.tensor([[0, 1], [1, 1], [0, 0]])).tolist() == [1, 0, 2]
    assert Binary().strata(torch.tensor([True, False])).tolist() == [1, 0]
    assert Tokens().strata(torch.zeros(2, 3)) is None


def test_losses_of_your_own_are_taken_as_they_are():
    assert type(Task(nn.Linear(2, 2), nn.functional.cross_entropy).likelihood) is Classification
    task = Task(nn.Linear(2, 2), nn.functional.multi_margin_loss)
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    assert torch.equal(task.loss(task.initial, x, y), nn.functional.multi_margin_loss(task.model(x), y))
    assert not task.likelihood.knows_curvature
    with pytest.raises(UserError, match="curvature of the outputs is not known for a loss function of your own"):
        gauss_newton.matrix(task, task.initial, x, y)


@pytest.mark.parametrize(
    ("likelihood", "y", "number", "message"),
    [
        (Classification(), torch.zeros(4), 2, "use .long.. on labels, or name the likelihood"),
        (Binary(), torch.tensor([0, 1, 2, 0]), 1, "nothing but 0 and 1, got 2"),
        (Binary(), torch.zeros(4, 2), 1, r"use y\[:, 0\], or MultiLabel"),
        (MultiLabel(), torch.zeros(4, 2), 3, "0 or 1 for each of 3 labels"),
        (Regression(), torch.zeros(4, dtype=torch.long), 1, "use .float"),
        (Regression(), torch.zeros(4, 2), 1, "number of targets of a regression, 2 in train_y, got 1"),
        (Regression(), torch.tensor([0.0, 1.0, float("nan"), 0.0]), 1, "finite numbers, but sample 2"),
        (Tokens(), torch.zeros(4, dtype=torch.long), 2, "a label of type torch.long for each position"),
        (Tokens(), torch.full((4, 2), PADDING), 2, "nothing but padding"),
        (Tokens(), torch.full((4, 2), 2), 2, "labels 0 to 1, got 2 to 2"),
    ],
)
def test_targets_that_do_not_fit_are_refused(likelihood, y, number, message):
    x = torch.zeros(4, 2)
    with pytest.raises(UserError, match=message) as caught:
        Dataset(x, y, x, y, number, likelihood=likelihood)
    assert "\n" not in str(caught.value)


def test_noise_must_be_positive():
    with pytest.raises(UserError, match="standard deviation > 0, got 0"):
        Regression(noise=0.0)
