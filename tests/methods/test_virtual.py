"""VIRTUAL, the variational case of expectation propagation: the tests that are its own."""

import torch

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.parts.ep_cavity import Report
from fl_lightning.methods.presets import Virtual
from fl_lightning.params import flatten
from tests.support import references
from tests.support.cases import equal_bits, largest_difference, ragged
from tests.support.conjugate import cohort_of


def test_3_a_client_that_does_not_move_leaves_the_posterior():
    """A1 (3): a report of q_S itself changes nothing, bit for bit."""
    method = Virtual()
    state = ragged().run(method, rounds=1)[0].after.state
    cohort = cohort_of((0, 1), (20, 7, 0, 33, 1))
    after = method.aggregate(state, cohort, [Report(state.params, state.precision)] * 2)
    assert equal_bits(after.params, state.params)
    assert equal_bits(after.precision, state.precision)


def test_7_without_noise_every_client_trains_as_in_fedavg():
    """A1 (7): standard deviation -> 0, no KL, fixed curvature: IVON is SGD."""
    case = ragged().changed(rounds=1)
    method = Virtual(temperature=1e-16, prior=1e-9, gradient_decay=0.0, curvature_decay=1.0)
    for mine, theirs in zip(case.run(method)[0].clients, case.run(FedAvg())[0].clients, strict=True):
        assert largest_difference(mine.local.params, theirs.local.params) < 1e-6


def backprop_gradients(case, state, samples, prior, draws=4000):
    """Bayes by backprop: slopes of (m/T) E_q[L] + KL(q || N(x_0, 1/prior)) at q's means and log standard deviations."""
    mean, log_std = flatten(state.params).clone(), -0.5 * flatten(state.precision).log()
    mean, log_std = mean.requires_grad_(), log_std.requires_grad_()
    noise = torch.randn(draws // 2, len(mean), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.cat([noise, -noise])
    weights = mean + log_std.exp() * noise
    size = case.model.weight.numel()
    x, y = case.dataset.train_x[case.clients[0]], case.dataset.train_y[case.clients[0]]
    logits = torch.einsum("ni,dki->dnk", x, weights[:, :size].view(draws, 3, 5)) + weights[:, None, size:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.repeat(draws))
    centre = torch.distributions.Normal(flatten(references.initial(case)), prior**-0.5)
    divergence = torch.distributions.kl_divergence(torch.distributions.Normal(mean, log_std.exp()), centre).sum()
    return torch.autograd.grad(samples * loss + divergence, (mean, log_std))


def test_5_a_single_client_ends_where_bayes_by_backprop_is_at_rest():
    """A1 (5): with N = 1 every cavity is the prior, and the variational problem is that of Bayes by backprop."""
    torch.manual_seed(0)
    case = ragged(sizes=(40,))._replace(model=torch.nn.Linear(5, 3).double())
    case = case.changed(rounds=6, epochs=30, batch_size=None, lr=2.0, lr_decay=0.4)
    method = Virtual(prior=20.0, curvature_start=0.05, curvature_decay=0.98, temperature=0.2)
    records = case.run(method)
    first, last = (
        backprop_gradients(case, state, 40 / method.temperature, method.prior)
        for state in (records[0].before.state, records[-1].after.state)
    )
    for before, after in zip(first, last, strict=True):
        assert float(after.norm()) < 0.15 * float(before.norm())
