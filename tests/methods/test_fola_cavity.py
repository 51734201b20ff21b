"""FOLA's cavity against brute force, against SCAFFOLD, and on quadratic losses, where the optimum is known."""

from math import sqrt

import pytest
import torch
from torch import nn

from fl_lightning.client_state import ClientMemory, Snapshot
from fl_lightning.data.dataset import Dataset
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.loop import Problem, federate
from fl_lightning.methods.fola_extended import FolaExtended as Fola
from fl_lightning.methods.parts.control_variates import ControlVariates, Path, excesses, limited
from fl_lightning.methods.scaffold import Scaffold
from fl_lightning.models.task import Task
from fl_lightning.params import flatten, unflatten
from fl_lightning.training import Federation, Training
from tests.support import references
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged

LIKE_SCAFFOLD = Fola(cavity=True, strength=0, aggregation="average", cavity_limit=None)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"fraction": 0.5}, {"weighting": "uniform"}, {"straggler_fraction": 0.5, "epochs": 4}, {"weight_decay": 0.01}],
    ids=str,
)
def test_first_order_and_averaged_it_is_scaffold_bit_for_bit(changes, engine):
    case = ragged(torch.float32).changed(rounds=4, **changes)
    for mine, theirs in zip(case.run(LIKE_SCAFFOLD, engine), case.run(Scaffold(), engine), strict=True):
        assert equal_bits(mine.after.state.params, theirs.after.state.params)
        assert equal_bits(mine.after.state.variates.mean, theirs.after.state.control)
        for n in references.members(case):
            assert equal_bits(mine.after.state.variates.clients[n], theirs.after.state.clients[n])


@pytest.mark.parametrize("curvature", ["online", "offline"])
def test_engines_agree_on_the_cavity_with_a_prior(curvature):
    """Offline nothing is folded up along the path but the gradients."""
    method = Fola(cavity=True, curvature=curvature, strength=1.0)
    first, *others = (ragged().run(method, engine, rounds=3) for engine in ENGINES.values())
    for other in others:
        assert largest_difference(final(first), final(other)) < 1e-12


@pytest.mark.parametrize("strength", [0.0, 10.0])
def test_round_1_is_folas_and_round_2_is_not(strength):
    case = ragged()
    for rounds, same in ((1, True), (2, False)):
        mine, plain = (case.run(Fola(strength=strength, cavity=c), rounds=rounds) for c in (True, False))
        assert equal_bits(final(mine), final(plain)) is same


def test_without_the_cavity_nothing_is_kept_or_sent():
    records = ragged().run(Fola(cavity_limit=0.1), rounds=2)
    assert records[-1].after.state.variates == ()
    assert all(report.change == () for report in records[-1].reports)


def run_by_hand(case, cohorts, strength, limit, damping=1e-2):
    """The docstring's formulas as loops over flat vectors, diagonal form, full participation.

    `cohorts` gives the clients of every round with their epochs.
    """
    x = references.initial(case)
    like = dict(x)
    members = references.members(case)
    share = references.weights(case, members)
    lr = case.training.lr
    vector = flatten(x)
    server, c = torch.zeros_like(vector), torch.zeros_like(vector)
    own = {n: torch.zeros_like(vector) for n in members}
    for r, cohort in enumerate(cohorts, start=1):
        models, precisions, steps, means = {}, {}, {}, {}
        for n in members:
            y, fisher, slopes = vector.clone(), torch.zeros_like(vector), []
            batches = references.batches(case, n, r, cohort[n])
            for batch in batches:
                g = flatten(references.gradient(case, unflatten(y, like), batch))
                slopes.append(g)
                fisher += len(batch) / len(case.clients[n]) * g**2 / cohort[n]
                y = y - lr * (g + c - own[n] + strength * server * (y - vector))
            models[n], steps[n], means[n] = y, len(batches), torch.stack(slopes).mean(0)
            precisions[n] = fisher / r + (r - 1) / r * server
        new = dict(means)  # of the losses alone: the prior's pull is not the client's own
        centre = c + sum(share[n] * (new[n] - own[n]) for n in members)
        far = {n: sqrt(steps[n]) * float((new[n] - centre).norm()) for n in members}
        for n in members:
            others = [k for k in members if k != n]
            usual = sqrt(sum(share[k] * far[k] ** 2 for k in others) / sum(share[k] for k in others))
            new[n] = centre + (new[n] - centre) * (min(1.0, limit * usual / far[n]) if limit else 1.0)
        c = c + sum(share[n] * (new[n] - own[n]) for n in members)
        own = new
        server = sum(share[n] * precisions[n] for n in members)
        gamma = damping * float(server.mean())
        if r == 1:
            vector = sum(share[n] * (precisions[n] + gamma) * models[n] for n in members) / (server + gamma)
        else:
            vector = sum(share[n] * models[n] for n in members)
    return vector, c, own


