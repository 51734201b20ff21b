"""FOLA with precisions by layers against brute force: factors by loops over samples, dense solves, plain SGD."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fl_lightning.config import configure
from fl_lightning.curvature.layered import REST
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.gaussian import kron_sum
from fl_lightning.gaussian.blocks import Blocks
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.flat import Flat
from fl_lightning.gaussian.kron import Kron
from fl_lightning.loop import initial
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.params import flatten, unflatten
from fl_lightning.probes.settings import Probe
from fl_lightning.runs import checkpoint
from fl_lightning.runs.saved import load_reference
from fl_lightning.system import memory
from fl_lightning.task import Task
from tests import references
from tests.cases import ENGINES, equal_bits, final, largest_difference, ragged
from tests.gaussian_references import dense, kron_matrix
from tests.test_kron_factors import seeds

FORMS = ["inputs", "kron", "last_layer"]


@pytest.fixture(autouse=True)
def converged(monkeypatch):
    monkeypatch.setattr(kron_sum, "TOLERANCE", 1e-13)


def factors_of(case, theta, places, kind):
    """A and G of both layers of the case's network, sample by sample."""
    x, y = case.dataset.train_x[places], case.dataset.train_y[places]
    one = torch.ones(1, dtype=torch.float64)
    names = ("0", "2")
    found = {name: [0.0, 0.0] for name in names}
    for sample, label in zip(x, y, strict=True):
        hidden = (theta["0.weight"] @ sample + theta["0.bias"]).detach().requires_grad_()
        logits = theta["2.weight"] @ torch.tanh(hidden) + theta["2.bias"]
        p = logits.detach().softmax(0)
        for name, given in (("0", sample), ("2", torch.tanh(hidden).detach())):
            row = torch.cat([given, one])
            found[name][0] = found[name][0] + torch.outer(row, row) / len(y)
        for weight, seed in seeds(p, label, kind):
            (slope,) = torch.autograd.grad(logits, hidden, seed, retain_graph=True)
            found["0"][1] = found["0"][1] + weight * torch.outer(slope, slope) / len(y)
            found["2"][1] = found["2"][1] + weight * torch.outer(seed, seed) / len(y)
    return found


def last_hessian(case, theta, places):
    """Of the last layer's weight and bias, others fixed."""
    own = {name: theta[name] for name in ("2.weight", "2.bias")}
    fixed = {name: value for name, value in theta.items() if name not in own}
    x, y = case.dataset.train_x[places], case.dataset.train_y[places]

    def loss(vector):
        return nn.functional.cross_entropy(functional_call(case.model, fixed | unflatten(vector, own), (x,)), y)

    return torch.autograd.functional.hessian(loss, flatten(own))


