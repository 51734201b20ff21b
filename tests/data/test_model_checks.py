"""Models whose samples depend on each other: which they are, and the batches they are trained on."""

import pytest
import torch
from torch import nn

from fl_lightning import discovery
from fl_lightning.data.batches import ClientData
from fl_lightning.data.model_checks import couples_samples, smallest_batch
from fl_lightning.engines.functional import Functional
from fl_lightning.errors import UserError
from fl_lightning.methods.data_sharing import DataSharing
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedcurv import FedCurv
from fl_lightning.methods.fedpa import FedPA
from fl_lightning.methods.fola import Fola
from fl_lightning.models.task import Task
from fl_lightning.params import flatten
from fl_lightning.training import Training
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, network, ragged
from tests.support.pictures import pictures
from tests.support.variants import method_of


class Centred(nn.Module):
    """A layer that subtracts the mean over the batch: it couples samples without being BatchNorm."""

    def forward(self, x):
        return x - x.mean(0)


class FunctionalDropout(nn.Module):
    """Dropout that no list of modules shows."""

    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


def around(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), *layers, nn.Tanh(), nn.Linear(6, 3)).double()


INDEPENDENT = {
    "plain": network,
    "dropout": lambda: network(dropout=0.5),
    "functional dropout": lambda: around(FunctionalDropout()),
    "layer norm": lambda: around(nn.LayerNorm(6)),
    "group norm": lambda: around(nn.GroupNorm(2, 6)),
}
COUPLED = {"batch norm": lambda: around(nn.BatchNorm1d(6)), "centred": lambda: around(Centred())}


def data_of(case):
    return ClientData(0, case.dataset, case.clients[0], torch.float64)


@pytest.mark.parametrize("name", INDEPENDENT | COUPLED)
def test_coupling_is_seen_and_looking_leaves_no_trace(name):
    task, data = Task((INDEPENDENT | COUPLED)[name]()), data_of(ragged())
    task.model.eval()
    before, stream = task.weights(), torch.get_rng_state()
    assert couples_samples(task, data) == (name in COUPLED)
    assert smallest_batch(task, data) == (2 if name == "batch norm" else 1)
    assert torch.equal(torch.get_rng_state(), stream)
    assert not task.model.training
    for was, now in zip(before, task.weights(), strict=True):
        assert equal_bits(was, now)


def test_vmap_pads_no_batch_whose_samples_depend_on_each_other():
    case = ragged()._replace(model=COUPLED["centred"]())
    assert (
        largest_difference(
            final(case.run(FedAvg(), Functional(chunk=1))), final(case.run(FedAvg(), Functional(chunk=4)))
        )
        < 1e-12
    )


def test_per_sample_gradients_of_coupled_samples_are_refused_before_training():
    for build in COUPLED.values():
        case = ragged(sizes=(20, 12))._replace(model=build())
        for method in (Fola(fisher="per_sample"), Fola(fisher="per_sample", curvature="offline"), FedCurv()):
            with pytest.raises(UserError, match=r"whose samples do not depend on each other.*fisher minibatch"):
                case.run(method)


def test_a_last_batch_of_one_joins_the_one_before_it_where_the_model_needs_it():
    case = ragged(sizes=(17, 9, 0, 24))  # batches of 8
    for model, expected in ((network(), [3, 2, 3]), (COUPLED["batch norm"](), [2, 1, 3])):
        (record,) = case._replace(model=model).run(FedAvg(), rounds=1, epochs=1)
        assert [result.local.num_steps for result in record.clients] == expected
        for result in record.clients:
            seen = torch.cat(list(result.local.plan.all_batches()))
            assert torch.equal(seen.sort().values, case.clients[result.local.client].sort().values)


