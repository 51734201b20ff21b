"""FOLA's backtracking: nothing for clients that go downhill, the longest of the halved steps for those that do not."""

import pytest
import torch

from fl_lightning.engines.functional import Functional
from fl_lightning.errors import Diverged, UserError
from fl_lightning.methods.fola_extended import HALVINGS, backtracked
from fl_lightning.methods.fola_extended import FolaExtended as Fola
from fl_lightning.models.task import Weights
from fl_lightning.params import flatten, zip_map
from fl_lightning.penalty import Linear
from tests.support.cases import ENGINES, equal_bits, largest_difference, ragged

CAVITY = {"cavity": True, "strength": 1.0, "damping": 0.1}


def clients_of(case, method):
    """The clients of the first round, with the model they have started from."""
    record = next(iter(case.run(method, Functional(chunk=1))))
    return record.before.state.params, [result.local for result in record.clients]


def objective(local, params, slopes):
    """By hand: all samples of the client at once."""
    x, y = local.data.fetch(local.data.indices)
    with local.task.evaluating():
        loss = torch.nn.functional.cross_entropy(local.task.logits(Weights(params, local.buffers), x), y)
    return float(loss + flatten(slopes) @ flatten(params))


def test_who_goes_downhill_is_left_as_it_is():
    case = ragged(torch.float64).changed(rounds=3, lr=0.01)
    for plain, back in zip(case.run(Fola(**CAVITY)), case.run(Fola(**CAVITY, backtracking=True)), strict=True):
        assert equal_bits(plain.after.state.params, back.after.state.params)


@pytest.mark.parametrize("length", [1.0, 30.0])
def test_the_longest_step_that_does_not_rise(length):
    """Of every client, with an objective that has a minimum between the start and a point far beyond the model."""
    start, locals_ = clients_of(ragged(torch.float64), Fola())
    shares = []
    for local in locals_:
        far = zip_map(lambda x, y: x + length * (y - x), start, local.params)
        slopes = zip_map(lambda p: torch.full_like(p, 0.01), start)
        found = backtracked(local._replace(params=far), start, Linear(slopes))
        steps = [0.5**k for k in range(HALVINGS + 1)] + [0.0]
        tried = {s: zip_map(lambda x, y, s=s: x + s * (y - x), start, far) for s in steps}
        share = next(s for s in steps if objective(local, tried[s], slopes) <= objective(local, start, slopes))
        assert largest_difference(found, tried[share]) < 1e-12
        shares.append(share)
    assert length == 1.0 or min(shares) < 1.0, "nobody had to go back"


def test_a_client_without_any_loss_has_diverged():
    """At its start, or after the shortest of its steps: it would go back to the same place in every round."""
    start, (local, *_) = clients_of(ragged(torch.float64), Fola())
    broken = zip_map(lambda p: p * float("nan"), local.params)
    for params, begun in ((broken, start), (local.params, broken)):
        with pytest.raises(Diverged, match=f"client {local.client} .* in round 1"):
            backtracked(local._replace(params=params), begun, None)


@pytest.mark.parametrize("backtracking", [False, True])
def test_a_run_whose_every_step_overflows_has_diverged(backtracking):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)).double()
    case = ragged(torch.float64)._replace(model=model).changed(lr=1e200, epochs=1, batch_size=100)
    with pytest.raises(Diverged):
        case.run(Fola(strength=0.0, backtracking=backtracking))


def test_running_statistics_are_refused():
    """Those of the end would be those of the start, too. Where there are no statistics, normalisation is no matter."""
    layers = torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 3)
    case = ragged(sizes=(20, 7, 0, 33))._replace(model=torch.nn.Sequential(*layers).double())
    with pytest.raises(UserError, match=r"method\.backtracking does not support BatchNorm") as refusal:
        case.run(Fola(backtracking=True), rounds=1)
    assert "\n" not in str(refusal.value)
    case.run(Fola(), rounds=1)
    grouped = torch.nn.Sequential(layers[0], torch.nn.GroupNorm(2, 6), *layers[2:]).double()
    case._replace(model=grouped).run(Fola(backtracking=True), rounds=1)


def test_forward_passes_are_no_gradient_evaluations():
    counts = {b: ragged().run(Fola(backtracking=b), rounds=1)[0].gradient_evaluations for b in (False, True)}
    assert counts[True] == counts[False] == 2 * 61


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_round_with_a_client_that_overshoots(engine):
    """At a rate at which clients climb, the round is steadier and still the same on all engines."""
    case = ragged(torch.float64).changed(rounds=2, lr=3.0)
    method = Fola(**CAVITY | {"strength": 0.0}, backtracking=True)
    mine = [record.after.state.params for record in case.run(method, engine)]
    reference = [record.after.state.params for record in case.run(method, Functional(chunk=1))]
    assert max(map(largest_difference, mine, reference)) < 1e-9
    plain = [record.after.state.params for record in case.run(Fola(**CAVITY | {"strength": 0.0}), engine)]
    assert not equal_bits(mine[-1], plain[-1])
