import torch

from fl_lightning.data.plan import ClientData, Plan
from fl_lightning.training import Training
from tests.cases import ragged


def plan(round=1, client=0, seed=0, **changes):
    case = ragged()
    data = ClientData(client, case.dataset, case.clients[0], torch.float64)
    training = Training(**{"batch_size": 8, "epochs": 2, **changes})
    return Plan(data, seed, round, training, training.epochs)


def test_every_epoch_shows_every_sample_once():
    it = plan()
    for epoch in (0, 1):
        batches = it.batches(epoch)
        assert [len(b) for b in batches] == [8, 8, 4]
        assert sorted(torch.cat(batches).tolist()) == sorted(it.data.indices.tolist())
    assert it.num_steps == len(list(it.all_batches())) == 6


def test_the_order_depends_on_seed_round_client_and_epoch_only():
    orders = {tuple(plan(r, c, s).order(e).tolist()) for r in (1, 2) for c in (0, 1) for s in (0, 1) for e in (0, 1)}
    assert len(orders) == 16
    torch.rand(5)
    assert torch.equal(plan().order(0), plan(lr=0.7, momentum=0.9).order(0))


def test_null_takes_all_data_at_once():
    it = plan(batch_size=None)
    assert [len(b) for b in it.all_batches()] == [20, 20]


def test_blocks_cover_the_data_in_order():
    it = plan()
    x = torch.cat([x for x, _ in it.data.blocks(6)])
    assert torch.equal(x, it.data.dataset.train_x[it.data.indices])