@pytest.mark.slow
@pytest.mark.parametrize("name", discovery.names("methods"))
def test_batch_norm_trains_alike_on_every_engine_whatever_the_sizes(name):
    case = ragged(sizes=(17, 9, 0, 24, 2))._replace(model=COUPLED["batch norm"]())
    try:
        results = [case.run(method_of(name), engine) for engine in ENGINES.values()]
    except UserError as refusal:  # FedBE and per-sample Fishers have no use for it
        if "BatchNorm" not in str(refusal):
            raise
        return
    size = float(flatten(final(results[0])).abs().max())  # a strength may be too large here: all must explode alike
    for other in results[1:]:
        assert largest_difference(final(other), final(results[0])) < 1e-12 * max(1.0, size)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_augmented_batches_join_too(engine):
    case = pictures("standard")
    torch.manual_seed(0)
    size = case.dataset.train_x[0].numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, 4), nn.BatchNorm1d(4), nn.Linear(4, case.dataset.num_classes))
    clients = [torch.cat(case.clients)[:n] for n in (9, 5)]
    case = case._replace(model=model.double(), clients=clients).changed(batch_size=4)
    record = case.run(FedAvg(), engine, rounds=1, epochs=1)[0]
    assert [result.local.num_steps for result in record.clients] == [2, 1]


def test_images_are_not_too_few_by_themselves():
    """BatchNorm over the pixels of a single image is well defined, as in torch: nothing is merged, nobody refused."""
    case = pictures("none")
    channels = case.dataset.train_x.shape[1]
    features = nn.Sequential(nn.Conv2d(channels, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
    width = features(torch.zeros(2, *case.dataset.shape)).shape[1]
    model = nn.Sequential(features, nn.Linear(width, case.dataset.num_classes)).double()
    clients = [torch.cat(case.clients)[:n] for n in (5, 1)]
    record = case._replace(model=model, clients=clients).changed(batch_size=4).run(FedAvg(), rounds=1, epochs=1)[0]
    assert [result.local.num_steps for result in record.clients] == [2, 1]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_client_with_a_single_sample_is_refused_by_name(engine):
    case = ragged()._replace(model=COUPLED["batch norm"]())
    with pytest.raises(UserError, match=r"at least 2 samples.*client 4 has a single one; set --data\.min_samples 2"):
        case.run(FedAvg(), engine)
    two = ragged(sizes=(1, 8, 1))._replace(model=COUPLED["batch norm"]())
    with pytest.raises(UserError, match="clients 0, 2 have a single one"):
        two.run(FedAvg(), engine)
    case.run(DataSharing(share=1.0), engine)  # its clients have the server's samples beside their own
    with pytest.raises(UserError, match=r"training\.batch_size must be at least 2 .*got 1"):
        case.run(FedAvg(), engine, batch_size=1, clients=case.clients[:2])


def test_a_warm_up_needs_company_too():
    case = ragged(sizes=(20, 12))._replace(model=COUPLED["batch norm"]())
    case.run(DataSharing(warmup_epochs=1, warmup_batch_size=11))  # of 12 samples: the last joins
    for settings, holdout in (({"warmup_batch_size": 1}, case.holdout), ({}, case.holdout[:1])):
        with pytest.raises(UserError, match=r"warm-up .* at least 2 samples, got 1"):
            case.run(DataSharing(warmup_epochs=1, **settings), holdout=holdout)


def test_windows_of_steps_count_joined_batches_once():
    case = ragged(sizes=(9, 17))._replace(model=COUPLED["batch norm"]()).changed(epochs=3)
    method = FedPA(burn_in=1, window=2)
    (record,) = case.run(method, rounds=1)
    found = method.diagnose(record.before.state, record.cohort, record.reports, record.after.state)
    assert found["posterior_samples"] == [1, 2]  # two epochs of one step, and of two
    with pytest.raises(UserError, match="client 0 takes only 2"):
        case.run(FedPA(burn_in=1, window=3))


@pytest.mark.parametrize("size", [None, 1, 2, 3, 8, 100])
def test_sizes_of_batches(size):
    training = Training(batch_size=size)
    for number in range(1, 40):
        for smallest in (1, 2):
            sizes = training.batch_sizes(number, smallest)
            assert sum(sizes) == number
            assert len(sizes) == training.steps_per_epoch(number, smallest)
            if smallest == 1:
                assert sizes == [len(part) for part in torch.split(torch.arange(number), size or number)]
            elif (size or number) > 1 and number > 1:
                assert min(sizes) >= 2
