"""FedBE against brute force: torch.optim and torch.optim.swa_utils on the server, plain loops everywhere else."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from fl_lightning import streams
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedbe import FedBE
from fl_lightning.params import flatten
from fl_lightning.runs.config.run_config import configure
from fl_lightning.training import Federation
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, network, ragged

# A student that moves visibly, in batches that do not divide the 12 held-out samples: 18 steps, SWA at 8, 12 and 16.
LIVELY = FedBE(samples=3, server_epochs=6, server_lr=0.2, server_batch_size=5, swa_start=5, swa_frequency=4)
SAMPLERS = ("gaussian_paper", "gaussian_code", "dirichlet", "dirichlet_weighted")


# --- brute force ------------------------------------------------------------------------------------------------------


def local_model(case, start, client, round):
    """SGD of one client, one batch after the other."""
    theta = {name: value.clone() for name, value in start.items()}
    for batch in references.batches(case, client, round):
        slope = references.gradient(case, theta, batch)
        theta = {name: value - case.training.lr * slope[name] for name, value in theta.items()}
    return theta


def sampled_models(method, start, mean, models, weights, seed):
    """M models, coordinate by coordinate as the formulas say."""
    found = []
    for m in range(method.samples):
        if method.sampler.startswith("dirichlet"):
            g = streams.numpy_generator(seed, "models", m).dirichlet(np.full(len(models), method.concentration))
            if method.sampler == "dirichlet_weighted":
                g = [g[i] * w for i, w in enumerate(weights)]
            total = sum(g)
            found.append({k: sum(g[i] * y[k] for i, y in enumerate(models)) / total for k in mean})
            continue
        stream = streams.generator(seed, "models", m)
        sample = {}
        for k in mean:
            z = torch.randn(mean[k].shape, generator=stream, dtype=torch.float64)
            if method.sampler == "gaussian_paper":
                variance = sum(w * (y[k] - mean[k]) ** 2 for w, y in zip(weights, models, strict=True))
                sample[k] = mean[k] + variance.sqrt() * z
            else:
                updates = [y[k] - start[k] for y in models]
                norms = [update.square().sum().sqrt() for update in updates]
                units = [update / norm for update, norm in zip(updates, norms, strict=True)]
                centre = sum(units) / len(units)
                variance = (sum(u**2 for u in units) / len(units) - centre**2).clamp(min=1e-5)
                sample[k] = start[k] + (centre + 0.1 * variance.sqrt() * z) * sum(norms) / len(norms)
        found.append(sample)
    return found


def ensemble_labels(method, case, teachers):
    x = case.dataset.train_x[case.holdout]
    votes = [torch.softmax(functional_call(case.model, teacher, (x,)), dim=1) for teacher in teachers]
    powers = (sum(votes) / len(votes)) ** (1 / method.temperature)
    return (powers / powers.sum(1, keepdim=True)).detach()


def student(method, case, mean, targets, seed):
    """torch's own SGD and SWA on the module itself; the divergence is written out."""
    net = deepcopy(case.model)
    net.load_state_dict(mean)
    optimiser = torch.optim.SGD(
        net.parameters(), method.server_lr, method.server_momentum, weight_decay=method.server_weight_decay
    )
    averaged, step, size = AveragedModel(net), 0, len(case.holdout)
    steps = method.server_epochs * -(-size // method.server_batch_size)
    every = method.swa_frequency or steps + 1
    left = any(t > method.swa_start and t % every == 0 for t in range(1, steps + 1))
    start = method.swa_start if left else steps // 2
    for epoch in range(method.server_epochs):
        order = torch.randperm(size, generator=streams.generator(seed, "batches", epoch))
        for i in range(0, size, method.server_batch_size):
            places = order[i : i + method.server_batch_size]
            q, p = torch.softmax(net(case.dataset.train_x[case.holdout[places]]), dim=1), targets[places]
            divergence = (p * (p.log() - q.log())).sum(1).mean()
            if method.kl_mean == "samples_and_classes":
                divergence = divergence / p.shape[1]
            optimiser.zero_grad()
            divergence.backward()
            optimiser.step()
            step += 1
            if step > start and step % every == 0:
                averaged.update_parameters(net)
    chosen = averaged.module if int(averaged.n_averaged) else net
    return {name: p.detach().clone() for name, p in chosen.named_parameters()}


def brute_force(method, case):
    x = references.initial(case)
    members = references.members(case)
    p = references.weights(case, members)
    for round in range(1, case.federation.rounds + 1):
        models = [local_model(case, x, n, round) for n in members]
        weights = [p[n] for n in members]
        mean = {k: sum(w * y[k] for w, y in zip(weights, models, strict=True)) for k in x}
        seed = streams.key(case.seed, "fedbe", round)
        teachers = sampled_models(method, x, mean, models, weights, seed)
        teachers += [mean] if method.mean_teaches else []
        teachers += models if method.clients_teach else []
        x = student(method, case, mean, ensemble_labels(method, case, teachers), seed)
    return x


@pytest.mark.parametrize(
    "changes",
    [
        *({"sampler": sampler} for sampler in SAMPLERS),
        {"sampler": "dirichlet", "concentration": 0.1},
        {"samples": 0},
        {"mean_teaches": False},
        {"clients_teach": False},
        {"mean_teaches": False, "clients_teach": False},
        {"temperature": 1.0},
        {"temperature": 2.0},
        {"server_momentum": 0.0, "server_weight_decay": 0.0},
        {"server_weight_decay": 0.1},
        {"server_batch_size": 128},
        {"swa_start": 0, "swa_frequency": 1},
        {"swa_start": 500},  # too few steps: half of them
        {"swa_start": 500, "swa_frequency": 25},  # too few for any: the last
        {"swa_frequency": None},
        {"kl_mean": "samples_and_classes"},
    ],
    ids=str,
)
def test_equals_brute_force(changes):
    case, method = ragged()._replace(federation=Federation(rounds=2)), replace(LIVELY, **changes)
    assert largest_difference(final(case.run(method)), brute_force(method, case)) < 1e-12


def test_the_defaults_equal_brute_force():
    case = ragged()
    assert largest_difference(final(case.run(FedBE())), brute_force(FedBE(), case)) < 1e-12


# --- degenerate cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("changes", [{}, {"fraction": 0.5}, {"momentum": 0.9}, {"weighting": "uniform"}], ids=str)
def test_without_server_epochs_it_is_fedavg_bit_for_bit(changes, dtype):
    case = ragged(dtype)
    mine, theirs = case.run(FedBE(server_epochs=0), **changes), case.run(FedAvg(), **changes)
    assert all(equal_bits(a.after.state.params, b.after.state.params) for a, b in zip(mine, theirs, strict=True))


def test_without_server_epochs_nothing_needs_to_be_held_out():
    case = ragged()
    none = case.holdout[:0]
    assert equal_bits(final(case.run(FedBE(server_epochs=0), holdout=none)), final(case.run(FedAvg(), holdout=none)))


def test_learning_rate_zero_and_no_server_epochs_leave_the_model_bit_for_bit():
    records = ragged().run(FedBE(server_epochs=0), lr=0.0)
    assert equal_bits(final(records), records[0].before.state.params)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-7)])
