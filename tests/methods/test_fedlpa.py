"""FedLPA against its formula with the factors of single samples, and its degenerate cases."""

from dataclasses import replace

import pytest
import torch

from fl_lightning.gaussian import kronecker_solve
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.presets import FedLPA
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged
from tests.support.gaussian_references import kron_matrix
from tests.support.layer_references import LAYERS, factors_of, joint


@pytest.fixture(autouse=True)
def converged(monkeypatch):
    monkeypatch.setattr(kronecker_solve, "TOLERANCE", 1e-13)


def damped_factors(case, record, damping):
    """A_n and G_n of every client and layer, the same number added to both diagonals."""
    found = []
    for n, result in zip(record.cohort.members, record.clients, strict=True):
        factors = factors_of(case, result.local.params, case.clients[n], "empirical")
        found.append(
            {k: [f + damping * torch.eye(len(f), dtype=torch.float64) for f in pair] for k, pair in factors.items()}
        )
    return found


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("damping", [0.0316, 0.5])
def test_it_is_its_formula(damping, engine):
    """[sum p G]^-1 [sum p G M A] [sum p A]^-1, written with inverses."""
    case = ragged().changed(rounds=2, fraction=0.75)
    for record in case.run(FedLPA(damping=damping, damping_slopes=damping), engine):
        factors, weights = damped_factors(case, record, damping), record.cohort.weights
        for layer in LAYERS:
            a = sum(p * f[layer][0] for p, f in zip(weights, factors, strict=True))
            g = sum(p * f[layer][1] for p, f in zip(weights, factors, strict=True))
            middle = sum(
                p * f[layer][1] @ joint(result.local.params, layer) @ f[layer][0]
                for p, f, result in zip(weights, factors, record.clients, strict=True)
            )
            expected = torch.linalg.inv(g) @ middle @ torch.linalg.inv(a)
            assert float((joint(record.after.state.params, layer) - expected).abs().max()) < 1e-10


def test_solved_exactly_it_is_the_product_of_the_posteriors():
    """`solver cg` against one dense system of Kronecker products for each layer."""
    case = ragged()
    record = case.run(FedLPA(solver="cg"), rounds=1)[0]
    factors, weights = damped_factors(case, record, 0.0316), record.cohort.weights
    for layer in LAYERS:
        names = (f"{layer}.weight", f"{layer}.bias")
        matrices = [p * kron_matrix(f[layer][1], f[layer][0]) for p, f in zip(weights, factors, strict=True)]
        own = [torch.cat([r.local.params[name].flatten() for name in names]) for r in record.clients]
        expected = torch.linalg.solve(sum(matrices), sum(m @ v for m, v in zip(matrices, own, strict=True)))
        found = torch.cat([record.after.state.params[name].flatten() for name in names])
        assert torch.allclose(found, expected, atol=1e-9)


def test_clients_that_share_their_samples_are_averaged_up_to_their_models():
    """Equal factors, as of clients with the same samples at the same model, make the factored solution exact."""
    case = ragged(sizes=(20, 7))
    case = case._replace(clients=[case.clients[0]] * 3)
    start = final(case.run(FedAvg(), rounds=1, lr=1e-300))
    assert largest_difference(final(case.run(FedLPA(), rounds=1, lr=1e-300)), start) < 1e-12


def test_labels_matter():
    """Its slopes are those of the samples' own labels, unlike FedFisher's."""
    case = ragged()
    shuffled = case._replace(dataset=replace(case.dataset, train_y=case.dataset.train_y.flip(0)))
    one, other = (c.run(FedLPA(), rounds=1, lr=1e-300)[0].reports[0].posterior.parts() for c in (case, shuffled))
    same = {key for key in one if torch.equal(one[key], other[key])}
    assert same == {key for key in one if key.endswith("inputs")}


def test_with_large_damping_it_is_fedavg():
    case = ragged()
    damped = FedLPA(damping=1e9, damping_slopes=1e9)
    assert largest_difference(final(case.run(damped)), final(case.run(FedAvg()))) < 1e-6


def test_a_single_client_is_fedavg_bit_for_bit():
    case = ragged(sizes=(0, 20, 0))
    assert equal_bits(final(case.run(FedLPA())), final(case.run(FedAvg())))


def test_clients_train_as_fedavgs_in_every_round():
    case = ragged()
    for record in case.run(FedLPA()):
        assert all(result.prior_loss == 0 for result in record.clients)
    mine, fedavg = (case.run(method, rounds=1)[0] for method in (FedLPA(), FedAvg()))
    for a, b in zip(mine.clients, fedavg.clients, strict=True):
        assert equal_bits(a.local.params, b.local.params)


def test_traffic_is_a_model_and_two_triangles_for_every_layer():
    case = ragged()
    for record in case.run(FedLPA(), fraction=0.5):
        numbers = case.task().num_params + sum(n * (n + 1) // 2 for n in (6, 6, 7, 3))
        assert record.bytes_up == 4 * numbers * len(record.cohort.members)
