"""Adam, AdamW and the schedules of all optimisers: torch's numbers, step by step, on every engine."""

import math

import pytest
import torch

from fl_lightning.contrib.fedsparse import FedSparse
from fl_lightning.errors import UserError
from fl_lightning.methods.ep import EP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedpa import FedPA
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fedsgd import FedSGD
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.methods.scaffold import Scaffold
from fl_lightning.optimisers.adam import Adam
from fl_lightning.optimisers.base import Gradients
from fl_lightning.params import zip_map
from fl_lightning.training import Training
from tests.support import references
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged

schedulers = torch.optim.lr_scheduler
CASES = {
    "adam": {"optimiser": "adam"},
    "adam, other settings": {"optimiser": "adam", "beta1": 0.7, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1},
    "adamw": {"optimiser": "adamw", "weight_decay": 0.1, "clip_norm": 0.3},
    "sgd, cosine": {"optimiser": "sgd", "schedule": "cosine", "momentum": 0.9, "weight_decay": 0.1},
    "adam, linear": {"optimiser": "adam", "schedule": "linear"},
    "adamw, cosine": {"optimiser": "adamw", "schedule": "cosine", "weight_decay": 0.1},
    "sgd, linear, warm-up": {"schedule": "linear", "warmup": 2},
    "adam, warm-up": {"optimiser": "adam", "warmup": 0.5},
}


def torchs(training, params):
    """The optimiser as a user of torch would write it."""
    options = {"lr": training.lr, "weight_decay": training.weight_decay}
    if training.optimiser in ("auto", "sgd"):
        return torch.optim.SGD(params, momentum=training.momentum, **options)
    options |= {"betas": (training.beta1, training.beta2), "eps": training.eps}
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[training.optimiser](params, **options)


def scheduled(training, optimiser, steps):
    """Warm-up and schedule, put together from torch's own schedulers."""
    rising = 0 if not training.warmup else min(int(training.warmup * (steps if training.warmup < 1 else 1)), steps - 1)
    left = steps - rising
    main = {
        "constant": lambda: schedulers.ConstantLR(optimiser, factor=1.0),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimiser, T_max=left),
        "linear": lambda: schedulers.LinearLR(optimiser, 1.0, 0.0, total_iters=left),
    }[training.schedule]()
    if not rising:
        return main
    warm = schedulers.LinearLR(optimiser, 1 / (rising + 1), 1.0, total_iters=rising)
    return schedulers.SequentialLR(optimiser, [warm, main], milestones=[rising])


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_clients_train_as_with_torch(changes, engine):
    """Clients of different sizes, stragglers included, against a plain loop with autograd and torch.optim."""
    case = ragged().changed(rounds=1, epochs=3, straggler_fraction=0.5, lr=0.05, **changes)
    for result in case.run(FedProx(mu=0.3), engine)[0].clients:
        params = {k: v.clone().requires_grad_() for k, v in references.initial(case).items()}
        start = {k: v.detach().clone() for k, v in params.items()}
        optimiser = torchs(case.training, list(params.values()))
        plan = result.local.plan
        schedule = scheduled(case.training, optimiser, plan.num_steps)
        for batch in list(references.batches(case, result.local.client, 1))[: plan.num_steps]:
            gradient = references.gradient(case, {k: v.detach() for k, v in params.items()}, batch)
            for k, p in params.items():
                p.grad = gradient[k] + 0.3 * (p.detach() - start[k])
            if case.training.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(params.values(), case.training.clip_norm)
            optimiser.step()
            schedule.step()
        assert largest_difference(result.local.params, {k: v.detach() for k, v in params.items()}) < 1e-12


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_has_the_bits_of_torch(name, dtype):
    training = Training(optimiser=name, lr=0.03, weight_decay=0.1, beta1=0.8, beta2=0.95)
    stream = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(4, 3, generator=stream, dtype=dtype), "b": torch.randn(5, generator=stream, dtype=dtype)}
    theirs = zip_map(lambda p: p.clone().requires_grad_(), params)
    optimiser = torchs(training, list(theirs.values()))
    mine, state = Adam(training), Adam(training).init(params)
    for number in range(4):
        grad = zip_map(lambda p: torch.randn(p.shape, generator=stream, dtype=dtype), params)
        for key, parameter in theirs.items():
            parameter.grad = grad[key].clone()
        optimiser.step()
        params, state = mine.step(params, state, Gradients(grad), {}, number)
        assert equal_bits(params, zip_map(torch.detach, theirs))


def test_auto_is_sgd_and_defaults_change_nothing():
    case = ragged()
    plain = final(case.run(FedAvg()))
    for changes in ({"optimiser": "sgd"}, {"schedule": "constant", "warmup": 0}, {"lr_rounds": None}):
        assert equal_bits(final(case.run(FedAvg(), **changes)), plain)


