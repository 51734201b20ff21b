"""Feature skew: each client's inputs are changed once, in its own way, and nothing else is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fl_lightning import Dataset, Split, configure, streams
from fl_lightning.data import feature_skew
from fl_lightning.data.feature_skew import levels, skew
from fl_lightning.errors import UserError
from fl_lightning.runs.problem import problem_of

GREY = torch.full((1200, 1, 8, 8), 128, dtype=torch.uint8)
CLIENTS = [torch.arange(0, 400), torch.arange(400, 1000), torch.empty(0, dtype=torch.int64), torch.arange(1000, 1100)]
SPARED = torch.arange(1100, 1200)


def dataset(inputs: Tensor) -> Dataset:
    labels = torch.arange(len(inputs)) % 2
    return Dataset(inputs, labels, inputs[:10].clone(), labels[:10], num_classes=2)


def split(kind: str, strength: float, clients: int = 4) -> Split:
    return Split(clients=clients, feature_skew=kind, skew_strength=strength)  # type: ignore[arg-type]


def pictures(number: int = 1200) -> Tensor:
    stream = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (number, 3, 9, 7), dtype=torch.uint8, generator=stream)


def test_no_skew_is_the_same_dataset() -> None:
    data = dataset(GREY)
    assert skew(data, CLIENTS, Split(clients=4), seed=0) is data


def test_noise_grows_from_client_to_client() -> None:
    skewed = skew(dataset(GREY), CLIENTS, split("noise", 0.2), seed=0).train_x
    assert skewed.dtype == torch.uint8
    for n, client in enumerate(CLIENTS):
        if len(client):
            change = skewed[client].double() / 255 - 128 / 255
            assert float(change.std()) == pytest.approx(0.2 * (n + 1) / 4, rel=0.03)
            assert float(change.mean()) == pytest.approx(0.0, abs=0.005)


@pytest.mark.parametrize("kind", ["noise", "rotation"])
def test_nothing_else_is_touched(kind: str) -> None:
    data = dataset(pictures())
    before = data.train_x.clone()
    skewed = skew(data, CLIENTS, split(kind, 10.0), seed=0)
    assert torch.equal(data.train_x, before)
    assert torch.equal(skewed.train_x[SPARED], before[SPARED])
    assert skewed.test_x is data.test_x
    assert skewed.train_y is data.train_y
    assert not torch.equal(skewed.train_x[CLIENTS[0]], before[CLIENTS[0]])


def test_noise_is_drawn_once_from_the_client_s_own_stream() -> None:
    """The reference: one stream per client, in blocks, rounded to bytes and cut off."""
    data = dataset(pictures())
    skewed = skew(data, CLIENTS, split("noise", 0.5), seed=7).train_x
    for n, client in enumerate(CLIENTS):
        stream = streams.generator(7, "feature_skew", n)
        for block in client.split(500):
            noise = torch.randn((len(block), 3, 9, 7), generator=stream)
            exact = data.train_x[block] / 255 + 0.5 * (n + 1) / 4 * noise
            off = skewed[block].double() - (exact * 255).clamp(0, 255).double()
            assert (off.abs() <= 0.5 + 1e-4).all()
    assert torch.equal(skewed, skew(data, CLIENTS, split("noise", 0.5), seed=7).train_x)
    assert not torch.equal(skewed, skew(data, CLIENTS, split("noise", 0.5), seed=8).train_x)


def test_a_client_s_noise_does_not_depend_on_the_others() -> None:
    data = dataset(pictures())
    others = [CLIENTS[0][:5], *CLIENTS[1:]]
    first, second = (skew(data, clients, split("noise", 0.5), seed=0).train_x for clients in (CLIENTS, others))
    assert torch.equal(first[400:], second[400:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_on_floating_point_inputs_is_in_their_units(dtype: torch.dtype) -> None:
    inputs = torch.zeros(1200, 50, dtype=dtype)
    skewed = skew(dataset(inputs), CLIENTS, split("noise", 8.0), seed=0).train_x
    assert skewed.dtype == dtype
    assert float(skewed[CLIENTS[3]].std()) == pytest.approx(8.0, rel=0.05)
    assert float(skewed[CLIENTS[0]].std()) == pytest.approx(2.0, rel=0.05)


def as_bytes(images: Tensor) -> Tensor:
    return images


def as_numbers(images: Tensor) -> Tensor:
    return images.double() / 100 - 1


@pytest.mark.parametrize("form", [as_bytes, as_numbers])
def test_rotation_equals_torchvision_image_by_image(form: Callable[[Tensor], Tensor]) -> None:
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import rotate

    data = dataset(form(pictures(40)))
    clients = [torch.arange(0, 20), torch.arange(20, 30), torch.arange(30, 40)]
    skewed = skew(data, clients, split("rotation", 30.0, clients=3), seed=0).train_x
    assert skewed.dtype == data.train_x.dtype
    black = 0.0 if form is as_bytes else float(data.train_x.min())
    for client, angle in zip(clients, (-30.0, 0.0, 30.0), strict=True):
        for i in client:
            expected = rotate(data.train_x[i], angle, InterpolationMode.BILINEAR, fill=black)
            # A byte may be rounded the other way in a batch.
            assert (skewed[i].double() - expected.double()).abs().max() <= (1 if form is as_bytes else 1e-6)
    assert torch.equal(skewed[20:30], data.train_x[20:30])


def test_positive_angles_turn_counterclockwise() -> None:
    data = dataset(pictures(40)[:, :, :7, :7])
    clients = [torch.arange(0, 20), torch.arange(20, 40)]
    skewed = skew(data, clients, split("rotation", 90.0, clients=2), seed=0).train_x
    assert torch.equal(skewed[20:], data.train_x[20:].rot90(1, (2, 3)))
    assert torch.equal(skewed[:20], data.train_x[:20].rot90(-1, (2, 3)))


def test_a_single_client() -> None:
    data, everybody = dataset(pictures(40)), [torch.arange(40)]
    assert levels(split("rotation", 45.0, clients=1)) == [0.0]
    assert levels(split("noise", 0.1, clients=1)) == [0.1]
    assert torch.equal(skew(data, everybody, split("rotation", 45.0, clients=1), 0).train_x, data.train_x)
    assert levels(Split(clients=3)) == [0.0] * 3


def test_only_images_can_be_turned() -> None:
    with pytest.raises(UserError, match=r"rotation needs images .* got inputs of shape \(50,\); use .* noise"):
        skew(dataset(torch.zeros(1200, 50)), CLIENTS, split("rotation", 45.0), seed=0)


def test_blocks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(pictures())
    whole = skew(data, CLIENTS, split("rotation", 20.0), seed=0).train_x
    monkeypatch.setattr(feature_skew, "BLOCK", 7)
    assert torch.equal(skew(data, CLIENTS, split("rotation", 20.0), seed=0).train_x, whole)


@pytest.mark.parametrize("kind", ["noise", "rotation"])
def test_a_run_trains_on_skewed_data_and_is_tested_on_clean_ones(kind: str) -> None:
    settings = {"data": "digits", "data.holdout": 0.2, "data.clients": 4, "data.alpha": 10}
    plain = problem_of(configure(settings))
    skewed = problem_of(configure({**settings, "data.feature_skew": kind, "data.skew_strength": 20}))
    assert all(torch.equal(one, other) for one, other in zip(plain.clients, skewed.clients, strict=True))
    assert torch.equal(plain.dataset.test_x, skewed.dataset.test_x)
    assert torch.equal(plain.dataset.train_x[plain.holdout], skewed.dataset.train_x[plain.holdout])
    for client in plain.clients:
        assert not torch.equal(plain.dataset.train_x[client], skewed.dataset.train_x[client])
