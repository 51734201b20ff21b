"""CIFAR-100: 60,000 colour images of 32x32 pixels in 100 classes (Krizhevsky 2009)."""

from dataclasses import dataclass

from fl_lightning.data.augment import Name
from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import torchvision_files


@dataclass(frozen=True)
class Cifar100(Source):
    """CIFAR-100, colour images of 32x32 pixels in 100 classes: 50,000 training and 10,000 test images.

    Attributes:
        root: Folder with the files, in torchvision's layout (cifar-100-python/train, test) or packed
            (cifar-100-python.tar.gz), else the archive is downloaded to it, 170 MB. Default: $FL_LIGHTNING_DATA, else
            ~/.cache/fl_lightning/data.
        augment: Augmentation of training images. none; standard: random crop and flip; paper: crop, flip, AutoAugment
            and Cutout.
    """

    root: str | None = None
    augment: Name = "paper"

    def load(self) -> Dataset:
        return torchvision_files.cifar("CIFAR100", self.root, self.augment)
