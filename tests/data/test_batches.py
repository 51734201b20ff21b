import pytest
import torch

from fl_lightning.data import augment
from fl_lightning.data import batches as planning
from fl_lightning.data.batches import ClientData, Plan
from fl_lightning.training import Training
from tests.support.cases import ragged
from tests.support.pictures import pictures


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


def picture_plan(name="paper", round=1, client=0, seed=0, member=0, **changes):
    case = pictures(name)
    data = ClientData(client, case.dataset, case.clients[member], torch.float32)
    training = Training(**{"batch_size": 8, "epochs": 2, **changes})
    return Plan(data, seed, round, training, training.epochs)


def images_of(it, epoch=0):
    return torch.cat([x for x, _ in it.examples(epoch)])


@pytest.mark.parametrize("name", ["standard", "paper"])
def test_examples_are_the_batches_with_the_epochs_choices(name):
    it = picture_plan(name)
    for epoch in (0, 1):
        found = list(it.examples(epoch))
        assert [len(y) for _, y in found] == [8, 8, 4] == [len(x) for x, _ in found]
        order, dataset = it.order(epoch), it.data.dataset
        expected = augment.apply(name, dataset.train_x[order], it.choices(epoch))
        assert torch.equal(torch.cat([x for x, _ in found]), dataset.inputs(expected, torch.float32))
        assert torch.equal(torch.cat([y for _, y in found]), dataset.train_y[order])
    assert len(list(it.all_examples())) == it.num_steps


def test_none_shows_the_stored_images():
    for it in (picture_plan("none"), plan()):
        for epoch in (0, 1):
            for (x, y), batch in zip(it.examples(epoch), it.batches(epoch), strict=True):
                expected_x, expected_y = it.data.fetch(batch)
                assert torch.equal(x, expected_x)
                assert torch.equal(y, expected_y)


def test_augmentation_changes_images_but_neither_order_nor_labels():
    with_it, without = picture_plan("paper"), picture_plan("none")
    for (x, y), (raw_x, raw_y) in zip(with_it.all_examples(), without.all_examples(), strict=True):
        assert torch.equal(y, raw_y)
        assert (x != raw_x).any()


def test_augmented_images_do_not_depend_on_batch_size_or_global_stream(monkeypatch):
    expected = images_of(picture_plan())
    torch.rand(5)
    for size in (1, 7, 20, 64, None):
        assert torch.equal(images_of(picture_plan(batch_size=size)), expected)
    for ahead in (1, 9, 16):
        monkeypatch.setattr(planning, "AUGMENTED_AHEAD", ahead)
        assert torch.equal(images_of(picture_plan()), expected)


def test_choices_depend_on_seed_round_client_and_epoch():
    keys = [(r, c, s, e) for r in (1, 2) for c in (0, 1) for s in (0, 1) for e in (0, 1)]
    drawn = {tuple(picture_plan(round=r, client=c, seed=s).choices(e).corner.flatten().tolist()) for r, c, s, e in keys}
    assert len(drawn) == 16


def test_a_client_of_one_sample_is_augmented():
    it = picture_plan(member=4)
    ((first, _), (second, _)) = it.all_examples()
    assert first.shape == second.shape == (1, 3, 12, 12)
    assert not torch.equal(first, second)


def test_blocks_are_never_augmented():
    it = picture_plan("paper")
    raw = it.data.dataset.train_x[it.data.indices]
    assert torch.equal(torch.cat([x for x, _ in it.data.blocks(6)]), it.data.dataset.inputs(raw, torch.float32))
