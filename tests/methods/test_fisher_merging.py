"""Fisher merging against the formula, sample by sample, and its degenerate cases."""

import pytest

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import State
from fl_lightning.methods.presets import FisherMerging
from tests.support import references
from tests.support.cases import equal_bits, final, largest_difference, ragged


@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_matches_the_formula(damping):
    """Every sample's gradient by itself, then one weighted mean for every parameter."""
    case = ragged()
    for record in case.run(FisherMerging(damping=damping), fraction=0.75):
        fishers, models = [], [result.local.params for result in record.clients]
        for n, model in zip(record.cohort.members, models, strict=True):
            squares = [
                references.gradient(case, model, case.clients[n][i : i + 1]) for i in range(len(case.clients[n]))
            ]
            fishers.append({k: sum(g[k] ** 2 for g in squares) / len(squares) for k in model})
        weights = record.cohort.weights
        mean = {k: sum(w * f[k] for w, f in zip(weights, fishers, strict=True)) for k in models[0]}
        gamma = damping * sum(float(v.sum()) for v in mean.values()) / sum(v.numel() for v in mean.values())
        expected = {
            k: sum(w * (f[k] + gamma) * y[k] for w, f, y in zip(weights, fishers, models, strict=True))
            / (mean[k] + gamma)
            for k in mean
        }
        assert largest_difference(record.after.state.params, expected) < 1e-12


def test_clients_train_as_fedavgs():
    """One shot: nothing is added to the loss, in no round."""
    case = ragged()
    for record in case.run(FisherMerging()):
        assert all(result.prior_loss == 0 for result in record.clients)
    mine, fedavg = (case.run(method, rounds=1)[0] for method in (FisherMerging(), FedAvg()))
    for a, b in zip(mine.clients, fedavg.clients, strict=True):
        assert equal_bits(a.local.params, b.local.params)


def test_with_large_damping_it_is_fedavg():
    case = ragged()
    assert largest_difference(final(case.run(FisherMerging(damping=1e9))), final(case.run(FedAvg()))) < 1e-7


def test_a_single_client_is_fedavg_bit_for_bit():
    case = ragged(sizes=(0, 20, 0))
    assert equal_bits(final(case.run(FisherMerging())), final(case.run(FedAvg())))


def test_rounds_do_not_remember():
    """The precision of a round is that of its own clients: going on from a larger one changes nothing."""
    case = ragged()
    first, second = case.run(FisherMerging(), rounds=2)
    posterior = first.after.state.posterior
    larger = State(posterior.damped(7.0))
    assert equal_bits(larger.params, first.after.state.params)
    (other,) = case.go_on(FisherMerging(), resume=first.after._replace(state=larger))[:1]
    assert equal_bits(other.after.state.params, second.after.state.params)