def test_a_student_that_is_its_own_teacher_stays(dtype, bound):
    """The gradient at the first step is 0: it shows in one step of learning rate 1."""
    case = ragged(dtype)
    method = FedBE(samples=0, clients_teach=False, temperature=1.0, server_weight_decay=0.0, swa_frequency=None)
    one_step = replace(method, server_epochs=1, server_lr=1.0, server_batch_size=12)
    average = final(case.run(FedAvg(), rounds=1))
    assert largest_difference(final(case.run(one_step, rounds=1)), average) < bound
    assert largest_difference(final(case.run(method, rounds=1)), average) < bound
    sharper = replace(one_step, temperature=0.5)
    assert largest_difference(final(case.run(sharper, rounds=1)), average) > 1e-3


def test_distillation_changes_the_model_and_every_option_matters():
    case = ragged()
    options = [
        {},
        *({"sampler": sampler} for sampler in SAMPLERS[1:]),
        {"samples": 4},
        {"mean_teaches": False},
        {"clients_teach": False},
        {"temperature": 1.0},
        {"server_epochs": 5},
        {"server_lr": 0.1},
        {"server_momentum": 0.5},
        {"server_weight_decay": 0.01},
        {"server_batch_size": 4},
        {"swa_start": 9},
        {"swa_frequency": 3},
        {"kl_mean": "samples_and_classes"},
    ]
    models = [final(case.run(FedAvg(), rounds=1))]
    models += [final(case.run(replace(LIVELY, **changes), rounds=1)) for changes in options]
    for i, one in enumerate(models):
        assert all(largest_difference(one, other) > 1e-7 for other in models[:i])


def test_the_student_comes_closer_to_the_ensemble():
    case = ragged()
    record = case.run(LIVELY, rounds=1)[0]
    state, cohort, reports = record.before.state, record.cohort, record.reports
    targets = LIVELY.soft_labels(LIVELY.teachers(state, cohort, reports), cohort.server)
    x = case.dataset.train_x[case.holdout]

    def divergence(params):
        return float((targets * (targets / torch.softmax(functional_call(case.model, params, (x,)), 1)).log()).sum())

    average = FedAvg().aggregate(state, cohort, reports).params
    assert divergence(record.after.state.params) < 0.7 * divergence(average)


