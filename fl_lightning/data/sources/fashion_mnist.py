"""Fashion-MNIST: 70,000 pieces of clothing of 28x28 pixels (Xiao et al. 2017)."""

from dataclasses import dataclass

from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import torchvision_files


@dataclass(frozen=True)
class FashionMnist(Source):
    """Fashion-MNIST, pieces of clothing of 28x28 pixels: 60,000 training and 10,000 test images.

    Attributes:
        root: Folder with the files, in torchvision's layout (FashionMNIST/raw/train-images-idx3-ubyte, ...); missing
            files are downloaded to it. Default: $FL_LIGHTNING_DATA, else ~/.cache/fl_lightning/data.
    """

    root: str | None = None

    def load(self) -> Dataset:
        return torchvision_files.mnist("FashionMNIST", self.root, mean=0.2860, std=0.3530)

    def fingerprint(self) -> str | None:
        return torchvision_files.mnist_content("FashionMNIST", self.root)