def brute_force(case, method, rounds=3):
    """Models after every round, with plain loops and dense matrices layer by layer."""
    mu = references.initial(case)
    members = references.members(case)
    share = references.weights(case, members)
    layers = {"0": ("0.weight", "0.bias"), "2": ("2.weight", "2.bias")}
    kind = "empirical" if method.slopes == "empirical" else "exact"
    server = None
    models = []
    for r in range(1, rounds + 1):
        means, found = {}, {}
        pull = 0.0
        if server is not None and method.strength:
            pull = method.strength * server["prior"]
        for n in members:
            theta = dict(mu)
            for batch in references.batches(case, n, r):
                slope = flatten(references.gradient(case, theta, batch))
                offset = flatten(theta) - flatten(mu)
                push = pull @ offset if isinstance(pull, torch.Tensor) else 0.0
                theta = unflatten(flatten(theta) - case.training.lr * (slope + push), mu)
            means[n] = theta
            if method.curvature_form == "last_layer":
                found[n] = {"2": [last_hessian(case, theta, case.clients[n])]}
            else:
                found[n] = factors_of(case, theta, case.clients[n], kind)
            if method.curvature == "online" and r > 1:
                found[n] = {
                    key: [f / r + (r - 1) / r * s for f, s in zip(value, server["factors"][key], strict=True)]
                    for key, value in found[n].items()
                }
        result, factors, blocks = {}, {}, []
        for key, names in layers.items():
            own = [{name: means[n][name] for name in names} for n in members]
            average = sum(share[n] * flatten(m) for n, m in zip(members, own, strict=True))
            size = len(average)
            if method.curvature_form == "last_layer":
                if key == "0":
                    result |= unflatten(average, own[0])
                    blocks.append(torch.zeros(size, size, dtype=torch.float64))
                    continue
                matrices = {n: found[n][key][0] for n in members}
                total = sum(share[n] * matrices[n] for n in members)
                gamma = method.damping * float(total.diagonal().mean())
                used = {n: matrices[n] + gamma * torch.eye(size, dtype=torch.float64) for n in members}
                factors[key] = [total]
                kept = total
            else:
                outputs = len(own[0][names[0]])
                a = sum(share[n] * found[n][key][0] for n in members)
                eye_a, eye_g = (torch.eye(k, dtype=torch.float64) for k in (len(a), outputs))
                c_a = method.damping * float(a.diagonal().mean())
                if method.curvature_form == "inputs":
                    used = {n: kron_matrix(eye_g, found[n][key][0] + c_a * eye_a) for n in members}
                    g = eye_g
                    factors[key] = [a, eye_g]
                    for n in members:
                        found[n][key][1] = eye_g
                else:
                    g = sum(share[n] * found[n][key][1] for n in members)
                    c_g = method.damping_slopes * float(g.diagonal().mean())
                    used = {
                        n: kron_matrix(found[n][key][1] + c_g * eye_g, found[n][key][0] + c_a * eye_a) for n in members
                    }
                    whole = sum(share[n] * found[n][key][0].trace() * found[n][key][1].trace() for n in members)
                    g = g * whole / (g.trace() * a.trace())
                    factors[key] = [a, g]
                kept = kron_matrix(g, a)
            blocks.append(kept)
            total = sum(share[n] * used[n] for n in members)
            moment = sum(share[n] * used[n] @ flatten(m) for n, m in zip(members, own, strict=True))
            result |= unflatten(torch.linalg.solve(total, moment), own[0])
        whole = torch.block_diag(*blocks)
        prior = whole if method.prior == "exact" else whole.diagonal().diag()
        server = {"factors": factors, "prior": prior, "precision": whole}
        mu = {name: result[name] for name in mu}
        models.append((mu, whole))
    return models


VARIANTS = [
    Fola(curvature_form="inputs", strength=0.0),
    Fola(curvature_form="inputs", strength=0.2, curvature="offline"),
    Fola(curvature_form="inputs", strength=0.2, prior="exact", damping=0.1),
    Fola(curvature_form="kron", strength=0.0),
    Fola(curvature_form="kron", strength=2.0, damping=0.1, damping_slopes=0.5),
    Fola(curvature_form="kron", strength=2.0, prior="exact", slopes="empirical"),
    Fola(curvature_form="kron", strength=2.0, curvature="offline"),
    Fola(curvature_form="last_layer", strength=0.0),
    Fola(curvature_form="last_layer", strength=2.0, prior="exact"),
]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("method", VARIANTS, ids=str)
def test_equals_brute_force(method, engine):
    case = ragged()
    for record, (mean, precision) in zip(case.run(method, engine), brute_force(case, method), strict=True):
        assert largest_difference(record.after.state.params, mean) < 1e-9
        assert torch.allclose(dense(record.after.state.posterior), precision, atol=1e-10)