def test_averaging_over_classes_divides_the_step():
    """Without decay the published code's mean over classes is a learning rate smaller by the number of classes."""
    case, method = ragged(), replace(LIVELY, server_weight_decay=0.0)
    over_classes = replace(method, kl_mean="samples_and_classes", server_lr=3 * method.server_lr)
    assert largest_difference(final(case.run(method)), final(case.run(over_classes))) < 1e-12


# --- participation, traffic, numbers ----------------------------------------------------------------------------------


def test_partial_cohorts_weigh_their_members_by_id():
    """The published code applies the sizes of the first clients to whoever takes part."""
    case = ragged()._replace(federation=Federation(rounds=1, fraction=0.5))
    for seed in range(3):
        record = case.run(LIVELY, seed=seed)[0]
        members = record.cohort.members
        chosen = [c if n in members else c[:0] for n, c in enumerate(case.clients)]
        alone = case._replace(clients=chosen, seed=seed, federation=Federation(rounds=1))
        assert largest_difference(record.after.state.params, brute_force(LIVELY, alone)) < 1e-12


def test_a_single_member_teaches_itself():
    case = ragged(sizes=(20,))
    assert largest_difference(final(case.run(LIVELY)), brute_force(LIVELY, case)) < 1e-12


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_traffic_is_one_model_each_way(fraction):
    case = ragged()
    for record in case.run(FedBE(), fraction=fraction):
        expected = 4 * case.task().num_params * len(record.cohort.members)
        assert (record.bytes_down, record.bytes_up) == (expected, expected)


def test_numbers_worth_logging():
    case = ragged()
    record = case.run(LIVELY, rounds=1)[0]
    numbers = LIVELY.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    models = torch.stack([flatten(report.params) for report in record.reports])
    weights = torch.tensor(record.cohort.weights, dtype=torch.float64)
    mean = weights @ models
    assert numbers["clients_spread"] == pytest.approx(float((weights @ (models - mean) ** 2).sum().sqrt()))
    assert numbers["distilled_distance"] == pytest.approx(float((flatten(record.after.state.params) - mean).norm()))
    assert numbers["distilled_distance"] > 1e-3
    averaging = FedBE(server_epochs=0)
    record = case.run(averaging, rounds=1)[0]
    numbers = averaging.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    assert numbers["distilled_distance"] == 0


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_distillation_without_held_out_data_is_refused():
    case = ragged()
    with pytest.raises(UserError, match=r"got none; use --data\.holdout 0\.2, or --method\.server_epochs 0"):
        case.run(FedBE(), holdout=case.holdout[:0])


def test_running_statistics_are_refused_unless_nothing_is_distilled():
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    case = ragged()._replace(model=model)
    with pytest.raises(UserError, match="without running statistics, got one with BatchNorm"):
        case.run(FedBE())
    assert len(case.run(FedBE(server_epochs=0), rounds=1, batch_size=None, clients=case.clients[:2])) == 1
    grouped = nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)).double()
    assert len(case._replace(model=grouped).run(LIVELY)) == 3


def test_constant_buffers_are_kept():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()
            self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x):
            return self.scale * self.inner(x)

    case = ragged()._replace(model=Scaled())
    record = case.run(LIVELY, rounds=1)[0]
    assert record.after.buffers["scale"] == 2
    reports = list(LIVELY.teachers(record.before.state, record.cohort, record.reports))
    labels = LIVELY.soft_labels(reports, record.cohort.server)
    assert (labels - ensemble_labels(LIVELY, case, reports)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": -1}, "method.samples must be finite and >= 0, got -1"),
        ({"server_epochs": -1}, "method.server_epochs"),
        ({"server_lr": float("nan")}, "method.server_lr"),
        ({"server_lr": float("inf")}, "method.server_lr"),
        ({"server_weight_decay": -1e-3}, "method.server_weight_decay"),
        ({"swa_start": -1}, "method.swa_start"),
        ({"concentration": 0.0}, "method.concentration must be finite and > 0, got 0"),
        ({"temperature": 0.0}, "method.temperature"),
        ({"temperature": float("inf")}, "method.temperature"),
        ({"server_momentum": 1.0}, "method.server_momentum must lie in"),
        ({"server_batch_size": 0}, "method.server_batch_size"),
        ({"swa_frequency": 0}, "method.swa_frequency must be >= 1, or null"),
        ({"samples": 0, "mean_teaches": False, "clients_teach": False}, "at least one teacher"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        FedBE(**settings)


def test_settings_come_from_the_command_line():
    config = configure({"method": "fedbe", "method.sampler": "dirichlet", "method.swa_frequency": None})
    assert config.method == FedBE(sampler="dirichlet", swa_frequency=None)
    with pytest.raises(UserError, match="dirichlet_weighted"):
        configure({"method": "fedbe", "method.sampler": "dirichlet_weigthed"})
