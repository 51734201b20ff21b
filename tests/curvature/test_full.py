"""Full curvature against autograd, on small problems in float64."""

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call, vmap

from fl_lightning.curvature import full, gauss_newton, softmax_hessian
from fl_lightning.curvature.full import PathStep
from fl_lightning.data.batches import ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.models.networks.softmax import Softmax
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import flatten, unflatten
from tests.support.cases import network

CLASSES = 4


def dataset(samples=23, shape=(2, 3), seed=0):
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, *shape, generator=stream, dtype=torch.float64)
    x[:, 0, 0] = 0.7  # a constant pixel
    y = torch.randint(CLASSES, (samples,), generator=stream)
    return Dataset(x, y, x[:1], y[:1], CLASSES)


def softmax_task(seed=0, bias=True):
    model = Softmax((2, 3), CLASSES).double()
    if not bias:
        model.linear = nn.Linear(6, CLASSES, bias=False).double()
    return filled(Task(model), seed)


def filled(task, seed=0):
    return Task(with_weights(task.model, random_like(task.initial.params, seed)))


def with_weights(model, params):
    model.load_state_dict(params)
    return model


def random_like(params, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return {k: torch.randn(v.shape, generator=stream, dtype=torch.float64) for k, v in params.items()}


def client(data, indices=None):
    return ClientData(0, data, torch.arange(len(data.train_y)) if indices is None else indices, torch.float64)


def autograd_hessian(model, params, x, y):
    """Of a loss of one flat vector, sharing no code with the package."""

    def loss(vector):
        return nn.functional.cross_entropy(functional_call(model, unflatten(vector, params), (x,)), y)

    return hessian(loss, torch.cat([v.reshape(-1) for v in params.values()]))


@pytest.mark.parametrize("bias", [True, False])
def test_the_blocks_are_the_hessian_of_softmax_regression(bias):
    task, data = softmax_task(bias=bias), dataset()
    found = full.at(task, task.initial, client(data))
    expected = autograd_hessian(task.model, task.initial.params, data.train_x, data.train_y)
    assert (found - expected).abs().max() < 1e-15
    assert torch.equal(found, found.T)
    other_labels = autograd_hessian(task.model, task.initial.params, data.train_x, (data.train_y + 1) % CLASSES)
    assert torch.allclose(found, other_labels, atol=1e-14)


def test_blocks_of_samples_change_nothing(monkeypatch):
    task, data = softmax_task(), client(dataset())
    whole = full.at(task, task.initial, data)
    monkeypatch.setattr(softmax_hessian, "BLOCK", 5)
    assert torch.allclose(full.at(task, task.initial, data), whole, atol=1e-15)


def test_the_permutation_between_class_major_and_torch_order():
    """In class-major order the Hessian is a sum of Kronecker products, as the paper's formulas have it."""
    task, data = softmax_task(), dataset()
    x = torch.cat([data.train_x.flatten(1), torch.ones(len(data.train_x), 1, dtype=torch.float64)], dim=1)
    p = task.logits(task.initial, data.train_x).softmax(1).detach()
    class_major = sum(
        torch.kron(p_i.diag() - torch.outer(p_i, p_i), torch.outer(x_i, x_i)) for p_i, x_i in zip(p, x, strict=True)
    ) / len(x)
    order = softmax_hessian.class_major_order(CLASSES, 6)
    found = full.at(task, task.initial, client(data))
    assert torch.allclose(class_major[order][:, order], found, atol=1e-15)
    weight, bias = task.initial.params.values()
    assert torch.equal(torch.cat([weight, bias[:, None]], dim=1).reshape(-1)[order], flatten(task.initial.params))


def test_one_vector_for_all_classes_is_a_null_direction():
    task, data = softmax_task(), client(dataset())
    matrix = full.at(task, task.initial, data)
    shift = torch.linspace(-1, 2, 6, dtype=torch.float64)
    gauge = {"linear.weight": shift.expand(CLASSES, 6), "linear.bias": torch.ones(CLASSES, dtype=torch.float64)}
    assert (matrix @ flatten(gauge)).abs().max() < 1e-15


def visits(task, data, epochs=3, batch=5):
    """Visits as training makes them: every sample once per epoch, uneven batches, another model each time."""
    places = client(data).indices
    found = []
    for epoch in range(epochs):
        order = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(epoch))]
        for number, chosen in enumerate(torch.split(order, batch)):
            weights = Weights(random_like(task.initial.params, 100 * epoch + number), {})
            found.append(PathStep(weights, chosen, len(chosen) / len(places) / epochs))
    return found


@pytest.mark.parametrize("softmax", [True, False])
def test_the_average_along_a_path_is_the_average_of_minibatch_curvatures(softmax):
    data = dataset()
    task = (
        softmax_task()
        if softmax
        else filled(Task(nn.Sequential(nn.Flatten(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, CLASSES)).double()))
    )
    path = visits(task, data)
    found = full.along(task, client(data), path)
    expected = sum(v.share * gauss_newton_by_hand(task.model, v.weights.params, data.train_x[v.places]) for v in path)
    assert (found - expected).abs().max() < 1e-14


def gauss_newton_by_hand(model, params, x):
    total = 0.0
    for sample in x:
        jacobian = torch.func.jacrev(lambda v: functional_call(model, unflatten(v, params), (sample[None],))[0])(  # noqa: B023
            torch.cat([value.reshape(-1) for value in params.values()])
        )
        p = functional_call(model, params, (sample[None],))[0].softmax(0)
        total = total + jacobian.T @ (p.diag() - torch.outer(p, p)) @ jacobian
    return (total / len(x)).detach()


