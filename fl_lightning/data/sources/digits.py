"""The 8x8 handwritten digits that scikit-learn ships: 1,797 images, no download."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.partition import subset_indices

# Of all pixels, scaled to [0, 1]. Constants, so that the inputs are the same to the bit on every machine.
MEAN, STD = 0.3053, 0.3760
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Digits(Source):
    """Handwritten digits of 8x8 pixels: 1,438 training and 359 test images, part of scikit-learn."""

    def load(self) -> Dataset:
        """The same split for every run: the test set is a fixed stratified fifth of the images."""
        bunch = _packed()
        images = torch.from_numpy(bunch.images)[:, None]
        # Standardised in float64 and rounded once.
        inputs = ((images / 16 - MEAN) / STD).float()
        labels = torch.from_numpy(bunch.target).long()
        is_test = torch.zeros(len(labels), dtype=torch.bool)
        is_test[subset_indices(labels, TEST_SHARE)] = True
        return Dataset(inputs[~is_test], labels[~is_test], inputs[is_test], labels[is_test], num_classes=10)


@cache
def _packed() -> Any:
    """As scikit-learn reads them, from a text, which takes longer than a round on them; read-only."""
    from sklearn.datasets import load_digits

    return load_digits()
