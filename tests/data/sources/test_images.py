"""--data images: a folder per class."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning.data.sources.images import Images
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity


def pixels(number, size=(8, 6), mode="RGB"):
    """A picture of one colour that tells it from the others; PNG keeps it as it is."""
    colour = {"RGB": (number, 0, 255), "L": number, "P": number, "RGBA": (number, 0, 255, 9), "I;16": number}[mode]
    return Image.new(mode, size, colour)


@pytest.fixture
def folder(tmp_path):
    """Two classes with 4 and 3 training images, 2 and 1 test images."""
    number = 0
    for half, sizes in (("train", (4, 3)), ("test", (2, 1))):
        for name, size in zip(("cat", "dog"), sizes, strict=True):
            (tmp_path / half / name).mkdir(parents=True)
            for i in range(size):
                pixels(number).save(tmp_path / half / name / f"{i}.png")
                number += 1
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".hidden").mkdir()
    return tmp_path


def load(folder, **settings):
    return Images(path=str(folder), **settings).load()


def error_of(folder, **settings):
    with pytest.raises(UserError) as caught:
        load(folder, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_train_and_test(folder):
    data = load(folder)
    assert data.train_x.dtype == torch.uint8
    assert data.shape == (3, 6, 8), "channels, height, width"
    assert data.train_x[:, 0, 0, 0].tolist() == list(range(7))
    assert data.train_x[0, :, 0, 0].tolist() == [0, 0, 255]
    assert data.train_y.tolist() == [0] * 4 + [1] * 3
    assert data.test_x[:, 0, 0, 0].tolist() == [7, 8, 9]
    assert data.test_y.tolist() == [0, 0, 1]
    assert data.num_classes == 2


def test_pixels_are_where_they_were(folder):
    picture = np.random.default_rng(0).integers(256, size=(6, 8, 3), dtype=np.uint8)
    Image.fromarray(picture).save(folder / "train" / "cat" / "0.png")
    assert np.array_equal(load(folder).train_x[0].numpy(), picture.transpose(2, 0, 1))


def test_classes_alone_with_a_test_share(folder):
    data = load(folder / "train", test_share=0.3)
    assert data.test_y.tolist() == [0, 1]
    together = torch.cat([data.train_x, data.test_x])[:, 0, 0, 0]
    assert sorted(together.tolist()) == list(range(7))


def test_grey_images_have_one_channel_and_mixed_ones_three(folder):
    for file in folder.rglob("*.png"):
        pixels(7, mode="L").save(file)
    assert load(folder).shape == (1, 6, 8)
    pixels(7, mode="RGBA").save(file)
    assert load(folder).shape == (3, 6, 8)


def test_size_scales(folder):
    pixels(3, size=(20, 20)).save(folder / "train" / "cat" / "3.png")
    data = load(folder, size=5, augment="paper")
    assert data.shape == (3, 5, 5)
    assert data.train_x[:, 0, 0, 0].tolist() == list(range(7))
    assert data.augment == "paper"


def test_images_of_different_sizes_are_refused_by_name(folder):
    pixels(3, size=(20, 30)).save(folder / "train" / "dog" / "1.png")
    message = error_of(folder)
    assert f"{folder}/train/cat/0.png has 8x6 pixels and {folder}/train/dog/1.png 20x30" in message
    assert "--data.size" in message


def test_damaged_images_are_named(folder):
    file = folder / "test" / "dog" / "0.png"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(256, size=(6, 8, 3), dtype=np.uint8)).save(file)
    whole = file.read_bytes()
    for content in (b"", b"no image at all", whole[:20], whole[:80], whole[:60] + b"\0" * 20 + whole[80:]):
        file.write_bytes(content)
        message = error_of(folder)
        assert str(file) in message
        assert "replace or remove it" in message


def test_images_of_16_bits_are_refused(folder):
    pixels(300, mode="I;16").save(folder / "test" / "dog" / "0.png")
    assert "0.png is of mode I;16, not 8 bits per channel; convert it" in error_of(folder)


def test_folders_that_do_not_fit(folder, tmp_path):
    (folder / "train" / "elk").mkdir()
    assert f"class {folder}/train/elk holds no images" in error_of(folder)
    (folder / "train" / "elk").rename(folder / "test" / "elk")
    pixels(0).save(folder / "test" / "elk" / "0.png")
    assert "class elk is in" in error_of(folder)
    assert "not a folder: " in error_of(tmp_path / "none")
    assert "at least two folders, one per class" in error_of(folder / "train" / "cat")
    with pytest.raises(UserError, match=r"data.path is missing"):
        Images()
    with pytest.raises(UserError, match=r"data.size must be at least 1"):
        Images(path="x", size=0)


def test_what_has_the_name_of_an_image_and_is_none_is_named(folder):
    place = folder / "train" / "cat" / "x.png"
    place.symlink_to("x.png")  # a link to itself
    assert f"cannot read {place}: Too many levels of symbolic links" in error_of(folder)
    place.unlink()
    os.mkfifo(place)  # reading would wait for a writer
    assert f"{place} must be a file, got a folder, pipe or device" in error_of(folder)
    place.unlink()
    place.mkdir()
    assert f"{place} must be a file" in error_of(folder)


def test_a_class_without_test_images_is_fine(folder):
    (folder / "test" / "dog" / "0.png").unlink()
    (folder / "test" / "dog").rmdir()
    pixels(0).save(folder / "test" / "cat" / "9.png")
    assert load(folder).test_y.tolist() == [0, 0, 0]


def test_content_and_names_make_the_run(folder):
    def known_by(path):
        return identity(configure({"data": "images", "data.path": str(path)}))

    first = known_by(folder)
    moved = folder / "moved"
    moved.mkdir()
    for half in ("train", "test"):
        (folder / half).rename(moved / half)
    assert known_by(moved) == first
    (moved / "train" / "cat" / "0.png").rename(moved / "train" / "dog" / "9.png")
    assert known_by(moved) != first
