"""Clients that manage only some of their epochs: who they are, who drops them, and how engines train them."""

import pytest
import torch

from fl_lightning.data.batches import ClientData
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.federation import draw_cohort, draw_stragglers
from fl_lightning.loop import Server
from fl_lightning.methods.data_sharing import DataSharing
from fl_lightning.methods.ep import EP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.system import trees
from fl_lightning.training import Federation, Training
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, ragged

KEEPERS = [FedAvg(stragglers="keep"), FedProx(), FedProx(mu=0.0), Fola(), DataSharing(stragglers="keep")]
DROPPERS = [FedAvg(), DataSharing()]


def server_of(sizes, seed=0):
    case = ragged()
    nothing = ClientData(-1, case.dataset, torch.empty(0, dtype=torch.long), torch.float64)
    return Server(case.task(), tuple(sizes), nothing, seed)


def cohort_of(method, round=1, epochs=5, sizes=(4,) * 20, seed=0, **options):
    return draw_cohort(method, server_of(sizes, seed), Training(epochs=epochs), Federation(**options), round)


def done_by(cohort):
    return dict(zip(cohort.members, cohort.epochs, strict=True))


@pytest.mark.parametrize("method", KEEPERS, ids=repr)
def test_every_method_meets_the_same_stragglers(method):
    for number in range(1, 6):
        options = {"round": number, "straggler_fraction": 0.5, "fraction": 0.6}
        assert cohort_of(method, **options)[:5] == cohort_of(FedAvg(stragglers="keep"), **options)[:5]


@pytest.mark.parametrize("method", DROPPERS, ids=repr)
def test_those_who_drop_go_on_with_the_others(method):
    for number in range(1, 6):
        options = {"round": number, "straggler_fraction": 0.5, "fraction": 0.6}
        everyone = done_by(cohort_of(FedProx(), **options))
        assert done_by(cohort_of(method, **options)) == {n: done for n, done in everyone.items() if done == 5}


def test_fedprox_keeps_and_fedavg_drops_by_default():
    assert FedAvg().traits.drops_stragglers
    assert not FedAvg(stragglers="keep").traits.drops_stragglers
    assert not FedProx().traits.drops_stragglers


def test_stragglers_do_not_change_who_is_drawn():
    for number in range(1, 6):
        with_them = cohort_of(FedProx(), round=number, straggler_fraction=0.9, fraction=0.5)
        without = cohort_of(FedProx(), round=number, fraction=0.5)
        assert with_them.members == without.members
        assert with_them.weights == without.weights
        assert set(without.epochs) == {5}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 10, 20])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_their_number_is_the_rounded_share(share, size):
    members = range(100, 100 + size)
    stragglers = draw_stragglers(members, 5, Federation(straggler_fraction=share), seed=0, round=1)
    assert len(stragglers) == int(share * size + 0.5)
    assert set(stragglers) <= set(members)


@pytest.mark.parametrize("epochs", [2, 3, 8])
def test_they_manage_one_epoch_or_more_but_not_all(epochs):
    seen = set()
    for number in range(1, 40):
        stragglers = draw_stragglers(range(10), epochs, Federation(straggler_fraction=0.5), seed=0, round=number)
        seen |= set(stragglers.values())
    assert seen == set(range(1, epochs))


def test_nobody_straggles_in_one_epoch():
    assert draw_stragglers(range(10), 1, Federation(straggler_fraction=0.9), seed=0, round=1) == {}
    cohort = cohort_of(FedAvg(), epochs=1, straggler_fraction=0.9)
    assert len(cohort.members) == 20
    assert set(cohort.epochs) == {1}


def test_draws_are_keyed_by_seed_and_round():
    federation = Federation(straggler_fraction=0.5)

    def draw(seed, round):
        return draw_stragglers(range(20), 5, federation, seed, round)

    torch.rand(3)
    assert draw(0, 1) == draw(0, 1)
    assert draw(0, 1).keys() != draw(0, 2).keys()
    assert draw(0, 1).keys() != draw(1, 1).keys()


def test_cohorts_are_drawn_anew_in_every_round_and_for_every_seed():
    drawn = {cohort_of(FedProx(), round=r, seed=s, fraction=0.5).members for r in range(1, 4) for s in range(3)}
    assert len(drawn) == 9


@pytest.mark.parametrize(("clients", "share", "number"), [(5, 0.5, 3), (5, 0.29, 1), (5, 0.01, 1), (4, 0.4, 2)])
def test_a_fraction_of_the_clients_is_rounded_to_one_or_more(clients, share, number):
    assert len(cohort_of(FedProx(), sizes=(4,) * clients, fraction=share).members) == number


def test_everybody_is_one_sooner_or_later():
    federation = Federation(straggler_fraction=0.2)
    seen = set()
    for number in range(1, 40):
        seen |= set(draw_stragglers(range(10), 5, federation, seed=0, round=number))
    assert seen == set(range(10))