@pytest.mark.parametrize("engine", [Functional(chunk=1), Functional(chunk=8), Lightning()], ids=["loop", "vmap", "pl"])
@pytest.mark.parametrize(("strength", "limit"), [(0.0, None), (10.0, 5.0), (10.0, 0.9)])
@pytest.mark.parametrize("stragglers", [0.0, 0.5])
def test_matches_brute_force(stragglers, strength, limit, engine):
    case = ragged().changed(rounds=4, epochs=3 if stragglers else 2, straggler_fraction=stragglers)
    records = case.run(Fola(cavity=True, strength=strength, cavity_limit=limit), engine)
    vector, c, own = run_by_hand(case, references.cohorts(records), strength, limit)
    state = records[-1].after.state
    assert (flatten(state.params) - vector).abs().max() < 1e-12
    assert (flatten(state.variates.mean) - c).abs().max() < 1e-12
    for n, slope in own.items():
        assert (flatten(state.variates.clients[n]) - slope).abs().max() < 1e-12


@pytest.mark.parametrize("form", ["inputs", "kron"])
def test_variates_are_mean_gradients_of_losses_for_every_form(form):
    """Whatever the prior has pulled; without a prior the path says it all, and nothing is summed up."""
    case = ragged().changed(rounds=3, epochs=3)
    strong, none = (Fola(cavity=True, curvature_form=form, strength=s, cavity_limit=None) for s in (0.5, 0.0))
    record = case.run(strong)[-1]
    for position, n in enumerate(record.cohort.members):
        context = strong.broadcast(record.before.state, record.cohort).of_member(position)
        pull = strong.penalty(context)
        y, slopes = dict(context.start), []
        for batch in references.batches(case, n, 3):
            slopes.append(references.gradient(case, y, batch))
            y = {k: v - case.training.lr * (slopes[-1][k] + pull.grad(y)[k]) for k, v in y.items()}
        mean = {k: sum(g[k] for g in slopes) / len(slopes) for k in y}
        assert largest_difference(record.after.state.variates.clients[n], mean) < 1e-12
    assert largest_difference(y, record.clients[-1].local.params) < 1e-12
    assert not isinstance(case.run(none)[-1].clients[0].local.path_statistics, Path)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("limit", [None, 0.9])
def test_variates_add_up_whatever_is_limited(limit, weighting, fraction):
    """c = sum_n q_n c_n over all clients: corrections add up to zero, so that they move nobody on average."""
    case = ragged()
    eligible = references.members(case)
    share = references.weights(case, eligible)
    for record in case.run(Fola(cavity=True, cavity_limit=limit), rounds=5, weighting=weighting, fraction=fraction):
        variates = record.after.state.variates
        q = {n: 1 / len(eligible) if weighting == "uniform" else share[n] for n in eligible}
        mean = sum(q[n] * flatten(variates.clients[n]) for n in eligible)
        assert (mean - flatten(variates.mean)).abs().max() < 1e-14


class Squares:
    """Linear regression on one-hot labels: quadratic losses, whose common optimum is a linear system."""

    def __init__(self, sizes=(30, 20, 10), scale=None):
        stream = torch.Generator().manual_seed(1)
        total = sum(sizes)
        x = torch.randn(total, 4, generator=stream, dtype=torch.float64)
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        x = x * (1 + owner[:, None] * torch.tensor([0.5, 0.0, -0.3, 0.2], dtype=torch.float64))
        if scale is not None:
            x[owner == len(sizes) - 1] *= scale
        y = (torch.randint(3, (total,), generator=stream) + owner) % 3
        self.dataset = Dataset(x, y, x[:3], y[:3], num_classes=3)
        self.clients = list(torch.split(torch.arange(total), list(sizes)))
        self.shares = [size / total for size in sizes]
        self.x = torch.cat([x, torch.ones(total, 1, dtype=torch.float64)], 1)
        self.y = nn.functional.one_hot(y, 3).double()

    def task(self):
        def likelihood(output, y, reduction="mean"):
            errors = 0.5 * (output - nn.functional.one_hot(y, 3).to(output)).square().sum(1)
            return errors.mean() if reduction == "mean" else errors.sum()

        torch.manual_seed(0)
        return Task(nn.Linear(4, 3).double(), likelihood)

    def optimum(self):
        """[W, b]: the least squares of all samples."""
        return torch.linalg.solve(self.x.T @ self.x, self.x.T @ self.y).T

    def gradient(self, solution, n):
        x, y = self.x[self.clients[n]], self.y[self.clients[n]]
        return (x @ solution.T - y).T @ x / len(x)

    def run(self, method, rounds, epochs=4, resume=None, lr=0.1):
        training = Training(lr=lr, epochs=epochs, batch_size=None)
        problem = Problem(self.task(), self.dataset, self.clients)
        return list(federate(method, problem, training, Federation(rounds=rounds), Functional(chunk=1), resume))


def named(solution):
    return {"weight": solution[:, :-1].clone(), "bias": solution[:, -1].clone()}


