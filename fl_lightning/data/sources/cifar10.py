"""CIFAR-10: 60,000 colour images of 32x32 pixels in 10 classes (Krizhevsky 2009)."""

from dataclasses import dataclass

from fl_lightning.data.augment import Name
from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import torchvision_files


@dataclass(frozen=True)
class Cifar10(Source):
    """CIFAR-10, colour images of 32x32 pixels in 10 classes: 50,000 training and 10,000 test images.

    Attributes:
        root: Folder with the files, in torchvision's layout (cifar-10-batches-py/data_batch_1, ...) or packed
            (cifar-10-python.tar.gz), else the archive is downloaded to it, 170 MB. Default: $FL_LIGHTNING_DATA, else
            ~/.cache/fl_lightning/data.
        augment: Augmentation of training images. none; standard: random crop and flip; paper: crop, flip, AutoAugment
            and Cutout.
    """

    root: str | None = None
    augment: Name = "paper"

    def load(self) -> Dataset:
        return torchvision_files.cifar("CIFAR10", self.root, self.augment)
