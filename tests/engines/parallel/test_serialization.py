"""What travels arrives as it was, and what the receiver has does not travel."""

import pytest
import torch

from fl_lightning.engines.parallel.serialization import ALIGNMENT, pack, unpack

CPU = torch.device("cpu")
BASE = torch.arange(60, dtype=torch.float32)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE.view(5, 12),
        BASE.view(5, 12).T,
        BASE.view(1, 3, 4, 5).to(memory_format=torch.channels_last),
        BASE.view(5, 12)[:, 3],
        BASE[:1].expand(4),
        BASE[7:9],
        torch.tensor(2.5, dtype=torch.float64),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([1, 2**40]),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)
@pytest.mark.parametrize("views", [True, False])
def test_tensors(tensor, views):
    found = unpack(pack({"x": tensor}, {}, CPU), {}, CPU, views)["x"]
    assert torch.equal(found, tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    dense = tensor.numel() and len(set(range(tensor.numel()))) == tensor.untyped_storage().nbytes() / tensor.itemsize
    if dense:
        assert found.stride() == tensor.stride()


def test_a_tensor_is_sent_once_and_stays_one():
    one = torch.ones(1000)
    serialized = pack([one, {"again": one}], {}, CPU)
    assert len(serialized.arrays) == 1
    first, second = unpack(serialized, {}, CPU)
    assert first is second["again"]


def test_tied_weights_stay_tied_and_buffers_come_along():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    model[2].weight = model[0].weight
    found = unpack(pack(model, {}, CPU), {}, CPU)
    assert found[2].weight is found[0].weight
    assert [name for name, _ in found.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert all(p.requires_grad for p in found.parameters())


def test_what_both_have_travels_as_a_name():
    here, there = torch.ones(10**6), torch.zeros(3)
    serialized = pack([here, 1], {"data": here}, CPU)
    assert serialized.arrays == []
    assert len(serialized.rest) < 100
    assert unpack(serialized, {"data": there}, CPU)[0] is there


def test_copies_can_be_written_to_and_views_share_memory():
    serialized = pack(torch.ones(100), {}, CPU)
    shared = torch.zeros(100 + ALIGNMENT).numpy().view("uint8")
    offset = -shared.ctypes.data % ALIGNMENT
    for skip, is_view in ((0, True), (4, False)):  # a view only where torch itself might have put it
        place = shared[offset + skip : offset + skip + 400]
        place[:] = serialized.arrays[0]
        place.flags.writeable = False
        found = unpack(serialized._replace(arrays=[place]), {}, CPU, views=True)
        assert (found.data_ptr() == place.ctypes.data) == is_view
        assert found.data_ptr() % ALIGNMENT == 0
        place.flags.writeable = True
        assert torch.equal(found, torch.ones(100))
    unpack(serialized, {}, CPU).mul_(2)


def test_tensors_of_the_senders_device_come_to_the_receivers():
    meta = torch.device("meta")
    found = unpack(pack([torch.ones(2)], {}, CPU), {}, meta)
    assert found[0].device == meta
    assert unpack(pack([torch.ones(2)], {}, meta), {}, meta)[0].device == CPU
