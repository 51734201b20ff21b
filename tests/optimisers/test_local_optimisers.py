"""Local rules: pure functions of one client, the same numbers and the same noise on every engine."""

from dataclasses import dataclass, fields

import pytest
import torch
from torch.func import vmap

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fola import Fola
from fl_lightning.optimisers.base import Gradients, LocalOptimiser
from fl_lightning.optimisers.ivon import Ivon, require_own_momentum
from fl_lightning.optimisers.sgd import ImplicitPenalty, Sgd
from fl_lightning.params import zeros, zip_map
from fl_lightning.penalty import Quadratic
from fl_lightning.system import trees
from fl_lightning.training import Training
from tests.support import references
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged

SETTINGS = {
    "plain": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 1e-2},
    "clipping": {"clip_norm": 0.5},
    "stragglers": {"straggler_fraction": 0.5, "epochs": 4},
}
BASES = {
    "no penalty": FedAvg(),
    "penalty": FedProx(mu=0.3),
    "path": Fola(strength=10),
    "per-sample gradients": Fola(strength=1, fisher="per_sample"),
}


@dataclass(frozen=True)
class Disguised(LocalOptimiser):
    """SGD that the engines do not recognise: it goes the way of every other rule."""

    training: Training

    def init(self, params):
        return Sgd(self.training).init(params)

    def step(self, params, state, gradients, noise, number):
        return Sgd(self.training).step(params, state, gradients, noise, number)


@dataclass(frozen=True)
class Adam(LocalOptimiser):
    """An optimiser with two moments and a bias correction: what the interface must be able to hold."""

    training: Training

    def init(self, params):
        return zeros(params), zeros(params)

    def step(self, params, state, gradients, noise, number):
        g = gradients.total()
        first = zip_map(lambda m, g: 0.9 * m + 0.1 * g, state[0], g)
        second = zip_map(lambda v, g: 0.999 * v + 0.001 * g * g, state[1], g)
        t = number + 1

        def moved(p, m, v):
            return p - self.training.lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)

        return zip_map(moved, params, first, second), (first, second)


@dataclass(frozen=True)
class Noisy(LocalOptimiser):
    """Takes gradients at a random point; remembers the sum of its noise."""

    training: Training

    @property
    def draws(self):
        return True

    def init(self, params):
        return zeros(params)

    def point(self, params, state, noise):
        return zip_map(lambda p, e: p + 0.1 * e, params, noise)

    def step(self, params, state, gradients, noise, number):
        total = gradients.total()
        return zip_map(lambda p, g: p - self.training.lr * g, params, total), zip_map(torch.add, state, noise)


def with_optimiser(base, optimiser):
    """A method with another rule; what the rule remembers in the end is kept in `states`, by round and client."""
    states = {}

    class Changed(type(base)):
        def local_optimiser(self, training, context):
            return optimiser(training)

        def report(self, local, context):
            states[local.plan.round, local.client] = local.optimiser_state
            return super().report(local, context)

    method = Changed(**{field.name: getattr(base, field.name) for field in fields(base)})
    return method, states


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_a_rule_that_is_sgd_gives_what_sgd_gives(base, engine, setting):
    case = ragged().changed(**SETTINGS[setting])
    method, _ = with_optimiser(base, Disguised)
    assert largest_difference(final(case.run(method, engine)), final(case.run(base, engine))) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("engine", [Functional(chunk=8), Lightning()], ids=["vmap", "lightning"])
