"""Feature skew: the inputs of each client are changed in a way of its own, whatever the partition of the labels.

Each sample belongs to one client, so that the training set is changed once, before training: a client's data are the
same in every epoch, for every method and engine. Test set, holdout and validation data stay as they are.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from fl_lightning import streams
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.partition import Split
from fl_lightning.errors import require
from fl_lightning.models.inputs import several

# Samples that are changed at a time: beside the new training set itself, little memory is needed.
BLOCK = 500


def skew(dataset: Dataset, clients: Sequence[Tensor], split: Split, seed: int) -> Dataset:
    """The dataset with the inputs of each client changed; bytes stay bytes, rounded and cut off at 0 and 255.

    Args:
        dataset: Left as it is.
        clients: The samples of each client.
        split: Names the kind of skew and its strength.
        seed: The run's seed, for noise.
    """
    if split.feature_skew == "none":
        return dataset
    check(dataset, split)
    inputs = dataset.train_x.clone()
    # Black corners: 0 for bytes, the smallest input for images that are standardised already.
    black = float(inputs.min()) if inputs.is_floating_point() else 0.0
    for client, (indices, level) in enumerate(zip(clients, levels(split), strict=True)):
        stream = streams.generator(seed, "feature_skew", client)
        for block in torch.split(indices.to(inputs.device), BLOCK):
            raw = dataset.train_x[block]
            match split.feature_skew:
                case "noise":
                    inputs[block] = _add_noise(raw, level, stream)
                case "rotation":
                    inputs[block] = _rotate(raw, level, black)
                case _:
                    assert_never(split.feature_skew)
    return replace(dataset, train_x=inputs)


def check(dataset: Dataset, split: Split) -> None:
    """Raise `UserError` if these data cannot be skewed like that."""
    skewed = split.feature_skew != "none"
    require(
        not skewed or (not several(dataset.train_x) and dataset.train_x.dtype != torch.long),
        f"data.feature_skew {split.feature_skew} needs one numeric input; remove data.feature_skew",
    )
    require(
        split.feature_skew != "rotation" or len(dataset.shape) == 3,
        f"data.feature_skew rotation needs images of shape (channels, height, width), got inputs of shape "
        f"{dataset.shape}; use data.feature_skew noise",
    )


def levels(split: Split) -> list[float]:
    """What each client gets: the standard deviation of its noise, or its angle in degrees.

    Noise of client n = 1 .. N has standard deviation strength * n / N (Li et al. 2022, Federated learning on non-IID
    data silos). Angles are evenly spread from -strength to strength, counterclockwise; a single client is not turned.

    >>> levels(Split(clients=2, feature_skew="noise", skew_strength=0.1))
    [0.05, 0.1]
    >>> levels(Split(clients=3, feature_skew="rotation", skew_strength=45))
    [-45.0, 0.0, 45.0]
    """
    number, strength = split.clients, split.skew_strength
    match split.feature_skew:
        case "none":
            return [0.0] * number
        case "noise":
            return [strength * (n + 1) / number for n in range(number)]
        case "rotation":
            return [strength * (2 * n / (number - 1) - 1) if number > 1 else 0.0 for n in range(number)]
        case _:
            assert_never(split.feature_skew)


def _add_noise(raw: Tensor, level: float, stream: torch.Generator) -> Tensor:
    # Drawn in float32 on the CPU: the same for every device and type of the inputs.
    noise = torch.randn(raw.shape, generator=stream).to(raw.device)
    if raw.is_floating_point():
        return raw + level * noise.to(raw.dtype)
    return (raw + 255 * level * noise).round_().clamp_(0, 255).to(raw.dtype)


def _rotate(raw: Tensor, angle: float, black: float) -> Tensor:
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as images

    turned: Tensor = images.rotate(raw, angle, InterpolationMode.BILINEAR, fill=[black])
    return turned
