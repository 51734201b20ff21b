"""Random changes of training images: batched on bytes, on the device they lie on.

none
    Nothing.
standard
    A crop of the image's size after 4 black pixels were added on every side, and a horizontal flip with probability
    1/2.
paper
    What the paper's CIFAR-10 experiments use: the crop with grey (128) pixels, the flip, AutoAugment's CIFAR-10 policy
    (`fl_lightning.data.autoaugment`), and Cutout (DeVries and Taylor 2017, arXiv:1708.04552): one black square of 16
    pixels a side, its centre anywhere in the image, cut off at the borders. Black, because the paper lists Cutout
    before the normalisation; after Normalize(0.5, 0.5) the hole is -1.

The random choices of every sample are drawn for a whole epoch at once, from a stream of their own, so that they do not
depend on the batch size, the engine or the order of clients. Both names draw the same, so that at one seed the crops
and flips of `standard` are those of `paper`.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.data import autoaugment
from fl_lightning.errors import require, unknown

Name: TypeAlias = Literal["none", "standard", "paper"]

# Raised when augmented images change: part of every run's identity.
VERSION = 1

PADDING = 4
PAD_WITH = {"standard": 0, "paper": 128}
HOLE = 16


class Choices(NamedTuple):
    """What happens to which image: one row per image, on the CPU.

    Attributes:
        corner: Row and column of the crop's upper left corner in the padded image, 0 to 8.
        flip: Whether it is mirrored.
        operations: Numbers of AutoAugment's first and second operation, 0 for none.
        hole: Row and column of Cutout's centre.
    """

    corner: Tensor
    flip: Tensor
    operations: Tensor
    hole: Tensor

    def split(self, sizes: list[int]) -> Iterator["Choices"]:
        """The rows in blocks of these sizes."""
        return (Choices(*rows) for rows in zip(*(torch.split(leaf, sizes) for leaf in self), strict=True))


def check(name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse an augmentation that is not known, or that inputs of this shape and type cannot have."""
    if name not in get_args(Name):
        raise unknown("augmentation", name, get_args(Name))
    if name == "none":
        return
    require(
        len(shape) == 3 and dtype == torch.uint8,
        f"the augmentation {name} needs images as bytes (torch.uint8) of shape (channels, height, width), "
        f"got {dtype} of shape {tuple(shape)}; use none",
    )
    require(
        name != "paper" or shape[0] == 3,
        f"the augmentation paper needs colour images of 3 channels, got {shape[0]}; use standard or none",
    )


def draw(number: int, shape: Sequence[int], stream: torch.Generator) -> Choices:
    """The choices for so many images of this shape."""
    return Choices(
        corner=torch.randint(2 * PADDING + 1, (number, 2), generator=stream),
        flip=torch.randint(2, (number,), generator=stream).bool(),
        operations=autoaugment.draw(number, stream),
        hole=torch.stack([torch.randint(extent, (number,), generator=stream) for extent in shape[-2:]], 1),
    )


def apply(name: str, images: Tensor, choices: Choices) -> Tensor:
    """The augmented images: bytes (B, C, H, W), a new tensor."""
    images = crop_and_flip(images, choices, PAD_WITH[name])
    if name == "paper":
        for codes in choices.operations.unbind(1):
            autoaugment.apply_(images, codes)
        cut_out_(images, choices)
    return images


def crop_and_flip(images: Tensor, choices: Choices, fill: int) -> Tensor:
    """Pad, crop to the old size and mirror: one gather, since each pixel comes from one place."""
    number, channels, height, width = images.shape
    corner, flip = choices.corner.to(images.device), choices.flip.to(images.device)
    down, right = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    rows = corner[:, :1] + down
    columns = corner[:, 1:] + torch.where(flip[:, None], right.flip(0), right)
    sources = rows[:, :, None] * (width + 2 * PADDING) + columns[:, None, :]
    padded = pad(images, (PADDING,) * 4, value=fill).flatten(2)
    return padded.gather(2, sources.view(number, 1, -1).expand(-1, channels, -1)).view_as(images)


def cut_out_(images: Tensor, choices: Choices) -> None:
    """Blacken a square around each hole's centre, in place."""
    outside = []
    for extent, centre in zip(images.shape[-2:], choices.hole.to(images.device).unbind(1), strict=True):
        distance = torch.arange(extent, device=images.device) - centre[:, None]
        outside.append(((distance < -HOLE // 2) | (distance >= HOLE // 2)).to(torch.uint8))
    rows, columns = outside
    # A product of bytes is vectorised; filling by a mask of booleans takes ten times as long.
    images.mul_((rows[:, :, None] | columns[:, None, :])[:, None])
