"""Datasets of Hugging Face that lie on disk."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fl_lightning.data.augment import Name
from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import arrow, assemble, fingerprint, text
from fl_lightning.data.readers.mapped import Array, mapped
from fl_lightning.errors import require

VERSION = 1


@dataclass(frozen=True)
class Hf(Source):
    """A dataset that Hugging Face's `datasets` has saved by save_to_disk: images, text or lists of numbers.

    Attributes:
        path: The folder, of a Dataset or of a DatasetDict; `datasets` itself is not needed to read it.
        input: Column of the input: images, text or lists of numbers; null takes the only one there is, images first.
        label: Column of the label; null takes the ClassLabel, or the column called label.
        client_column: Column that names whom a sample belongs to, for --data.partition natural; null if there is none.
        train_split: The split that is trained on.
        test_split: The split that is the test set; without one called test, a share of the training samples is.
        test_share: Share of every class that becomes the test set, where there is no split for it; the same for every
            seed.
        size: Height and width to which every image is scaled; null leaves them as they are.
        words: Of a text: longer ones are cut off, shorter ones padded with 0.
        vocabulary: How many different words there are, the most frequent ones of the training data; 0 stands for no
            word and 1 for any other.
        augment: Augmentation of training images. none; standard: random crop and flip; paper: crop, flip, AutoAugment
            and Cutout.
    """

    path: str = ""
    input: str | None = None
    label: str | None = None
    client_column: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    test_share: float = 0.2
    size: int | None = None
    words: int = 100
    vocabulary: int = 10_000
    augment: Name = "none"

    def __post_init__(self) -> None:
        assemble.given_path(self.path, "my_dataset")
        assemble.check_share(self.test_share)
        text.check_words(self.vocabulary, self.words)
        require(self.size is None or self.size >= 1, f"data.size must be at least 1 or null, got {self.size}")

    def load(self) -> Dataset:
        splits = self._splits()
        read = ("input", "label", "client_column", "test_share", "size", "words", "vocabulary")
        settings = {"reader": "hf", "version": VERSION} | {name: getattr(self, name) for name in read}
        with assemble.blaming(self._folder):
            arrays = mapped(_files(splits), lambda: self._read(splits), settings)
            return assemble.stored(arrays, mean=assemble.CENTRE, std=assemble.SCALE, augment=self.augment)

    def fingerprint(self) -> str:
        return fingerprint.of_files(_files(self._splits()))

    @property
    def _folder(self) -> Path:
        return assemble.given_path(self.path, "my_dataset")

    def _splits(self) -> dict[str, arrow.Split]:
        return arrow.splits_of(self._folder, self.train_split, self.test_split)

    def _read(self, splits: dict[str, arrow.Split]) -> dict[str, Array]:
        wanted = (self.input, self.label, self.client_column)
        arrays = arrow.read(splits, wanted, self.words, self.vocabulary, self.size)
        if "test_x" not in arrays:
            numbers = {name: arrays[name] for name in ("classes", "tokens")}
            arrays = assemble.split_off_test(arrays, self.test_share) | numbers
        if "owners" in arrays:
            arrays["owners"] = np.unique(arrays["owners"], return_inverse=True)[1].astype(np.int64)
        return arrays


def _files(splits: dict[str, arrow.Split]) -> dict[str, Path]:
    """All that is read, by names that do not depend on where it lies."""
    files: dict[str, Path] = {}
    for half, split in splits.items():
        described = [split.folder / arrow.INFO] if (split.folder / arrow.INFO).exists() else []
        files |= {f"{half}/{path.name}": path for path in (*split.files, *described)}
    return files
