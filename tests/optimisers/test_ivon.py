"""IVON's step by hand, on a quadratic, at its limits and for several clients at once."""

import pytest
import torch
from torch.func import vmap

from fl_lightning.errors import UserError
from fl_lightning.optimisers.base import Gradients
from fl_lightning.optimisers.ivon import Ivon, require_own_momentum
from fl_lightning.training import Training
from tests.support.cases import largest_difference


def ivon(lr=0.1, samples=50.0, prior=0.2, start=0.8, scale=1.0, b1=0.9, b2=0.9, size=1, **training):
    full = {"w": torch.full((size,), 1.0).double()}
    return Ivon(
        Training(lr=lr, **training),
        torch.tensor(samples, dtype=torch.float64),
        {"w": prior * full["w"]},
        {"w": start * full["w"]},
        scale,
        b1,
        b2,
    )


def test_ivon_step_by_hand():
    """One number, two steps, every line of the formula written out."""
    lam, d, b1, b2, lr, h_0 = 50.0, 0.2, 0.9, 0.9, 0.1, 0.5
    optimiser = ivon(lr, lam, d, 0.8, h_0, b1, b2)
    params = {"w": torch.tensor([1.5], dtype=torch.float64)}
    state = optimiser.init(params)
    m, h, g_bar = 1.5, 0.8, 0.0
    for number, (noise, gradient) in enumerate([(0.7, 1.1), (-1.3, 0.4)]):
        e = {"w": torch.tensor([noise], dtype=torch.float64)}
        theta = m + noise / (lam * (h + d)) ** 0.5
        assert float(optimiser.point(params, state, e)["w"]) == pytest.approx(theta, rel=1e-14)
        pull = d * (m - 4.0)
        gradients = Gradients(
            {"w": torch.tensor([gradient], dtype=torch.float64)}, {"w": torch.tensor([pull], dtype=torch.float64)}
        )
        params, state = optimiser.step(params, state, gradients, e, number)
        h_hat = lam * (theta - m) * gradient * (h + d)
        g_bar = b1 * g_bar + (1 - b1) * gradient
        h = b2 * h + (1 - b2) * h_hat + 0.5 * (1 - b2) ** 2 * (h - h_hat) ** 2 / (h + d)
        m -= lr * h_0 * (g_bar / (1 - b1 ** (number + 1)) + pull) / (h + d)
        assert float(params["w"]) == pytest.approx(m, rel=1e-13)
        assert float(state.curvature["w"]) == pytest.approx(h, rel=1e-13)


def test_ivon_finds_minimum_and_curvature_of_a_quadratic():
    """C3 (2): E[h_hat] is the curvature, and the mean ends at the minimum; within 3 standard errors of a run."""
    curvature, minimum, prior, centre = 2.0, 1.0, 0.5, -1.0
    size, steps, rest = 200, 8000, 4000
    optimiser = ivon(lr=0.05, samples=100.0, prior=prior, start=1.0, b2=0.999, size=size)  # a small b2 overestimates
    stream = torch.Generator().manual_seed(3)
    params = {"w": torch.zeros(size).double()}
    state = optimiser.init(params)
    means, curvatures = [], []
    for number in range(steps):
        noise = {"w": torch.randn(size, generator=stream, dtype=torch.float64)}
        point = optimiser.point(params, state, noise)["w"]
        gradients = Gradients({"w": curvature * (point - minimum)}, {"w": prior * (params["w"] - centre)})
        params, state = optimiser.step(params, state, gradients, noise, number)
        if number >= rest:
            means.append(params["w"])
            curvatures.append(state.curvature["w"])
    expected = (curvature * minimum + prior * centre) / (curvature + prior)
    for values, target in ((means, expected), (curvatures, curvature)):
        runs = torch.stack(values).mean(0)  # of independent runs, whose spread is the standard error of one
        assert abs(float(runs.mean()) - target) < min(3 * float(runs.std()), 0.05 * target)


def test_ivon_without_noise_and_with_fixed_curvature_is_sgd():
    """C3 (3): noise 0, b2 = 1, h = 1 - d; with momentum, of gradients averaged and corrected for their start."""
    for b1 in (0.0, 0.9):
        optimiser = ivon(lr=0.1, prior=0.2, start=0.8, b1=b1, b2=1.0)
        params, zero = {"w": torch.tensor([1.5], dtype=torch.float64)}, {"w": torch.zeros(1).double()}
        state, w, average = optimiser.init(params), 1.5, 0.0
        for number, gradient in enumerate([0.3, -0.7, 1.1]):
            params, state = optimiser.step(
                params, state, Gradients({"w": torch.tensor([gradient], dtype=torch.float64)}), zero, number
            )
            average = b1 * average + (1 - b1) * gradient
            w -= 0.1 * average / (1 - b1 ** (number + 1))
            assert float(params["w"]) == pytest.approx(w, rel=1e-13)


def test_ivons_precision_at_most_halves_in_a_step():
    """C3 (5): h + d >= (h + d) / 2 whatever the estimate is, even if it is absurd."""
    stream = torch.Generator().manual_seed(0)
    for b2 in (0.0, 0.5, 0.9, 0.99999):
        optimiser = ivon(prior=0.2, start=0.8, b2=b2, size=2000)
        params = {"w": torch.zeros(2000).double()}
        noise = {"w": torch.randn(2000, generator=stream, dtype=torch.float64)}
        gradient = {"w": torch.randn(2000, generator=stream, dtype=torch.float64) * 10 ** torch.linspace(-3, 4, 2000)}
        _, state = optimiser.step(params, optimiser.init(params), Gradients(gradient), noise, 0)
        assert float((state.curvature["w"] + 0.2).min()) >= 0.5 * (0.8 + 0.2) - 1e-12


def test_ivon_clips_the_gradient():
    optimiser, plain = ivon(clip_norm=0.5), ivon()
    params, zero = {"w": torch.zeros(1).double()}, {"w": torch.zeros(1).double()}
    long = {"w": torch.tensor([5.0], dtype=torch.float64)}
    short = {"w": torch.tensor([5.0 * 0.5 / (5.0 + 1e-6)], dtype=torch.float64)}
    first, _ = optimiser.step(params, optimiser.init(params), Gradients(long), zero, 0)
    second, _ = plain.step(params, plain.init(params), Gradients(short), zero, 0)
    assert largest_difference(first, second) < 1e-15


def test_ivon_under_vmap():
    """Several clients at once, each with a number of samples of its own."""
    samples = torch.tensor([10.0, 1000.0], dtype=torch.float64)
    start = torch.tensor([[1.0], [2.0]], dtype=torch.float64)

    def stepped(samples, w, e):
        optimiser = ivon(samples=1.0)
        optimiser = Ivon(**{**vars(optimiser), "samples": samples})
        params, noise = {"w": w}, {"w": e}
        point = optimiser.point(params, optimiser.init(params), noise)
        return optimiser.step(params, optimiser.init(params), Gradients({"w": point["w"] ** 3}), noise, 0)[0]["w"]

    noise = torch.tensor([[0.3], [-0.8]], dtype=torch.float64)
    together = vmap(stepped)(samples, start, noise)
    for i in range(2):
        assert torch.allclose(together[i], stepped(samples[i], start[i], noise[i]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("setting", ["momentum", "weight_decay"])
def test_ivon_refuses_what_it_has_by_itself(setting):
    with pytest.raises(UserError, match=rf"expected training\.{setting} 0, got 0\.5; set --training\.{setting} 0"):
        require_own_momentum(Training(**{setting: 0.5}))