def test_a_client_with_some_of_the_samples_sees_only_those():
    task, data = softmax_task(), dataset()
    own = torch.tensor([20, 3, 11, 4])
    found = full.at(task, task.initial, client(data, own))
    expected = autograd_hessian(task.model, task.initial.params, data.train_x[own], data.train_y[own])
    assert (found - expected).abs().max() < 1e-15


def test_what_is_softmax_regression_and_what_is_not():
    data = client(dataset())
    assert full.is_exact(softmax_task(), data)
    scaled = nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    assert full.is_exact(Task(scaled), data)  # a fixed function before the layer changes its inputs only
    assert torch.allclose(
        full.at(Task(scaled), Task(scaled).initial, data),
        autograd_hessian(scaled, Task(scaled).initial.params, data.dataset.train_x, data.dataset.train_y),
        atol=1e-15,
    )
    for model in (
        nn.Sequential(nn.Flatten(), nn.Linear(6, CLASSES), nn.Tanh()),
        nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Linear(5, CLASSES)),
    ):
        assert not full.is_exact(Task(model.double()), data)
    brier = Task(softmax_task().model, likelihood=lambda z, y, reduction="mean": (z.softmax(1) ** 2).mean())
    assert not full.is_exact(brier, data)


def two_layers():
    return Task(network())


def batch(samples=9, seed=1):
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 5, generator=stream, dtype=torch.float64), torch.randint(
        3, (samples,), generator=stream
    )


def test_gauss_newton_by_samples():
    task, (x, y) = two_layers(), batch()
    found = gauss_newton.matrix(task, task.initial, x, y)
    assert (found - gauss_newton_by_hand(task.model, task.initial.params, x)).abs().max() < 1e-15
    assert torch.linalg.eigvalsh(found)[0] > -1e-15


def test_gauss_newton_is_blind_to_the_size_of_blocks(monkeypatch):
    task, (x, y) = two_layers(), batch()
    whole = gauss_newton.matrix(task, task.initial, x, y)
    monkeypatch.setattr(gauss_newton, "LARGEST_BLOCK", 1)
    assert torch.allclose(gauss_newton.matrix(task, task.initial, x, y), whole, atol=1e-15)


def test_quadratic_forms_without_a_matrix():
    task, (x, y) = two_layers(), batch()
    matrix = gauss_newton.matrix(task, task.initial, x, y)
    vector = random_like(task.initial.params, 3)
    parts = [(x[:4], y[:4]), (x[4:], y[4:])]
    vectors = [vector, random_like(task.initial.params, 4)]
    expected = [float(flatten(v) @ matrix @ flatten(v)) for v in vectors]
    assert gauss_newton.quadratics(task, task.initial, parts, vectors) == pytest.approx(expected, rel=1e-12)


def test_of_a_network_the_true_hessian_is_another_matrix():
    task, (x, y) = two_layers(), batch()
    hessian = autograd_hessian(task.model, task.initial.params, x, y)
    assert not torch.allclose(hessian, gauss_newton.matrix(task, task.initial, x, y), atol=1e-3)


def test_the_gauss_newton_matrix_is_the_fisher_of_the_predictions():
    """E_{y ~ P}[g g^T], by enumerating all labels."""
    task, (x, y) = two_layers(), batch(4)
    params = task.initial.params
    p = task.logits(task.initial, x).softmax(1).detach()

    def slope(sample, label):
        def loss(v):
            return nn.functional.cross_entropy(
                functional_call(task.model, unflatten(v, params), (sample[None],)), label[None]
            )

        return torch.func.grad(loss)(flatten(params))

    fisher = 0.0
    for label in range(3):
        g = vmap(slope)(x, torch.full((4,), label))
        fisher = fisher + torch.einsum("i,ia,ib->ab", p[:, label] / 4, g, g)
    assert (gauss_newton.matrix(task, task.initial, x, y) - fisher).abs().max() < 1e-15


def test_dropout_is_off_and_the_mode_comes_back():
    task = Task(network(dropout=0.5))
    task.model.train()
    x, y = batch()
    first = gauss_newton.matrix(task, task.initial, x, y)
    assert torch.equal(first, gauss_newton.matrix(task, task.initial, x, y))
    assert task.model.training


def eigen_case():
    stream = torch.Generator().manual_seed(2)
    root = torch.randn(6, 4, generator=stream, dtype=torch.float64)
    like = {"a": torch.zeros(2, 2, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    return root @ root.T, like


def test_e_full_ascending_gives_the_jth_eigenvalue_to_the_jth_parameter():
    matrix, like = eigen_case()
    found = full.as_diagonal(matrix, like, "ascending")
    assert torch.allclose(flatten(found), torch.linalg.eigvalsh(matrix).clamp(min=0))
    assert found["a"].shape == (2, 2)
    assert bool((flatten(found) >= 0).all())


def test_e_full_rank_matched_follows_the_diagonal():
    matrix, like = eigen_case()
    found = flatten(full.as_diagonal(matrix, like, "rank_matched"))
    by_diagonal = found[matrix.diagonal().argsort()]
    assert torch.equal(by_diagonal, by_diagonal.sort().values)  # two of them are zero, in either order
    assert torch.allclose(found.sort().values, torch.linalg.eigvalsh(matrix).clamp(min=0))
    diagonal = torch.tensor([3.0, 1.0, 0.0, 2.0, 5.0, 4.0], dtype=torch.float64)
    exact = full.as_diagonal(diagonal.diag(), like, "rank_matched")
    assert torch.allclose(flatten(exact), diagonal)  # of a diagonal matrix it is the diagonal
