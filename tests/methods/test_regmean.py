"""RegMean against least squares over the clients' samples, and its degenerate cases."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola_extended import State
from fl_lightning.methods.presets import RegMean
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged
from tests.support.layer_references import LAYERS, inputs_of, joint


def least_squares(case, record, damping, layer):
    """argmin_M sum_n p_n [(1/m_n) sum_i |M a_i - M_n a_i|^2 + gamma |M - M_n|^2]: every sample one equation."""
    rows, targets = [], []
    models = [result.local.params for result in record.clients]
    for n, weight, model in zip(record.cohort.members, record.cohort.weights, models, strict=True):
        a = inputs_of(case, model, case.clients[n])[layer]
        rows.append((weight / len(a)) ** 0.5 * a)
        targets.append(rows[-1] @ joint(model, layer).T)
    moments = torch.cat(rows)
    gamma = damping * float(moments.square().sum()) / moments.shape[1]
    for weight, model in zip(record.cohort.weights, models, strict=True):
        rows.append((weight * gamma) ** 0.5 * torch.eye(moments.shape[1], dtype=torch.float64))
        targets.append(rows[-1] @ joint(model, layer).T)
    return torch.linalg.lstsq(torch.cat(rows), torch.cat(targets)).solution.T


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("damping", [1e-3, 0.1])
def test_it_is_the_least_squares_solution_of_every_layer(damping, engine):
    case = ragged().changed(rounds=2, fraction=0.75, straggler_fraction=0.5, epochs=3)
    for record in case.run(RegMean(damping=damping), engine):
        for layer in LAYERS:
            expected = least_squares(case, record, damping, layer)
            assert float((joint(record.after.state.params, layer) - expected).abs().max()) < 1e-10


def test_inputs_that_leave_room_are_computed_as_by_their_client():
    """Five samples in all, six dimensions: the merged layer does on each what that client's own layer did."""
    torch.manual_seed(0)
    case = ragged(sizes=(2, 0, 2, 1))._replace(model=nn.Linear(5, 3).double())
    record = case.run(RegMean(damping=1e-10), rounds=1)[0]
    merged = record.after.state.params
    for n, result in zip(record.cohort.members, record.clients, strict=True):
        x, own = case.dataset.train_x[case.clients[n]], result.local.params
        assert torch.allclose(x @ merged["weight"].T + merged["bias"], x @ own["weight"].T + own["bias"], atol=1e-7)
    average = final(case.run(FedAvg(), rounds=1))
    assert largest_difference(merged, average) > 1e-2


def test_clients_with_the_same_inputs_are_averaged():
    """A_n is the same for all, and nothing is left of the weighing; the clients' models differ by their batches."""
    torch.manual_seed(0)
    case = ragged(sizes=(20, 7))._replace(model=nn.Linear(5, 3).double())
    case = case._replace(clients=[case.clients[0]] * 3)
    record = case.run(RegMean(), rounds=1)[0]
    assert largest_difference(record.clients[0].local.params, record.clients[1].local.params) > 1e-4
    assert largest_difference(record.after.state.params, final(case.run(FedAvg(), rounds=1))) < 1e-12


def test_labels_do_not_matter_to_the_merging():
    """At the same models, that is without a step worth the name, the moments are those of the inputs alone."""
    case = ragged()
    shuffled = case._replace(dataset=replace(case.dataset, train_y=case.dataset.train_y.flip(0)))
    one, other = (c.run(RegMean(), rounds=1, lr=1e-300)[0].reports for c in (case, shuffled))
    for mine, theirs in zip(one, other, strict=True):
        assert equal_bits(mine.posterior.parts(), theirs.posterior.parts())


def test_clients_train_as_fedavgs_in_every_round():
    case = ragged()
    for record in case.run(RegMean()):
        assert all(result.prior_loss == 0 for result in record.clients)
    mine, fedavg = (case.run(method, rounds=1)[0] for method in (RegMean(), FedAvg()))
    for a, b in zip(mine.clients, fedavg.clients, strict=True):
        assert equal_bits(a.local.params, b.local.params)


def test_with_large_damping_it_is_fedavg():
    case = ragged()
    assert largest_difference(final(case.run(RegMean(damping=1e9))), final(case.run(FedAvg()))) < 1e-7


def test_a_single_client_is_fedavg_bit_for_bit():
    case = ragged(sizes=(0, 20, 0))
    assert equal_bits(final(case.run(RegMean())), final(case.run(FedAvg())))


def test_rounds_do_not_remember():
    """Going on from a larger precision changes nothing: that of a round is of its own clients."""
    case = ragged()
    first, second = case.run(RegMean(), rounds=2)
    larger = State(first.after.state.posterior.damped(7.0))
    (other,) = case.go_on(RegMean(), resume=first.after._replace(state=larger))[:1]
    assert equal_bits(other.after.state.params, second.after.state.params)


def test_traffic_is_a_model_and_a_triangle_for_every_layer():
    case = ragged()
    for record in case.run(RegMean(), fraction=0.5):
        numbers = case.task().num_params + sum(n * (n + 1) // 2 for n in (6, 7))  # inputs and a one
        assert record.bytes_up == 4 * numbers * len(record.cohort.members)
