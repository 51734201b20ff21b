"""Data of the LEAF benchmark, as its scripts write them: natural clients."""

from dataclasses import dataclass
from pathlib import Path

from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import assemble, fingerprint, leaf, text
from fl_lightning.data.readers.mapped import mapped
from fl_lightning.errors import require

VERSION = 1


@dataclass(frozen=True)
class Leaf(Source):
    """LEAF's json files: FEMNIST, Shakespeare, Sent140 and synthetic data; their users are natural clients.

    Attributes:
        root: Folder that LEAF's preprocess.sh has filled, with train and test, or with all_data. Images of 28x28 pixels
            have 62 classes; texts are 80 characters and the class is the next one; tweets become words.
        test_share: Share of every class that becomes the test set, where LEAF has split off none; the same for every
            seed.
        words: Of a tweet: longer ones are cut off, shorter ones padded with 0.
        vocabulary: How many different words of tweets there are, the most frequent ones of the training data; 0 stands
            for no word and 1 for any other.
    """

    root: str | None = None
    test_share: float = 0.2
    words: int = 25
    vocabulary: int = 10_000

    def __post_init__(self) -> None:
        assemble.check_share(self.test_share)
        text.check_words(self.vocabulary, self.words)

    def load(self) -> Dataset:
        halves = leaf.files_of(self._root)
        settings = {"reader": "leaf", "version": VERSION, "test_share": self.test_share}
        settings |= {"words": self.words, "vocabulary": self.vocabulary}
        files = {name: path for listed in halves.values() for name, path in listed.items()}
        with assemble.blaming(self._root):
            arrays = mapped(files, lambda: leaf.read(halves, self.test_share, self.vocabulary, self.words), settings)
            return assemble.stored(arrays)

    def fingerprint(self) -> str:
        halves = leaf.files_of(self._root)
        return fingerprint.of_files({name: path for listed in halves.values() for name, path in listed.items()})

    @property
    def _root(self) -> Path:
        require(self.root is not None, "data.root is missing: name the folder that LEAF's preprocess.sh has filled")
        return Path(str(self.root)).expanduser()