@pytest.mark.parametrize("optimiser", [Adam, Noisy])
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_engines_agree_on_any_rule(base, optimiser, engine):
    """The same models, and the same memory of the rule in the end, stragglers included."""
    case = ragged().changed(straggler_fraction=0.5, epochs=4)
    mine, my_states = with_optimiser(base, optimiser)
    theirs, their_states = with_optimiser(base, optimiser)
    assert largest_difference(final(case.run(mine)), final(case.run(theirs, engine))) < 1e-12
    assert my_states.keys() == their_states.keys()
    for key, state in my_states.items():
        pairs = zip(trees.leaves(state), trees.leaves(their_states[key]), strict=True)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_adam_is_torchs(engine):
    """Against torch.optim.Adam on the batches of the plan."""
    case = ragged().changed(rounds=1)
    method, _ = with_optimiser(FedAvg(), Adam)
    for result in case.run(method, engine)[0].clients:
        n = result.local.client
        params = {k: v.requires_grad_() for k, v in references.initial(case).items()}
        optimiser = torch.optim.Adam(params.values(), lr=case.training.lr)
        for batch in references.batches(case, n, 1):
            gradient = references.gradient(case, {k: v.detach() for k, v in params.items()}, batch)
            for k, p in params.items():
                p.grad = gradient[k]
            optimiser.step()
        assert largest_difference(result.local.params, {k: v.detach() for k, v in params.items()}) < 1e-12


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_gradient_is_taken_at_the_point_and_noise_is_keyed(engine):
    """Brute force, with the noise drawn from its stream by hand."""
    case = ragged().changed(rounds=2)
    method, states = with_optimiser(FedAvg(), Noisy)
    for record in case.run(method, engine):
        for result in record.clients:
            n, y = result.local.client, dict(record.before.state.params)
            total = 0.0
            for step, batch in enumerate(references.batches(case, n, record.round)):
                noise = result.local.plan.noise(step, y)
                point = {k: y[k] + 0.1 * noise[k] for k in y}
                gradient = references.gradient(case, point, batch)
                y = {k: y[k] - case.training.lr * gradient[k] for k in y}
                total = total + torch.cat([noise[k].flatten() for k in y])
            assert largest_difference(result.local.params, y) < 1e-12
            found = states[record.round, n]
            assert torch.allclose(torch.cat([found[k].flatten() for k in y]), total, rtol=0, atol=1e-12)


def test_noise_depends_on_seed_round_client_and_step_and_on_nothing_else():
    case = ragged()

    def drawn(seed, round, client, step):
        results = case.run(FedAvg(), rounds=round, seed=seed)[-1].clients
        plan = next(r.local.plan for r in results if r.local.client == client)
        return plan.noise(step, references.initial(case))

    one = drawn(0, 1, 0, 0)
    assert equal_bits(one, drawn(0, 1, 0, 0))
    for other in ((1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1)):
        assert largest_difference(one, drawn(*other)) > 0.1


def test_sgd_leaves_no_memory_behind():
    case = ragged().changed(momentum=0.9)
    states = {}

    class Watching(FedAvg):
        def report(self, local, context):
            states[local.client] = local.optimiser_state
            return super().report(local, context)

    for engine in ENGINES.values():
        case.run(Watching(), engine, rounds=1)
        assert set(states.values()) == {()}


def quadratic(stiffness):
    return Quadratic(
        {"w": torch.tensor([3.0, -1.0], dtype=torch.float64)}, {"w": torch.tensor(stiffness, dtype=torch.float64)}
    )


def test_the_implicit_step_minimises_what_it_says():
    """argmin P(theta) + ||theta - theta'||^2 / (2 lr), by the zero of its derivative."""
    penalty, training = quadratic([0.5, 700.0]), Training(lr=0.1)
    params, g = (
        {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"w": torch.tensor([0.3, -0.2], dtype=torch.float64)},
    )
    new, _ = ImplicitPenalty(training, penalty).step(params, {}, Gradients(g, penalty.grad(params)), {}, 0)
    moved = params["w"] - 0.1 * g["w"]
    assert torch.allclose(penalty.grad(new)["w"] + (new["w"] - moved) / 0.1, torch.zeros(2).double(), atol=1e-11)


def test_the_implicit_step_never_overshoots_and_is_sgds_where_the_pull_is_weak():
    params, g = (
        {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"w": torch.tensor([0.3, -0.2], dtype=torch.float64)},
    )
    training = Training(lr=0.1)
    for size in (1e-6, 1e-3):
        penalty = quadratic([size, size])
        gradients = Gradients(g, penalty.grad(params))
        weak, _ = ImplicitPenalty(training, penalty).step(params, {}, gradients, {}, 0)
        explicit, _ = Sgd(training).step(params, {}, gradients, {}, 0)
        assert largest_difference(weak, explicit) < 0.1 * size  # O(lr a (lr g + lr a)): second order
    stiff, _ = ImplicitPenalty(training, quadratic([1e9, 1e9])).step(params, {}, Gradients(g), {}, 0)
    assert torch.allclose(stiff["w"], torch.tensor([3.0, -1.0], dtype=torch.float64), atol=1e-7)


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
