"""Local rules: pure functions of one client, the same numbers and the same noise on every engine."""

from dataclasses import dataclass, fields

import pytest
import torch

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fola import Fola
from fl_lightning.optimisers.base import LocalOptimiser
from fl_lightning.optimisers.sgd import Sgd
from fl_lightning.params import zeros, zip_map
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
