from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torchvision.transforms import AutoAugmentPolicy, v2

from fl_lightning.data import augment, autoaugment
from fl_lightning.data.autoaugment import OPERATIONS, POLICY, SIGNED, Operation
from fl_lightning.errors import UserError

SIZES = ((32, 32), (20, 28))


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def photographs(number, height=32, width=32, seed=0):
    """Smooth images of different contrast, with the extreme ones at the front: black, white, flat, noise."""
    coarse = torch.rand(number, 3, 5, 5, generator=stream(seed))
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    images = (smooth * torch.linspace(20, 255, number).view(-1, 1, 1, 1)).to(torch.uint8)
    extremes = [torch.zeros_like(images[:1]), torch.full_like(images[:1], 255), torch.full_like(images[:1], 77)]
    noise = torch.randint(256, images[:1].shape, generator=stream(seed), dtype=torch.uint8)
    return torch.cat([*extremes, noise, images])[:number]


def code_of(operation):
    return OPERATIONS.index(operation) + 1


def torchvision_auto_augment(monkeypatch):
    """torchvision's transform of one image, with what it draws at random dictated by our numbers of operations."""
    transform = v2.AutoAugment(AutoAugmentPolicy.CIFAR10, fill=128)

    def augmented(image, codes):
        operations = [OPERATIONS[code - 1] if code else None for code in codes]
        draws = []
        for operation in filter(None, operations):
            draws += [0.5, 0.0 if operation.sign < 0 else 1.0] if operation.name in SIGNED else [0.5]
        taken = [(op.name, 1.0, op.level) for op in operations if op]
        unused = iter(draws)
        transform._policies = [taken]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda *_: torch.tensor(next(unused)))
            changed = transform(image)
        assert next(unused, None) is None
        return changed

    return augmented


@pytest.mark.parametrize(
    "operation", OPERATIONS, ids=lambda it: f"{it.name}{'' if it.level is None else it.level * it.sign}"
)
def test_each_operation_equals_torchvisions_on_each_image(operation, monkeypatch):
    expected = torchvision_auto_augment(monkeypatch)
    for height, width in SIZES:
        images = photographs(12, height, width)
        changed = images.clone()
        autoaugment.apply_(changed, torch.full((12,), code_of(operation)))
        for image, result in zip(images, changed, strict=True):
            assert torch.equal(result, expected(image, [code_of(operation)]))


def test_a_mixed_batch_equals_torchvision_image_by_image(monkeypatch):
    expected = torchvision_auto_augment(monkeypatch)
    images, codes = photographs(300), autoaugment.draw(300, stream())
    changed = images.clone()
    for column in codes.unbind(1):
        autoaugment.apply_(changed, column)
    for image, result, row in zip(images, changed, codes.tolist(), strict=True):
        assert torch.equal(result, expected(image, row))


def test_the_policy_is_torchvisions():
    assert list(POLICY) == v2.AutoAugment(AutoAugmentPolicy.CIFAR10)._policies


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_magnitudes_are_torchvisions(height, width):
    for name, (scale, is_signed) in v2.AutoAugment._AUGMENTATION_SPACE.items():
        magnitudes = scale(10, height, width)
        assert is_signed == (name in SIGNED)
        for level in [None] if magnitudes is None else range(10):
            expected = 0.0 if magnitudes is None else float(magnitudes[level])
            assert Operation(name, level, 1).magnitude(height, width) == expected
            if is_signed:
                assert Operation(name, level, -1).magnitude(height, width) == -expected


def test_operations_come_as_often_as_the_policy_says():
    """All pairs of first and second operation with their signs, by chi-square; impossible pairs never come."""
    number = 400_000
    drawn = Counter(map(tuple, autoaugment.draw(number, stream()).tolist()))
    expected = Counter()
    for sub_policy in POLICY:
        ways = []
        for name, probability, level in sub_policy:
            signs = (1, -1) if name in SIGNED else (1,)
            ways.append([(0, 1 - probability)])
            ways[-1] += [(code_of(Operation(name, level, sign)), probability / len(signs)) for sign in signs]
        for (first, p), (second, q) in product(*ways):
            expected[first, second] += p * q / len(POLICY)
    expected = {pair: share * number for pair, share in expected.items() if share}
    assert drawn.keys() <= expected.keys()
    assert chisquare([drawn[pair] for pair in expected], list(expected.values())).pvalue > 0.001