def test_the_rate_falls_along_a_cosine_over_rounds():
    rates = [Training(lr=0.2, lr_rounds=4, lr_decay=0.5).in_round(r).lr for r in range(1, 7)]
    shape = [(1 + math.cos(math.pi * min(r, 3) / 4)) / 2 for r in range(6)]
    assert rates == pytest.approx([0.2 * 0.5**r * s for r, s in enumerate(shape)], rel=1e-15)
    case = ragged()
    by_hand = case.run(FedAvg(), rounds=2, lr_rounds=4)
    second = case.changed(lr=0.1 * (1 + math.cos(math.pi / 4)) / 2).go_on(FedAvg(), resume=by_hand[0].after)
    assert largest_difference(final(by_hand), second[0].after.state.params) < 1e-12


def test_warm_up_never_takes_all_steps():
    warm = Training(warmup=100)
    assert [warm.factor(step, 3) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])
    assert warm.factor(0, 1) == 1
    assert Training(warmup=0.5).factor(0, 4) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimiser": "adam", "momentum": 0.9}, "training.momentum 0.9 is for --training.optimiser sgd, got adam"),
        ({"beta1": 0.5}, "training.beta1 0.5 is for --training.optimiser adam or adamw, got auto; leave one out"),
        ({"beta2": 1.0}, r"training.beta2 must lie in \[0, 1\)"),
        ({"optimiser": "adam", "eps": 0.0}, "training.eps must be a finite number > 0"),
        ({"warmup": 1.5}, "training.warmup must be a share of the steps below 1, or a whole number"),
        ({"warmup": -1}, "training.warmup must be"),
        ({"lr_rounds": 0}, "training.lr_rounds must be at least 1"),
    ],
)
def test_settings_that_do_not_go_together(settings, words):
    with pytest.raises(UserError, match=words):
        Training(**settings)


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        (Scaffold(), {"optimiser": "adam"}, "use --method.option I, or set --training.optimiser sgd"),
        (FolaExtended(cavity=True), {"optimiser": "adamw"}, "method.cavity takes mean gradients from plain SGD"),
        (FedNova(mu=0.1), {"optimiser": "adam"}, "set --method.mu 0 or --training.optimiser sgd"),
        (FedPA(), {"optimiser": "adam"}, "samples of the posterior are iterates of SGD, expected"),
        (FedPA(), {"schedule": "cosine"}, "with one learning rate, expected --training.schedule constant"),
        (EP(), {"optimiser": "adam"}, "use --method.prior_step explicit"),
        (EP(inference="vi"), {"optimiser": "adam"}, "IVON is an optimiser by itself, expected"),
        (EP(inference="samples", prior_step="explicit"), {"warmup": 2}, "one learning rate"),
        (FedSGD(), {"optimiser": "adam"}, "use --method fedadam with --training.epochs 1"),
        (FedSparse(), {"optimiser": "adam"}, "set --method.gate_lr 1"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict | str) else "",
)
def test_methods_about_sgd_refuse_others_before_training(method, changes, words):
    with pytest.raises(UserError, match=words) as refusal:
        ragged().run(method, epochs=3, **changes)
    assert "\n" not in str(refusal.value)


def test_variates_along_a_schedule_are_mean_gradients():
    """Option II with the sum of the learning rates: at a constant gradient, whatever the schedule, that gradient."""
    case = ragged().changed(rounds=1, batch_size=None, schedule="cosine", warmup=1, epochs=5, lr=1e-6)
    for method in (Scaffold(), Scaffold(option="I")):
        record = case.run(method)[0]
        for result, report in zip(record.clients, record.reports, strict=True):
            batch = case.clients[result.local.client]
            gradient = references.gradient(case, references.initial(case), batch)
            assert largest_difference(report.change, gradient) < 1e-4  # steps this short leave the gradient as it is


def test_fednova_counts_scheduled_steps_by_their_rates():
    """x - y = lr sum_t a_t g_t: |a|_1 from a loss with gradient 1 everywhere, where x - y is lr |a|_1."""
    for changes in ({"schedule": "cosine"}, {"schedule": "linear", "warmup": 2, "momentum": 0.6}):
        training = Training(lr=0.1, **changes)
        p = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimiser = torchs(training, [p])
        schedule = scheduled(training, optimiser, 7)
        for _ in range(7):
            p.grad = torch.ones_like(p)
            optimiser.step()
            schedule.step()
        case = ragged(sizes=(7, 0, 0, 0, 0)).changed(rounds=1, batch_size=1, epochs=1, lr=0.1, **changes)
        report = case.run(FedNova())[0].reports[0]
        assert float(report.norm) == pytest.approx(-p.item() / 0.1, rel=1e-12)


def test_numbers_about_overshooting_are_about_sgd():
    case = ragged().changed(rounds=2)
    for method in (Fola(), FedProx(), EP(prior_step="explicit")):
        for optimiser in ("sgd", "adam"):
            record = case.run(method, optimiser=optimiser)[-1]
            found = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
            assert "prior_stability" not in found or optimiser == "sgd"
