from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import Diverged, UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.models.task import average_buffers
from fl_lightning.training import Federation
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, ragged


def test_rounds_follow_each_other():
    records = ragged().run(FedAvg(), rounds=4)
    assert [record.round for record in records] == [1, 2, 3, 4]
    for earlier, later in pairwise(records):
        assert earlier.after is later.before


def test_empty_clients_never_take_part():
    case = ragged()
    assert {n for r in case.run(FedAvg(), fraction=0.5, rounds=8) for n in r.cohort.members} == {0, 1, 3, 4}


def test_the_cohort_is_the_same_for_every_method():
    case = ragged()
    cohorts = [[r.cohort.members for r in case.run(method, cohort=2)] for method in (FedAvg(), Fola())]
    assert cohorts[0] == cohorts[1]
    assert cohorts[0] != [r.cohort.members for r in case.run(FedAvg(), cohort=2, seed=1)]
    assert all(list(members) == sorted(members) for members in cohorts[0])


@pytest.mark.parametrize(
    ("changes", "size"), [({"fraction": 0.5}, 2), ({"cohort": 3}, 3), ({"fraction": 0.01}, 1), ({}, 4)]
)
def test_the_cohort_s_size(changes, size):
    assert {len(r.cohort.members) for r in ragged().run(FedAvg(), **changes)} == {size}


def test_order_of_clients_does_not_matter():
    """Swapping the data of two clients swaps their models, if the batches' keys are swapped with them."""
    case = ragged()
    plain = case.run(FedAvg(), rounds=1, batch_size=None)[0]
    swapped_clients = [case.clients[i] for i in (3, 1, 2, 0, 4)]
    swapped = case._replace(clients=swapped_clients).run(FedAvg(), rounds=1, batch_size=None)[0]
    assert largest_difference(plain.after.state.params, swapped.after.state.params) < 1e-15
    models = {r.local.client: r.local.params for r in swapped.clients}
    assert largest_difference(plain.clients[0].local.params, models[3]) < 1e-15


def test_too_large_a_cohort_is_refused():
    with pytest.raises(UserError, match="only 4 of the 5 clients have data"):
        ragged().run(FedAvg(), cohort=5)


def test_no_data_at_all_is_refused():
    case = ragged()
    with pytest.raises(UserError, match="no client has any data"):
        case.run(FedAvg(), clients=[c[:0] for c in case.clients])


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_divergence_names_round_and_client(engine):
    case = ragged()
    case.dataset.train_x[case.clients[3][0]] = float("nan")
    with pytest.raises(Diverged) as caught:
        case.run(FedAvg(), engine)
    assert (caught.value.round, caught.value.client) == (1, 3)
    assert "client 3" in str(caught.value)


def test_learning_rate_decays_over_rounds():
    records = ragged().run(FedAvg(), lr_decay=0.5)
    assert [r.cohort.training.lr for r in records] == pytest.approx([0.1, 0.05, 0.025])


def test_fraction_and_cohort_exclude_each_other():
    with pytest.raises(UserError, match="give only one of them"):
        Federation(fraction=0.5, cohort=3)


def normalised_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def test_batchnorm_statistics_are_averaged_and_the_same_on_every_engine():
    case = ragged(sizes=(20, 6, 0, 34))._replace(model=normalised_network())  # the last batches are smaller
    results = [case.run(Fola(), engine) for engine in (Functional(chunk=1), Functional(chunk=4), Lightning())]
    for other in results[1:]:
        assert largest_difference(final(other), final(results[0])) < 1e-12
        for name, value in results[0][-1].after.buffers.items():
            assert torch.allclose(other[-1].after.buffers[name].double(), value.double(), atol=1e-12)
    record = results[0][-1]
    mean = sum(
        w * c.local.buffers["1.running_mean"] for w, c in zip(record.cohort.weights, record.clients, strict=True)
    )
    assert torch.allclose(record.after.buffers["1.running_mean"], mean)
    assert int(record.after.buffers["1.num_batches_tracked"]) == 3 * 2 * 5  # the largest client's steps


def test_per_sample_gradients_refuse_batchnorm():
    case = ragged(sizes=(20, 12))._replace(model=normalised_network())
    with pytest.raises(UserError, match="BatchNorm"):
        case.run(Fola(fisher="per_sample"))


def test_counters_take_the_largest_value():
    found = average_buffers([{"n": torch.tensor(3)}, {"n": torch.tensor(7)}], [0.5, 0.5])
    assert int(found["n"]) == 7


def test_frozen_parameters_stay():
    case = ragged()
    model = deepcopy(case.model)
    model[0].weight.requires_grad_(False)
    case = case._replace(model=model)
    for engine in (Functional(chunk=1), Functional(chunk=4), Lightning()):
        record = case.run(Fola(), engine)[-1]
        assert "0.weight" not in record.after.state.params
    assert torch.equal(model[0].weight, case.model[0].weight)


class Unused(nn.Module):
    """A network with a parameter that its output does not depend on."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3).double(), nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_unused_parameters_stay(engine):
    record = ragged()._replace(model=Unused()).run(Fola(), engine)[-1]
    assert torch.equal(record.after.state.params["unused"], torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_unused_parameters_decay_with_the_others(engine, momentum):
    """Weight decay is a term of the loss, (c/2) |theta|^2, whatever the forward pass leaves out."""
    case = ragged(sizes=(16, 16))._replace(model=Unused())
    settings = {"weight_decay": 0.3, "momentum": momentum, "rounds": 1}
    value, velocity = 1.0, 0.0
    for _ in range(2 * 2):
        velocity = momentum * velocity + 0.3 * value
        value -= 0.1 * velocity
    for method in (FedAvg(), Fola()):
        found = final(case.run(method, engine, **settings))["unused"]
        assert torch.allclose(found, torch.full((2,), value, dtype=torch.float64), atol=1e-14)


def test_seeds_decide_everything_else_nothing():
    case = ragged()
    assert equal_bits(final(case.run(Fola())), final(case.run(Fola())))
    assert not equal_bits(final(case.run(Fola())), final(case.run(Fola(), seed=1)))