@pytest.mark.parametrize("form", ["inputs", "kron"])
def test_the_factors_are_means_over_rounds(form):
    records = ragged().run(Fola(curvature_form=form, strength=0.0))
    fresh = []
    for record in records:
        r, before = record.round, record.before.state.posterior.parts()
        own = [
            {key: r * value - (r - 1) * before[key] for key, value in report.posterior.parts().items()}
            for report in record.reports
        ]
        fresh.append(
            {
                key: sum(w * one[key] for w, one in zip(record.cohort.weights, own, strict=True))
                for key in before
                if key.endswith("inputs")
            }
        )
    kept = records[-1].after.state.posterior.parts()
    for key in fresh[0]:
        assert torch.allclose(kept[key], sum(one[key] for one in fresh) / len(fresh), atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_average_without_prior_is_fedavg_to_the_bit(form):
    case = ragged(dtype=torch.float32)
    off = Fola(curvature_form=form, aggregation="average", strength=0)
    assert equal_bits(final(case.run(off)), final(case.run(FedAvg())))


@pytest.mark.parametrize("form", FORMS)
def test_one_client_keeps_its_model(form):
    case = ragged()
    case = case._replace(clients=[torch.cat(case.clients)])
    for record in case.run(Fola(curvature_form=form, strength=0.1)):
        assert equal_bits(record.after.state.params, record.clients[0].local.params)


@pytest.mark.parametrize("form", FORMS)
def test_huge_damping_is_fedavg(form):
    case = ragged()
    damped = Fola(curvature_form=form, strength=0, damping=1e12, damping_slopes=1e12 if form == "kron" else 1.0)
    assert largest_difference(final(case.run(damped)), final(case.run(FedAvg()))) < 1e-6


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.scale * self.out(torch.relu_(self.norm(self.hidden(x))))


@pytest.mark.parametrize("engine", [Functional(chunk=1), Functional(chunk=4), Lightning()], ids=["loop", "vmap", "pl"])
@pytest.mark.parametrize("form", ["inputs", "kron"])
def test_what_is_no_plain_layer_is_diagonal_in_the_same_gaussian(form, engine):
    torch.manual_seed(0)
    case = ragged()._replace(model=Mixed().double())
    records = case.run(Fola(curvature_form=form, strength=0.1), engine)
    posterior = records[-1].after.state.posterior
    assert list(posterior.blocks) == ["hidden.weight", "out.weight", REST]
    assert isinstance(posterior.blocks[REST], Diagonal)
    assert set(posterior.blocks[REST].precision) == {"scale", "norm.weight", "norm.bias"}
    assert list(records[-1].after.state.params) == list(case.task().initial.params)
    first = records[0]
    reports = [r.posterior.parted()[-1][1] for r in first.reports]
    gamma = Diagonal.common_damping(reports, first.cohort.weights, Fola()._merging)
    expected = Diagonal.product(reports, first.cohort.weights, gamma).mean
    for name, value in expected.items():
        assert torch.allclose(first.after.state.params[name], value, atol=1e-14)


def test_batch_norm_is_no_obstacle():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 3)).double()
    case = ragged(sizes=(20, 7, 0, 33))._replace(model=model)
    for form in ("inputs", "kron"):
        posterior = case.run(Fola(curvature_form=form, strength=0.0))[-1].after.state.posterior
        assert list(posterior.blocks) == ["0.weight", "3.weight", REST]