@pytest.mark.parametrize("strength", [0.0, 5.0])
def test_the_optimum_of_quadratic_losses_is_a_fixed_point(strength):
    """Everybody stays where the gradients of all cancel, whatever the strength; without the cavity nobody does."""
    squares = Squares()
    best = squares.optimum()
    for cavity in (True, False):
        method = Fola(cavity=cavity, strength=strength)
        state = squares.run(method, 1)[-1].after.state
        state = state._replace(posterior=state.posterior.with_mean(named(best)))
        if cavity:
            rows = {n: named(squares.gradient(best, n)) for n in range(3)}
            blank = ControlVariates.blank(state.params)
            state = state._replace(variates=ControlVariates(blank.mean, ClientMemory.blank(blank.mean).replaced(rows)))
        record = squares.run(method, 2, resume=Snapshot(1, state, {}))[-1]
        moved = largest_difference(record.after.state.params, named(best))
        if not cavity:
            assert moved > 1e-3
            continue
        assert moved < 1e-12
        for n in range(3):
            assert largest_difference(record.clients[n].local.params, named(best)) < 1e-12
            assert largest_difference(record.after.state.variates.clients[n], rows[n]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("strength", [0.0, 5.0])
def test_it_finds_the_optimum_of_quadratic_losses(strength):
    squares = Squares()
    best = named(squares.optimum())
    with_cavity, without = (
        largest_difference(final(squares.run(Fola(cavity=c, strength=strength), 100)), best) for c in (True, False)
    )
    assert with_cavity < 1e-9
    assert without > 1e-2


def test_a_variate_that_feeds_on_itself_is_stopped():
    """One sample with lr times curvature 4: unlimited, its variate grows threefold and more in every round."""
    squares = Squares(sizes=(300, 299, 1), scale=4.0)
    own = squares.x[-1]
    assert 0.1 * float(own @ own) > 2
    errors = {}
    for limit in (None, 5.0):
        records = squares.run(Fola(cavity=True, strength=0, cavity_limit=limit), 25, epochs=3)
        errors[limit] = float(flatten(records[-1].after.state.variates.clients[2]).norm())
    assert errors[None] > 1e6
    assert errors[5.0] < 1e3


def made_up(stream, members, weights, steps):
    """A cohort of which only what variates read is real, its variates, and changes of any length."""
    case = ragged(sizes=tuple(steps)).changed(epochs=1, batch_size=1)
    cohort = case.run(Fola(), rounds=1)[0].cohort._replace(weights=weights, shares=weights)
    assert cohort.members == members
    lengths = torch.exp(2 * torch.randn(len(members), generator=stream, dtype=torch.float64))
    vectors = torch.randn(len(members), 6, generator=stream, dtype=torch.float64)
    changes = [{"w": length * vector} for length, vector in zip(lengths, vectors, strict=True)]
    return cohort, ControlVariates.blank({"w": torch.zeros(6, dtype=torch.float64)}), changes


@pytest.mark.parametrize("limit", [1.5, 2.0, 3.0])
def test_limited_to_the_bound_and_no_further(limit):
    stream = torch.Generator().manual_seed(0)
    hit = 0
    for _ in range(20):
        weights = (0.9, 0.06, 0.03, 0.01)
        cohort, before, changes = made_up(stream, (0, 1, 2, 3), weights, (9, 5, 2, 1))
        far = excesses(before, cohort, changes)
        centre = before.renewed(cohort, changes).mean["w"]
        for change, kept, excess in zip(changes, limited(before, cohort, changes, limit), far, strict=True):
            if excess <= limit:
                assert kept is change
                continue
            hit += 1
            expected = centre + (change["w"] - centre) * (limit / excess)
            assert torch.allclose(kept["w"], expected, rtol=1e-12, atol=0)
    assert hit > 5


@pytest.mark.parametrize("limit", [1.0, 2.0, 3.0])
def test_a_client_with_enough_weight_is_never_limited(limit):
    """At equal numbers of steps, a share of 1 / (1 + limit) is enough: the others must balance it."""
    stream = torch.Generator().manual_seed(1)
    share = 1 / (1 + limit) + 1e-9
    for _ in range(50):
        weights = (share, (1 - share) / 2, (1 - share) / 4, (1 - share) / 4)
        cohort, before, changes = made_up(stream, (0, 1, 2, 3), weights, (3, 3, 3, 3))
        changes[0] = {"w": changes[0]["w"] * 1e3}
        assert excesses(before, cohort, changes)[0] <= limit


@pytest.mark.parametrize(
    ("changes", "words"), [({"momentum": 0.9}, "momentum 0"), ({"clip_norm": 1.0}, "clip_norm null")], ids=str
)
def test_optimisers_whose_path_is_no_mean_gradient_are_refused(changes, words):
    case = ragged().changed(**changes)
    case.run(Fola(), rounds=1)
    with pytest.raises(UserError, match=words):
        case.run(Fola(cavity=True), rounds=1)


def test_limits_must_be_positive():
    with pytest.raises(UserError, match="cavity_limit must be > 0, or null, got 0"):
        Fola(cavity=True, cavity_limit=0.0)
