"""MNIST: 70,000 handwritten digits of 28x28 pixels (LeCun et al. 1998)."""

from dataclasses import dataclass

from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import torchvision_files


@dataclass(frozen=True)
class Mnist(Source):
    """MNIST, handwritten digits of 28x28 pixels: 60,000 training and 10,000 test images.

    Attributes:
        root: Folder with the files, in torchvision's layout (MNIST/raw/train-images-idx3-ubyte, ...); missing files
            are downloaded to it. Default: $FL_LIGHTNING_DATA, else ~/.cache/fl_lightning/data.
    """

    root: str | None = None

    def load(self) -> Dataset:
        return torchvision_files.mnist("MNIST", self.root, mean=0.1307, std=0.3081)

    def fingerprint(self) -> str | None:
        return torchvision_files.mnist_content("MNIST", self.root)
