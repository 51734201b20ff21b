"""The posterior of the final round against dense matrices, Jacobians of torch.func and brute-force sampling."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap

from fl_lightning import streams
from fl_lightning.curvature import gauss_newton
from fl_lightning.data.batches import ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError
from fl_lightning.metrics.uncertainty import prior_precision
from fl_lightning.metrics.uncertainty.posterior import Member, build
from fl_lightning.metrics.uncertainty.sample_curvature import final_round
from fl_lightning.metrics.uncertainty.settings import Uncertainty
from fl_lightning.models.lora import adapt
from fl_lightning.models.task import Task, Weights
from fl_lightning.models.tuning import Lora, freeze, parameters_of, standing_still
from fl_lightning.params import flatten, zip_map

FORMS = ("diagonal", "kron", "last_layer", "full")


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4))

    def forward(self, x):
        return self.body(x)


def perceptron(bias=True):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6, bias=bias), nn.Tanh(), nn.Linear(6, 4, bias=bias))


MODELS = {"mlp": perceptron, "no bias": lambda: perceptron(bias=False), "cnn": Convolutional}


def problem(model="mlp", samples=40, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(samples, 1, 4, 4, dtype=torch.float64)
    y = torch.randint(4, (samples,))
    return Task(MODELS[model]().double()), Dataset(x, y, x[:7] + 0.1, y[:7], 4)


def clients_of(dataset, *parts):
    return [ClientData(n, dataset, torch.as_tensor(list(part)), torch.float64) for n, part in enumerate(parts)]


def posterior_of(task, dataset, form, parts=None, tau=2.0, slopes="exact"):
    clients = clients_of(dataset, *(parts or [range(len(dataset.train_y))]))
    pooled = final_round(task, task.initial, clients, form, slopes)
    return build(task, task.initial, form, pooled, dataset.train_x[:1]).with_prior(tau)


def jacobian(task, x):
    def logits(params, sample):
        return functional_call(task.model, params, (sample[None],))[0]

    found = vmap(jacrev(logits), in_dims=(None, 0))(task.initial.params, x)
    return torch.cat([found[name].flatten(2) for name in task.initial.params], 2)


def dense_precision(task, dataset, form, tau):
    """P as a matrix, written from the definitions: a loop over samples and classes."""
    size = task.num_params
    total = torch.zeros(size, size, dtype=torch.float64)
    slopes = jacobian(task, dataset.train_x)
    p = task.logits(task.initial, dataset.train_x).softmax(1).detach()
    for j, q in zip(slopes, p, strict=True):
        total += j.T @ (torch.diag(q) - torch.outer(q, q)) @ j
    total += tau * torch.eye(size, dtype=torch.float64)
    if form == "diagonal":
        return total.diagonal().diag()
    if form == "last_layer":
        names = list(task.initial.params)
        last = names[-2:] if names[-1].endswith("bias") else names[-1:]
        mine = flatten({n: torch.full_like(v, float(n in last)) for n, v in task.initial.params.items()}).bool()
        keep = torch.outer(mine, mine)
        # Certain parameters have no variance: their precision is infinite.
        return torch.where(keep, total, torch.zeros_like(total)) + torch.diag((~mine).double() * 1e300)
    return total


def covariance_of(posterior):
    """P^-1 column by column from what draws are made of: offsets of unit coordinates."""
    like = posterior.weights.params
    columns = []
    for block, precision in zip(posterior.blocks, posterior.precisions(), strict=True):
        for place in range(precision.numel()):
            unit = torch.zeros(precision.numel(), dtype=torch.float64)
            unit[place] = 1
            offset = block.offset(unit.view(precision.shape) / precision.sqrt(), like)
            whole = {name: offset.get(name, torch.zeros_like(value)) for name, value in like.items()}
            columns.append(flatten(whole))
    root = torch.stack(columns, 1)
    return root @ root.T


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", ["diagonal", "last_layer", "full"])
def test_the_covariance_is_the_inverse_of_the_definition(model, form):
    task, dataset = problem(model)
    found = covariance_of(posterior_of(task, dataset, form))
    expected = torch.linalg.inv(dense_precision(task, dataset, form, 2.0))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def attention():
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten(), nn.Linear(16, 4))


def normed():
    return nn.Sequential(nn.Conv2d(1, 3, 3, groups=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4))


PARTS = {
    "bias": (Convolutional, "bias"),
    "bias of softmax": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), "bias"),
    "norm": (normed, "norm"),
    "all with BatchNorm": (normed, "all"),
    "attention": (attention, "all"),
    "last layers of attention": (attention, "last:2"),
    "adapters with A frozen": (attention, True),
    "adapters with A trained": (Convolutional, False),
}


def part_of(name):
    """A problem of which a part is trained, away from where it starts."""
    make, train = PARTS[name]
    model, (_, dataset) = make().double(), problem(samples=30)
    x = dataset.train_x[:1]
    is_adapted = isinstance(train, bool)
    freeze(model, adapt(model, Lora(rank=2), train, None) if is_adapted else parameters_of(model, train, x))
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(3)), alpha=0.3)
    return Task(model.double(), still=standing_still(model, x)), dataset


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_any_part_has_a_diagonal_and_a_full_posterior(name, form):
    task, dataset = part_of(name)
    posterior = posterior_of(task, dataset, form)
    found = posterior.predict(dataset.test_x).probabilities
    with task.evaluating(), gauss_newton.plain_attention():
        expected = torch.linalg.inv(dense_precision(task, dataset, form, 2.0))
        covariance = covariance_of(posterior)
        torch.testing.assert_close(covariance, expected, rtol=1e-9, atol=1e-12)
        slopes = jacobian(task, dataset.test_x)
        logits = task.logits(task.initial, dataset.test_x)
    variance = (slopes @ covariance @ slopes.mT).diagonal(dim1=1, dim2=2)
    probit = (logits / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    torch.testing.assert_close(found, probit, rtol=1e-9, atol=1e-12)


def test_a_form_that_a_part_lacks_names_one_that_works():
    task, dataset = part_of("bias")
    for form, words in (("kron", "used once; .*bias is not of one"), ("last_layer", "or are not trained")):
        with pytest.raises(UserError, match=rf"{words}; use --uncertainty.form diagonal"):
            posterior_of(task, dataset, form)


@pytest.mark.parametrize("model", MODELS)
def test_kron_is_the_product_of_its_factors(model):
    task, dataset = problem(model)
    posterior = posterior_of(task, dataset, "kron")
    covariance = covariance_of(posterior)
    assert torch.linalg.eigvalsh(covariance).min() > 0
    clients = clients_of(dataset, range(40))
    factors = final_round(task, task.initial, clients, "kron", "exact").curvature
    place = 0
    for block in posterior.blocks:
        a, g = factors[f"inputs:{block.weight}"], factors[f"slopes:{block.weight}"]
        dense = torch.kron(g, a) * 40 + 2.0 * torch.eye(len(a) * len(g), dtype=torch.float64)
        outputs, inputs = len(g), len(a)
        weight, size = (inputs - (block.bias is not None)) * outputs, inputs * outputs
        order = torch.arange(size).view(outputs, inputs)
        in_flat = torch.cat([order[:, : weight // outputs].reshape(-1), order[:, weight // outputs :].reshape(-1)])
        expected = torch.linalg.inv(dense)[in_flat][:, in_flat]
        torch.testing.assert_close(covariance[place : place + size, place : place + size], expected)
        place += size


@pytest.mark.parametrize("form", FORMS)
def test_the_posterior_does_not_depend_on_the_partition(form):
    task, dataset = problem("cnn")
    whole = final_round(task, task.initial, clients_of(dataset, range(40)), form, "exact")
    parts = [range(0, 3), range(3, 20), [], range(20, 40)]
    split = final_round(task, task.initial, clients_of(dataset, *parts), form, "exact")
    assert split.samples == whole.samples == 40
    assert split.loss == pytest.approx(whole.loss, rel=1e-12)
    for name, value in whole.curvature.items():
        torch.testing.assert_close(split.curvature[name], value, rtol=1e-10, atol=1e-14)


def test_the_empirical_diagonal_is_the_mean_of_squared_gradients():
    task, dataset = problem("cnn")
    found = final_round(task, task.initial, clients_of(dataset, range(9), range(9, 40)), "diagonal", "empirical")
    total = zip_map(torch.zeros_like, task.initial.params)
    for x, y in zip(dataset.train_x, dataset.train_y, strict=True):
        grads = torch.func.grad(lambda p: task.loss(Weights(p, {}), x[None], y[None]))(task.initial.params)  # noqa: B023
        total = zip_map(lambda t, g: t + g.square() / 40, total, grads)
    for name, value in total.items():
        torch.testing.assert_close(found.curvature[name], value)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", FORMS)
def test_probit_is_the_formula_with_the_jacobian(model, form):
    task, dataset = problem(model)
    posterior = posterior_of(task, dataset, form, tau=0.3)
    slopes = jacobian(task, dataset.test_x)
    covariance = slopes @ covariance_of(posterior) @ slopes.mT
    logits = task.logits(task.initial, dataset.test_x).detach()
    expected = (logits / (1 + math.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt()).softmax(1)
    found = posterior.predict(dataset.test_x)
    torch.testing.assert_close(found.probabilities, expected, rtol=1e-9, atol=1e-12)
    p = expected
    for sample in range(len(p)):
        derivative = torch.diag(p[sample]) - torch.outer(p[sample], p[sample])
        spread = (derivative @ covariance[sample] @ derivative).diagonal().sqrt()
        torch.testing.assert_close(found.spread[sample], spread, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["probit", "glm_mc", "nn"])
def test_a_prior_that_knows_everything_leaves_the_mean_alone(form, kind):
    task, dataset = problem()
    posterior = posterior_of(task, dataset, form, tau=1e12)
    expected = task.logits(task.initial, dataset.test_x).softmax(1)
    torch.testing.assert_close(posterior.predict(dataset.test_x, kind).probabilities, expected, rtol=0, atol=1e-5)
    assert float(posterior.predict(dataset.test_x, kind).spread.max()) < 1e-4


def test_glm_mc_is_the_mean_of_a_million_draws():
    task, dataset = problem()
    posterior = posterior_of(task, dataset, "full", tau=0.3)
    x = dataset.test_x[:1]
    slopes = jacobian(task, x)[0]
    covariance = slopes @ covariance_of(posterior) @ slopes.T
    stream = torch.Generator().manual_seed(1)
    noise = torch.randn(1_000_000, 4, generator=stream, dtype=torch.float64)
    draws = (task.logits(task.initial, x).detach() + noise @ torch.linalg.cholesky(covariance).T).softmax(1)
    many = dataclasses.replace(posterior, glm_draws=200_000).predict(x, "glm_mc")
    error = draws.std(0) * math.sqrt(1 / 200_000 + 1e-6)
    assert bool(((many.probabilities[0] - draws.mean(0)).abs() < 5 * error).all())
    torch.testing.assert_close(many.spread[0], draws.std(0), rtol=0.02, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_draws_have_the_covariance_of_the_posterior(form):
    task, dataset = problem("mlp", samples=20)
    task = Task(nn.Sequential(nn.Flatten(), nn.Linear(16, 2), nn.Tanh(), nn.Linear(2, 4)).double())
    posterior = posterior_of(task, dataset, form, tau=1.0)
    expected, number, offsets = covariance_of(posterior), 100_000, []
    for place, (block, precision) in enumerate(zip(posterior.blocks, posterior.precisions(), strict=True)):
        noise = torch.randn(number, *precision.shape, generator=torch.Generator().manual_seed(place)).double()
        drawn = vmap(lambda one: block.offset(one, task.initial.params))(noise / precision.sqrt())  # noqa: B023
        offsets.append({name: value.flatten(1) for name, value in drawn.items()})
    known = {name: value for part in offsets for name, value in part.items()}
    still = {name: torch.zeros(number, value.numel()).double() for name, value in task.initial.params.items()}
    whole = torch.cat([(still | known)[name] for name in task.initial.params], 1)
    found = whole.T @ whole / number
    variance = (expected.square() + torch.outer(expected.diagonal(), expected.diagonal())) / number
    assert bool(((found - expected).abs() <= 5 * variance.sqrt() + 1e-12).all())
    assert bool((whole.mean(0).abs() <= 5 * (expected.diagonal() / number).sqrt() + 1e-12).all())


@pytest.mark.parametrize("form", FORMS)
def test_a_draw_is_the_offset_of_standard_normal_noise_from_its_own_stream(form):
    task, dataset = problem("cnn")
    posterior = dataclasses.replace(posterior_of(task, dataset, form), seed=5)
    expected = {name: value.clone() for name, value in task.initial.params.items()}
    for place, (block, precision) in enumerate(zip(posterior.blocks, posterior.precisions(), strict=True)):
        stream = streams.generator(5, "posterior", 3, place)
        noise = torch.randn(precision.shape, generator=stream, dtype=torch.float64)
        for name, offset in block.offset(noise / precision.sqrt(), expected).items():
            expected[name] = expected[name] + offset
    assert torch.equal(flatten(posterior.draw(3)), flatten(expected))
    assert torch.equal(flatten(posterior.draw(3)), flatten(posterior.draw(3)))
    assert not torch.equal(flatten(posterior.draw(3)), flatten(posterior.draw(4)))


def test_an_ensemble_is_the_weighted_mean_of_its_members():
    task, dataset = problem()
    other = Weights(zip_map(lambda p: p + 0.5, task.initial.params), {})
    posterior = dataclasses.replace(
        posterior_of(task, dataset, "diagonal"), members=(Member(task.initial, 0.25), Member(other, 0.75))
    )
    first, second = (task.logits(w, dataset.test_x).softmax(1).detach() for w in (task.initial, other))
    found = posterior.predict(dataset.test_x, "ensemble")
    torch.testing.assert_close(found.probabilities, 0.25 * first + 0.75 * second)
    mean = 0.25 * first + 0.75 * second
    torch.testing.assert_close(found.spread, (0.25 * (first - mean) ** 2 + 0.75 * (second - mean) ** 2).sqrt())

    def entropy(p):
        return -(p * p.log()).sum(1)

    torch.testing.assert_close(found.information, entropy(mean) - 0.25 * entropy(first) - 0.75 * entropy(second))
    with pytest.raises(UserError, match="needs the clients' models of the last round"):
        posterior_of(task, dataset, "diagonal").predict(dataset.test_x, "ensemble")


@pytest.mark.parametrize("kind", ["probit", "glm_mc", "nn"])
def test_predictions_do_not_depend_on_the_blocks(kind, monkeypatch):
    task, dataset = problem("cnn")
    posterior = posterior_of(task, dataset, "kron", tau=0.5)
    whole = posterior.predict(dataset.test_x, kind)
    monkeypatch.setattr("fl_lightning.metrics.uncertainty.predictive.MOST_SAMPLES", 2)
    torch.testing.assert_close(posterior.predict(dataset.test_x, kind).probabilities, whole.probabilities)


def test_the_marginal_likelihood_is_laplaces_formula():
    task, dataset = problem()
    posterior = posterior_of(task, dataset, "full", tau=0.7)
    precision = dense_precision(task, dataset, "full", 0.7)
    mean = flatten(task.initial.params)
    loss = torch.nn.functional.cross_entropy(task.logits(task.initial, dataset.train_x), dataset.train_y)
    expected = -40 * loss - 0.35 * mean @ mean - 0.5 * (torch.logdet(precision) - len(mean) * math.log(0.7))
    assert posterior.log_marginal_likelihood() == pytest.approx(float(expected), rel=1e-10)
    best = prior_precision.by_marginal_likelihood(posterior)
    values = {tau: posterior.with_prior(tau).log_marginal_likelihood() for tau in prior_precision.GRID}
    assert values[best] == max(values.values())


def test_the_holdout_chooses_the_smallest_nll(monkeypatch):
    monkeypatch.setattr(prior_precision, "BLOCK", 4)  # several of them
    task, dataset = problem()
    held = ClientData(-1, dataset, torch.arange(30, 40), torch.float64)
    posterior = posterior_of(task, dataset, "kron", parts=[range(30)])
    found = prior_precision.tuned(posterior, Uncertainty(form="kron"), held)
    grid = {}
    for tau in prior_precision.GRID:
        logs = posterior.with_prior(tau).predict(dataset.train_x[30:]).log_probabilities
        grid[tau] = float(torch.nn.functional.nll_loss(logs, dataset.train_y[30:]))
    assert found.prior_precision == min(grid, key=grid.get)
    assert found.logit_temperature is not None
    assert prior_precision.tuned(posterior, Uncertainty(prior_precision=5), held).prior_precision == 5
    chosen = prior_precision.tuned(posterior, Uncertainty(), None)
    assert chosen.prior_precision == prior_precision.by_marginal_likelihood(posterior)


def test_bytes_are_standardised_as_in_training():
    from fl_lightning.metrics.uncertainty.posterior import Scaling

    task, dataset = problem()
    posterior = dataclasses.replace(posterior_of(task, dataset, "diagonal"), scaling=Scaling((0.2,), (0.5,)))
    raw = torch.arange(32, dtype=torch.uint8).view(2, 1, 4, 4)
    expected = posterior.predict((raw.double() / 255 - 0.2) / 0.5).probabilities
    torch.testing.assert_close(posterior.predict(raw).probabilities, expected)


def test_mistakes_are_one_line():
    task, dataset = problem()
    with pytest.raises(UserError, match=r"singular: .* of 130 directions have neither curvature nor prior"):
        posterior_of(task, dataset, "full", tau=0.0)
    posterior = posterior_of(task, dataset, "diagonal")
    with pytest.raises(UserError, match="expected inputs of the shape that the network was trained on"):
        posterior.predict(torch.randn(3, 5))
    with pytest.raises(UserError, match="predictive must be one of map"):
        posterior.predict(dataset.test_x, "bayes")
    with pytest.raises(UserError, match="needs held-out data"):
        posterior.predict(dataset.test_x, "temperature")
    with pytest.raises(UserError, match="prior_precision holdout needs data that no client trains on"):
        prior_precision.tuned(posterior, Uncertainty(prior_precision="holdout"), None)
    normed = Task(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 4)).double())
    with pytest.raises(UserError, match=r"the parameter 1\.weight is not of one"):
        posterior_of(normed, dataset, "kron")
    assert posterior_of(normed, dataset, "last_layer").predict(dataset.test_x).probabilities.shape == (7, 4)
    broken = Weights(zip_map(lambda p: p * math.nan, task.initial.params), {})
    with pytest.raises(UserError, match="curvature at the final model is not finite"):
        final_round(task, broken, clients_of(dataset, range(40)), "diagonal", "exact")


@pytest.mark.parametrize("form", FORMS)
def test_a_model_whose_forward_pass_overflows_has_diverged(form):
    _, dataset = problem()
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1e200)
    with pytest.raises(UserError, match=r"is not finite .*: training has diverged"):
        posterior_of(Task(model), dataset, form)


def test_full_curvature_is_the_gauss_newton_matrix():
    task, dataset = problem()
    found = final_round(task, task.initial, clients_of(dataset, range(11), range(11, 40)), "full", "exact")
    expected = gauss_newton.matrix(task, task.initial, dataset.train_x, dataset.train_y)
    torch.testing.assert_close(found.curvature["matrix"], expected)