def test_corners_flips_and_holes_are_uniform_and_independent():
    number = 200_000
    choices = augment.draw(number, (3, 12, 7), stream())
    columns = [*choices.corner.unbind(1), choices.flip.long(), *choices.hole.unbind(1)]
    extents = [9, 9, 2, 12, 7]
    for column, extent in zip(columns, extents, strict=True):
        counts = column.bincount()
        assert len(counts) == extent
        assert chisquare(counts).pvalue > 0.001
    every_way = columns[0]
    for column, extent in zip(columns[1:], extents[1:], strict=True):
        every_way = every_way * extent + column
    assert chisquare(every_way.bincount(minlength=9 * 9 * 2 * 12 * 7)).pvalue > 0.001


@pytest.mark.parametrize(("name", "fill"), [("standard", 0), ("paper", 128)])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 9, 5)])
def test_crop_and_flip_equal_torchvisions(name, fill, shape):
    images = torch.randint(256, (60, *shape), generator=stream(), dtype=torch.uint8)
    choices = augment.draw(60, shape, stream())
    results = augment.crop_and_flip(images, choices, augment.PAD_WITH[name])
    for image, (top, left), flip, result in zip(images, choices.corner.tolist(), choices.flip, results, strict=True):
        expected = v2.functional.crop(v2.functional.pad(image, [4], fill=fill), top, left, *shape[1:])
        assert torch.equal(result, v2.functional.hflip(expected) if flip else expected)


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 9, 20)])
def test_cutout_blackens_a_square_cut_off_at_the_borders(shape):
    images = torch.randint(1, 256, (80, *shape), generator=stream(), dtype=torch.uint8)
    choices, results = augment.draw(80, shape, stream()), images.clone()
    augment.cut_out_(results, choices)
    for image, (row, column), result in zip(images.numpy(), choices.hole.tolist(), results.numpy(), strict=True):
        expected = image.copy()
        expected[:, max(0, row - 8) : row + 8, max(0, column - 8) : column + 8] = 0
        assert np.array_equal(result, expected)


def test_the_whole_pipelines(monkeypatch):
    images, choices = photographs(100), augment.draw(100, (3, 32, 32), stream(3))
    auto_augment = torchvision_auto_augment(monkeypatch)
    for name in ("standard", "paper"):
        before = images.clone()
        results = augment.apply(name, images, choices)
        assert torch.equal(images, before)
        for image, result, (top, left), flip, codes, (row, column) in zip(images, results, *choices, strict=True):
            expected = v2.functional.crop(
                v2.functional.pad(image, [4], fill=128 if name == "paper" else 0), int(top), int(left), 32, 32
            )
            expected = v2.functional.hflip(expected) if flip else expected
            if name == "paper":
                expected = auto_augment(expected, codes.tolist()).clone()
                expected[:, max(0, row - 8) : row + 8, max(0, column - 8) : column + 8] = 0
            assert torch.equal(result, expected)


@settings(max_examples=25, deadline=None)
@given(
    number=st.integers(1, 40),
    size=st.integers(1, 41),
    seed=st.integers(0, 99),
    name=st.sampled_from(["standard", "paper"]),
)
def test_an_image_does_not_depend_on_the_others_of_its_batch(number, size, seed, name):
    images, choices = photographs(number, 12, 12, seed), augment.draw(number, (3, 12, 12), stream(seed))
    together = augment.apply(name, images, choices)
    apart = [augment.apply(name, *part) for part in zip(images.split(size), choices.split(size), strict=True)]
    assert torch.equal(together, torch.cat(apart))


def test_standard_and_paper_crop_and_flip_alike():
    images = photographs(50).clamp(min=1)
    choices = augment.draw(50, (3, 32, 32), stream())
    plain = choices._replace(operations=torch.zeros_like(choices.operations))
    standard, paper = (augment.apply(name, images, plain) for name in ("standard", "paper"))
    both = (standard > 0) & (paper > 0)  # neither the border of the one nor the hole of the other
    assert both.float().mean() > 0.5
    assert torch.equal(standard[both], paper[both])


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("papper", (3, 32, 32), torch.uint8, "unknown augmentation 'papper': did you mean 'paper'"),
        ("standard", (64,), torch.uint8, "needs images as bytes"),
        ("standard", (3, 32, 32), torch.float32, "got torch.float32 of shape"),
        ("paper", (1, 28, 28), torch.uint8, "3 channels, got 1; use standard or none"),
    ],
)
def test_impossible_augmentations_are_refused(name, shape, dtype, message):
    with pytest.raises(UserError, match=message):
        augment.check(name, shape, dtype)


@pytest.mark.parametrize("name", ["none", "standard", "paper"])
def test_colour_images_can_have_any(name):
    augment.check(name, (3, 32, 32), torch.uint8)
    augment.check("none", (5,), torch.float64)