def test_weights_are_renormalised_over_those_who_remain():
    sizes = tuple(range(1, 21))
    cohort = cohort_of(FedAvg(), sizes=sizes, straggler_fraction=0.5)
    kept = [sizes[n] for n in cohort.members]
    assert len(kept) == 10
    assert cohort.weights == pytest.approx([size / sum(kept) for size in kept])
    assert sum(cohort.weights) == pytest.approx(1)
    assert cohort.shares == pytest.approx([size / sum(sizes) for size in kept])
    uniform = cohort_of(FedAvg(), sizes=sizes, straggler_fraction=0.5, weighting="uniform")
    assert uniform.members == cohort.members
    assert uniform.weights == pytest.approx([1 / 10] * 10)


def test_when_all_are_stragglers_none_is_dropped():
    """A round without clients would be no round."""
    cohort = cohort_of(FedAvg(), straggler_fraction=1.0)
    assert len(cohort.members) == 20
    assert max(cohort.epochs) < 5
    assert done_by(cohort) == done_by(cohort_of(FedProx(), straggler_fraction=1.0))


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_impossible_shares_are_refused(share):
    with pytest.raises(UserError, match=r"federation\.straggler_fraction must lie in \[0, 1\], got"):
        Federation(straggler_fraction=share)


def reference(case, cohorts, mu):
    """FedAvg or FedProx where client n takes as many epochs as the cohort says."""
    x = references.initial(case)
    for number, cohort in enumerate(cohorts, start=1):
        weights = references.weights(case, list(cohort))
        models = {}
        for n, epochs in cohort.items():
            y = dict(x)
            for batch in references.batches(case, n, number, epochs):
                slope = references.gradient(case, y, batch)
                y = {name: y[name] - case.training.lr * (slope[name] + mu * (y[name] - x[name])) for name in y}
            models[n] = y
        x = {name: sum(weights[n] * models[n][name] for n in cohort) for name in x}
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "mu"), [(FedAvg(stragglers="keep"), 0.0), (FedAvg(), 0.0), (FedProx(mu=0.5), 0.5)], ids=repr
)
@pytest.mark.parametrize("engine", [Functional(1), Functional(3), Functional(8), Lightning()], ids=repr)
def test_engines_train_everybody_as_long_as_drawn(engine, method, mu):
    case = ragged(seed=2)
    case = case._replace(training=Training(lr=0.1, epochs=6, batch_size=8))
    records = case.run(method, engine, straggler_fraction=0.5)
    cohorts = [done_by(record.cohort) for record in records]
    if not method.traits.drops_stragglers:
        assert all(len(set(cohort.values())) > 1 for cohort in cohorts)
    assert largest_difference(final(records), reference(case, cohorts, mu)) < 1e-13
    for record in records:
        for result, epochs in zip(record.clients, record.cohort.epochs, strict=True):
            assert result.local.num_epochs == epochs
            assert result.local.num_steps == epochs * -(-len(result.local.data) // 8)
        done = done_by(record.cohort)
        assert record.gradient_evaluations == sum(len(case.clients[n]) * epochs for n, epochs in done.items())
        assert record.bytes_up == 4 * case.task().num_params * len(done)


def test_a_straggler_takes_the_first_epochs_of_the_others():
    """Its batches are those it would have seen anyway, so its model is that of a run with fewer epochs."""
    case = ragged()
    slow = case.run(FedProx(), rounds=1, epochs=4, straggler_fraction=0.5)[0]
    compared = 0
    for result in slow.clients:
        shorter = case.run(FedProx(), rounds=1, epochs=result.local.num_epochs)[0]
        twin = next(other for other in shorter.clients if other.local.client == result.local.client)
        assert equal_bits(result.local.params, twin.local.params)
        compared += result.local.num_epochs < 4
    assert compared == 2


@pytest.mark.parametrize(
    "method",
    [Fola(), Fola(fisher="per_sample"), Fola(curvature_form="full"), FolaExtended(cavity=True), EP(curvature="path")],
    ids=repr,
)
def test_means_along_a_path_are_over_the_epochs_that_were_managed(method):
    """Where nobody moves, every epoch is the same: a mean over one is that over all."""
    still = ragged().changed(rounds=1, lr=0.0, batch_size=None)
    slow, once = still.run(method, epochs=4, straggler_fraction=0.5)[0], still.run(method, epochs=1)[0]
    assert len(set(slow.cohort.epochs)) > 1
    for mine, theirs in zip(slow.reports, once.reports, strict=True):
        for one, other in zip(trees.leaves(mine), trees.leaves(theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_stragglers_change_the_result():
    case = ragged()
    usual = final(case.run(FedProx(), epochs=4))
    assert largest_difference(final(case.run(FedProx(), epochs=4, straggler_fraction=0.5)), usual) > 1e-4
    assert largest_difference(final(case.run(FedAvg(), epochs=4, straggler_fraction=0.5)), usual) > 1e-4