def test_convolutions_train_and_merge():
    torch.manual_seed(0)
    case = ragged()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 2, (1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    case = case._replace(model=model)
    for form in FORMS:
        records = case.run(Fola(curvature_form=form, strength=0.0))
        assert largest_difference(final(records), final(case.run(FedAvg()))) > 1e-4
        assert bool(flatten(final(records)).isfinite().all())


def test_the_first_layer_can_be_averaged_and_is_then_not_sent():
    case = ragged()
    method = Fola(curvature_form="kron", first_layer="average", strength=0.0)
    record = case.run(method, rounds=1)[0]
    assert isinstance(record.after.state.posterior.blocks["0.weight"], Flat)
    average = sum(w * r.local.params["0.weight"] for w, r in zip(record.cohort.weights, record.clients, strict=True))
    assert torch.allclose(record.after.state.params["0.weight"], average, atol=1e-14)
    d = case.task().num_params
    assert record.bytes_up == 4 * 4 * (d + 7 * 8 // 2 + 3 * 4 // 2)


def test_the_rest_of_last_layer_can_be_diagonal():
    case = ragged()
    record = case.run(Fola(curvature_form="last_layer", rest="diagonal", strength=0.0), rounds=1)[0]
    posterior = record.after.state.posterior
    assert set(posterior.blocks[REST].precision) == {"0.weight", "0.bias"}
    offline = case.run(Fola(curvature="offline", strength=0.0), rounds=1)[0]
    for name in ("0.weight", "0.bias"):
        expected = offline.after.state.posterior.precision[name]
        assert torch.allclose(posterior.blocks[REST].precision[name], expected, atol=1e-15)


def test_traffic_counts_triangles():
    """The table of docs/structured.md for the paper's MLP: 0.88 d for inputs and 1.19 d for kron beside the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 300), nn.ReLU(), nn.Linear(300, 10))
    task = Task(model)
    expected = {"inputs": 0.88, "kron": 1.19}
    for form, share in expected.items():
        posterior = Fola(curvature_form=form)._form.nothing(task.initial.params, task, torch.zeros(1, 784))
        sent = Fola().traffic(posterior.with_mean({}))
        assert sent / task.num_params == pytest.approx(share, abs=0.005)
    triangles = sum(n * (n + 1) // 2 for n in (785, 501, 301))
    assert Fola().traffic(
        Fola(curvature_form="inputs")._form.nothing(task.initial.params, task, torch.zeros(1, 784))
    ) == (task.num_params + triangles)
    record = ragged().run(Fola(curvature_form="kron", strength=0.0), rounds=1)[0]
    numbers = ragged().task().num_params + sum(n * (n + 1) // 2 for n in (6, 6, 7, 3))
    assert record.bytes_up == record.bytes_down == 4 * 4 * numbers


@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on_from_its_checkpoint_to_the_bit(form, tmp_path):
    case, method = ragged(dtype=torch.float32), Fola(curvature_form=form, strength=0.1)
    records = case.run(method)
    checkpoint.write(tmp_path, "id", records[0].after, [])
    template = initial(method, case.task(), len(case.clients), case.dataset)
    saved = checkpoint.read(tmp_path, "id", template).snapshot
    assert equal_bits(final(case.go_on(method, resume=saved)), final(records))


@pytest.mark.parametrize("form", FORMS)
def test_the_posterior_of_a_saved_run_is_a_reference(form, tmp_path):
    case, method = ragged(), Fola(curvature_form=form, strength=0.0)
    after = case.run(method)[-1].after
    checkpoint.write(tmp_path, "id", after, [])
    found = load_reference(Probe(str(tmp_path), "run"), case.task(), case.dataset, case.clients)
    other = {name: value + 0.1 for name, value in after.state.params.items()}
    offset = torch.full((case.task().num_params,), 0.1, dtype=torch.float64)
    expected = 0.5 * offset @ dense(after.state.posterior) @ offset
    assert found.distances([other]) == pytest.approx([float(expected)], rel=1e-9)


def test_the_diagnosis_of_a_kron_product():
    case, method = ragged(), Fola(curvature_form="kron", strength=2.0)
    record = case.run(method, rounds=2)[-1]
    found = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    blocks = record.after.state.posterior.blocks.values()
    assert found["solver_iterations"] == max(block.iterations for block in blocks) > 0
    assert found["solver_residual"] == max(block.residual for block in blocks) < 1e-12
    matrix = dense(record.after.state.posterior)
    assert found["precision_max"] == pytest.approx(float(matrix.diagonal().max()))
    assert found["prior_stability"] == pytest.approx(0.1 * 2 * float(matrix.diagonal().max()))
    exact = Fola(curvature_form="kron", strength=2.0, prior="exact")
    found = exact.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    assert found["prior_stability"] == pytest.approx(0.1 * 2 * float(torch.linalg.eigvalsh(matrix)[-1]))


@pytest.mark.parametrize("form", FORMS)
def test_the_posteriors_multiply_to_the_server(form):
    case, method = ragged(), Fola(curvature_form=form, strength=0.0)
    record = case.run(method, rounds=1)[0]
    posteriors = method.posteriors(record.cohort, record.reports)
    found = Blocks.product(posteriors, record.cohort.weights)
    assert largest_difference(found.mean, record.after.state.params) < 1e-9


def test_sampled_slopes_are_drawn_anew_for_every_client_and_round():
    case = ragged()
    method = Fola(curvature_form="kron", slopes="sampled", strength=0.0, curvature="offline")
    one, two = case.run(method), case.run(method)
    assert equal_bits(final(one), final(two))
    frozen = case.run(method, lr=0.0)
    first, second = (r.reports[0].posterior.blocks["2.weight"].slopes for r in frozen[:2])
    assert not torch.equal(first, second)


def test_many_classes_are_drawn():
    form = Fola(curvature_form="kron")._form
    case = ragged()
    data = case.run(FedAvg(), rounds=1)[0].cohort.server.holdout
    assert form._slopes(data) == "exact"
    many = case._replace(
        dataset=case.dataset.__class__(
            *(getattr(case.dataset, n) for n in ("train_x", "train_y", "test_x", "test_y")), 11
        )
    )
    data = many._replace(model=nn.Linear(5, 11).double()).run(FedAvg(), rounds=1)[0].cohort.server.holdout
    assert form._slopes(data) == "sampled"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slopes": "exact"}, "method.slopes exact is for --method.curvature_form kron, got diagonal"),
        ({"curvature_form": "inputs", "solver": "factored", "strength": 0}, "is for --method.curvature_form kron"),
        ({"curvature_form": "last_layer", "first_layer": "average"}, "inputs or kron, got last_layer"),
        ({"curvature_form": "kron", "rest": "diagonal"}, "is for --method.curvature_form last_layer, got kron"),
        ({"curvature_form": "kron", "damping_place": "denominator"}, "diagonal or e_full, got kron"),
        ({"curvature_form": "kron", "normalisation": "sum_steps"}, "got kron"),
        ({"curvature_form": "kron", "round_scaling": "code"}, "got kron"),
        ({"curvature_form": "inputs", "damping_in_prior": True, "strength": 0}, "got inputs"),
        ({"curvature_form": "inputs", "strength": 100.0}, "sure to diverge .* use --method.strength 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(UserError, match=message) as refusal:
        ragged().run(Fola(**settings))
    assert "\n" not in str(refusal.value)


def test_impossible_damping_is_refused():
    with pytest.raises(UserError, match=r"method\.damping_slopes must be"):
        Fola(damping_slopes=-1.0)
    assert configure({"method": "fola", "method.damping_slopes": None}).method.damping_slopes is None


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5, dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight.T


def test_networks_without_layers_are_refused():
    case, mixed = ragged()._replace(model=Odd()), ragged()._replace(model=Mixed().double())
    with pytest.raises(UserError, match="needs linear or convolutional layers"):
        case.run(Fola(curvature_form="kron"))
    with pytest.raises(UserError, match="whose last layer is linear and gives the logits"):
        mixed.run(Fola(curvature_form="last_layer"))


def test_too_wide_layers_are_refused_with_the_memory_they_would_take(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    with pytest.raises(UserError, match=r"curvature_form kron of 57 parameters takes about .* for 4 clients"):
        ragged().run(Fola(curvature_form="kron"))


def test_isotropic_damping_is_there_for_comparison():
    case = ragged()
    factored, isotropic = (Fola(curvature_form="kron", strength=0, damping_slopes=c) for c in (1.0, None))
    assert largest_difference(final(case.run(factored)), final(case.run(isotropic))) > 1e-4
    assert isinstance(case.run(isotropic)[-1].after.state.posterior.blocks["0.weight"], Kron)
