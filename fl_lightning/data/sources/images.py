"""Your own images: one folder per class."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fl_lightning.data.augment import Name
from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import assemble, fingerprint
from fl_lightning.data.readers.image_files import decode
from fl_lightning.data.readers.memory_map import Array, mapped
from fl_lightning.errors import UserError, require

VERSION = 1
ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"})


@dataclass(frozen=True)
class Images(Source):
    """Your own images: folder/train/<class>/*.png and folder/test/<class>/*.png, or folder/<class>/*.png.

    Attributes:
        path: The folder. Every folder of the last level is a class, numbered in the order of the alphabet; all images
            have one size, grey or in colour.
        size: Height and width to which every image is scaled; null leaves them as they are.
        test_share: Share of every class that becomes the test set, without a folder test; the same for every
            seed.
        augment: Augmentation of training images. none; standard: random crop and flip; paper: crop,
            flip, AutoAugment and Cutout.
    """

    path: str = ""
    size: int | None = None
    test_share: float = 0.2
    augment: Name = "none"

    def __post_init__(self) -> None:
        assemble.given_path(self.path, "my_images")
        assemble.check_share(self.test_share)
        require(self.size is None or self.size >= 1, f"data.size must be at least 1 or null, got {self.size}")

    def load(self) -> Dataset:
        halves = self._halves()
        settings = {"reader": "images", "version": VERSION, "size": self.size, "test_share": self.test_share}
        with assemble.blaming(self._folder):
            arrays = mapped(self._files(halves), lambda: self._read(halves), settings)
            return assemble.dataset(arrays, self.augment)

    def fingerprint(self) -> str:
        return fingerprint.of_files(self._files(self._halves()))

    @property
    def _folder(self) -> Path:
        return assemble.given_path(self.path, "my_images")

    def _files(self, halves: dict[str, dict[str, list[Path]]]) -> dict[str, Path]:
        files = [file for classes in halves.values() for listed in classes.values() for file in listed]
        return {file.relative_to(self._folder).as_posix(): file for file in files}

    def _halves(self) -> dict[str, dict[str, list[Path]]]:
        """The files of every class: of train and perhaps test, or of the folder itself, which is then all train."""
        folder = self._folder
        require(folder.is_dir(), f"data.path must be a folder with one folder per class, not a folder: {folder}")
        divided = (folder / "train").is_dir()
        places = {half: folder / half for half in ("train", "test")} if divided else {"train": folder}
        halves = {half: _classes(place) for half, place in places.items() if place.is_dir()}
        classes, place = len(halves["train"]), places["train"]
        require(classes > 1, f"expected at least two folders, one per class, in {place}, got {classes}")
        for name in halves.get("test", {}):
            require(name in halves["train"], f"class {name} is in {folder / 'test'} but not in {folder / 'train'}")
        return halves

    def _read(self, halves: dict[str, dict[str, list[Path]]]) -> dict[str, Array]:
        classes = list(halves["train"])
        files = [file for half in halves.values() for listed in half.values() for file in listed]
        pixels = decode({str(file): file for file in files}, self.size)
        arrays, start = {}, 0
        for half, listed in halves.items():
            counts = [len(listed.get(name, ())) for name in classes]
            arrays[f"{half}_x"] = pixels[start : start + sum(counts)]
            arrays[f"{half}_y"] = np.repeat(np.arange(len(classes)), counts)
            start += sum(counts)
        return assemble.complete(arrays, self.test_share)


def _classes(folder: Path) -> dict[str, list[Path]]:
    """The images of every class in the order of the alphabet."""
    found = {}
    try:
        for place in sorted(folder.iterdir()):
            if place.is_dir() and not place.name.startswith("."):
                found[place.name] = sorted(file for file in place.iterdir() if file.suffix.lower() in ENDINGS)
                kinds = ", ".join(sorted(ENDINGS))
                require(len(found[place.name]) > 0, f"class {place} holds no images ({kinds}); fill or remove it")
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}; make it readable") from None
    return found
