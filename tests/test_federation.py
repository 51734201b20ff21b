"""Many clients, few of whom take part: what a run asks for is what its cohorts need."""

from hashlib import sha256

import numpy as np
import pytest
import torch

from fl_lightning.data.batches import AllClients
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.partition import Split, divide, partition
from fl_lightning.data.shares import Shares, Sizes, class_counts, content_hash, sizes_of
from fl_lightning.loop import Problem, federate
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.scaffold import Scaffold
from fl_lightning.runs import checkpoint
from fl_lightning.runs.plotting import run_figures
from fl_lightning.testing.purity import same
from fl_lightning.training import Federation, Training
from tests.support.cases import ragged

POPULATION, COHORT = 20_000, 5


class Watched(Shares):
    """Shares that remember who was asked for."""

    def __init__(self, places, sizes):
        super().__init__(places, sizes)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return super().__getitem__(index)

    def __iter__(self):
        raise AssertionError("somebody walks through all clients")


def many():
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(2 * POPULATION, 5, generator=stream, dtype=torch.float64)
    y = torch.arange(2 * POPULATION) % 3
    sizes = [0 if n % 7 == 0 else 2 + n % 2 for n in range(POPULATION)]
    places = torch.randperm(2 * POPULATION, generator=stream).repeat(2)[: sum(sizes)]
    return Dataset(x, y, x[:30], y[:30], num_classes=3), Watched(places, sizes)


@pytest.mark.parametrize("method", [Scaffold(), Fola()])
def test_a_run_asks_for_the_clients_of_its_cohorts_alone(method):
    dataset, clients = many()
    task = ragged().task()
    federation = Federation(rounds=3, cohort=COHORT)
    records = list(
        federate(method, Problem(task, dataset, clients), Training(lr=0.1, epochs=1, batch_size=2), federation)
    )
    members = [n for record in records for n in record.cohort.members]
    assert set(clients.asked) == set(members)
    assert len(members) == 3 * COHORT
    assert all(n % 7 for n in members)
    if isinstance(method, Scaffold):
        assert records[-1].after.state.clients.seen == tuple(sorted(set(members)))


def test_a_round_leaves_as_much_on_disk_as_its_cohort_changes(tmp_path):
    dataset, clients = many()
    federation = Federation(rounds=5, cohort=COHORT)
    written = []
    for record in federate(Scaffold(), Problem(ragged().task(), dataset, clients), Training(batch_size=2), federation):
        checkpoint.write(tmp_path, "id", record.after)
        written.append(sum(path.stat().st_size for path in tmp_path.glob("rows-*")))
    assert written[4] - written[3] == written[3] - written[2] < 2 * COHORT * 1000  # into one copy of two


def test_the_cohorts_are_those_of_a_plain_tuple_of_sizes():
    case = ragged().changed(fraction=0.5)
    plain = case.go_on(Fola())
    lazy = case._replace(clients=Shares.of(case.clients)).go_on(Fola())
    assert [r.cohort.members for r in plain] == [r.cohort.members for r in lazy]
    assert [r.cohort.shares for r in plain] == [r.cohort.shares for r in lazy]
    assert same(plain[-1].after.state, lazy[-1].after.state)


def test_sizes_know_who_has_samples():
    sizes = Sizes((3, 0, 1, 0))
    assert sizes.eligible == [0, 2]
    assert sizes.total == 4
    assert sizes == (3, 0, 1, 0)


def test_shares_are_a_sequence():
    parts = [torch.tensor([5, 3]), torch.empty(0, dtype=torch.long), torch.tensor([9])]
    shares = Shares.of(parts)
    assert same(list(shares), parts)
    assert same([shares[n] for n in (0, 1, 2, -1, -3)], [*parts, parts[2], parts[0]])
    assert same(shares[1:], parts[1:])
    assert same(shares.owners(), torch.tensor([0, 0, 2]))
    assert sizes_of(shares) == sizes_of(parts) == (2, 0, 1)
    assert Shares.of(shares) is shares
    for wrong in (3, -4):
        with pytest.raises(IndexError):
            shares[wrong]
    with pytest.raises(ValueError, match="expected 3 samples in all shares, got 2"):
        Shares(shares.places, [2, 0])


def test_a_share_takes_nobody_elses_samples_along():
    shares = Shares(torch.arange(1000), [10] * 100)
    assert shares[3].untyped_storage().nbytes() == 80
    assert all(share.untyped_storage().nbytes() == 80 for share in shares)


def test_no_clients_at_all():
    assert len(Shares.of([])) == 0
    assert content_hash([]) == content_hash(Shares.of([]))


def test_the_data_of_a_client_are_made_when_asked_for():
    dataset, clients = many()
    data = AllClients(dataset, clients, torch.float64)
    assert len(data) == POPULATION
    assert clients.asked == []
    assert [one.client for one in data[8:10]] == [8, 9]
    assert data[-1].client == POPULATION - 1
    assert torch.equal(data[8].indices, clients[8])


def test_hash_and_counts_are_those_of_one_client_after_the_other():
    labels = torch.arange(500) % 4
    parts = partition(labels, Split(60, "quantity", alpha=0.3), seed=2)
    assert any(len(part) == 0 for part in parts)
    assert same(list(divide(labels, Split(60, "quantity", alpha=0.3), seed=2)), parts)
    shuffled = [part.flip(0) for part in parts]
    by_hand = torch.stack([labels[part].bincount(minlength=4) for part in parts])
    assert torch.equal(class_counts(labels, shuffled, 4), by_hand)
    text = b"".join(len(part).to_bytes(8, "little") + np.sort(part.numpy()).astype("<i8").tobytes() for part in parts)
    assert content_hash(shuffled) == sha256(text).hexdigest()[:16]


def test_a_picture_of_many_clients_shows_some_of_them():
    counts = torch.ones(2001, 3, dtype=torch.long)
    counts[::2] = 0
    figure = run_figures.partition(counts)
    panel = figure.axes[0]
    assert panel.get_xlabel() == "client, one in 5 of 2,001\nwithout samples (crosses): 1,001"
    assert panel.get_xlim() == (-0.5, 400.5)
    labels = [text.get_text() for text in panel.get_xticklabels()]
    assert labels[:2] == ["0", f"{5 * int(panel.get_xticks()[1]):,}"]
    assert run_figures.partition(counts[:500]).axes[0].get_xlabel().startswith("client\n")
