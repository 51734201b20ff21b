"""AutoAugment's policy for CIFAR-10 on batches of bytes (Cubuk et al. 2019, arXiv:1805.09501).

An image gets one of 25 sub-policies, each of two operations with a probability and a magnitude. Table, magnitudes and
operations are those of `torchvision.transforms.v2.AutoAugment` with nearest-neighbour interpolation, and the images are
the same to the bit; only the work is arranged for batches:

- An operation that moves pixels (shear, translation, rotation) is a list of positions from which they are taken, made
  once by torchvision's operation on an image of positions. All such samples of a batch are one gather.
- An operation that maps every byte by itself (brightness, posterisation, ...) is a list of 256 bytes, made once by
  torchvision's operation on all bytes. All such samples are one lookup.
- The others go through torchvision's operation, samples with the same magnitude together.
"""

import math
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Colour of the pixels that a shift, shear or rotation uncovers.
FILL = 128
NUM_LEVELS = 10

# (operation, probability, level) twice; operations without a level have one strength only.
POLICY = (
    (("Invert", 0.1, None), ("Contrast", 0.2, 6)),
    (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
    (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
    (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.5, None), ("Equalize", 0.9, None)),
    (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
    (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
    (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
    (("Equalize", 0.6, None), ("Equalize", 0.5, None)),
    (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
    (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
    (("Equalize", 0.3, None), ("AutoContrast", 0.4, None)),
    (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
    (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
    (("Solarize", 0.5, 2), ("Invert", 0.0, None)),
    (("Equalize", 0.2, None), ("AutoContrast", 0.6, None)),
    (("Equalize", 0.2, None), ("Equalize", 0.6, None)),
    (("Color", 0.9, 9), ("Equalize", 0.6, None)),
    (("AutoContrast", 0.8, None), ("Solarize", 0.2, 8)),
    (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
    (("Solarize", 0.4, 5), ("AutoContrast", 0.9, None)),
    (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.9, None), ("Solarize", 0.8, 3)),
    (("Equalize", 0.8, None), ("Invert", 0.1, None)),
    (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, None)),
)

MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
TONES = ("Brightness", "Invert", "Posterize", "Solarize")
SIGNED = (*MOVES, "Brightness", "Color", "Contrast", "Sharpness")


class Operation(NamedTuple):
    """What is done to an image.

    Attributes:
        name: Of the operation, in AutoAugment's words.
        level: Its strength, 0 to 9; None if it has one only.
        sign: Direction, 1 or -1; always 1 if it has one only.
    """

    name: str
    level: int | None
    sign: int

    def magnitude(self, height: int, width: int) -> float:
        """The strength in the operation's own unit, by torchvision's scales in their single precision."""
        if self.level is None:
            return 0.0
        if self.name == "Posterize":
            return round(8 - self.level / ((NUM_LEVELS - 1) / 4))
        most = {"TranslateX": 150 / 331 * width, "TranslateY": 150 / 331 * height, "Rotate": 30.0}
        most |= {"ShearX": 0.3, "ShearY": 0.3}
        first, last = (1.0, 0.0) if self.name == "Solarize" else (0.0, most.get(self.name, 0.9))
        return self.sign * float(torch.linspace(first, last, NUM_LEVELS)[self.level])


def _all_operations() -> tuple[Operation, ...]:
    """Every operation that the policy can ask for: those that move pixels, those that map bytes, the others."""
    found = {
        Operation(name, level, sign)
        for sub_policy in POLICY
        for name, _, level in sub_policy
        for sign in ((1, -1) if name in SIGNED else (1,))
    }
    kind = {**dict.fromkeys(MOVES, 0), **dict.fromkeys(TONES, 1)}
    return tuple(sorted(found, key=lambda it: (kind.get(it.name, 2), it.name, it.level or 0, it.sign)))


# Choices name an operation by its number: 0 is none, k is OPERATIONS[k - 1].
OPERATIONS = _all_operations()
NUM_MOVES = sum(operation.name in MOVES for operation in OPERATIONS)
NUM_TONES = sum(operation.name in TONES for operation in OPERATIONS)


def draw(number: int, stream: torch.Generator) -> Tensor:
    """The numbers of the first and second operation of so many images, (number, 2)."""
    probabilities, codes = _tables()
    sub_policy = torch.randint(len(POLICY), (number,), generator=stream)
    is_applied = torch.rand(number, 2, generator=stream) < probabilities[sub_policy]
    is_negative = torch.randint(2, (number, 2), generator=stream)
    chosen = codes[sub_policy].gather(2, is_negative[:, :, None])[:, :, 0]
    return chosen * is_applied


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """Probabilities (25, 2) of the operations and their numbers (25, 2, sign)."""
    codes = [
        [[_code(name, level, 1), _code(name, level, -1 if name in SIGNED else 1)] for name, _, level in sub_policy]
        for sub_policy in POLICY
    ]
    return torch.tensor([[p for _, p, _ in sub_policy] for sub_policy in POLICY]), torch.tensor(codes)


def _code(name: str, level: int | None, sign: int) -> int:
    return OPERATIONS.index(Operation(name, level, sign)) + 1


def apply_(images: Tensor, codes: Tensor) -> None:
    """One operation per image, in place: bytes (B, 3, H, W) on any device, numbers (B,) on the CPU."""
    order = codes.argsort()
    # Moves and tones are one section each, every other operation is one of its own.
    starts = torch.tensor([1, NUM_MOVES + 1, *range(NUM_MOVES + NUM_TONES + 1, len(OPERATIONS) + 2)])
    bounds = torch.searchsorted(codes[order], starts).tolist()
    for section, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        members = order[start:end]
        places = members.to(images.device)
        part = images.index_select(0, places)
        if section == 0:
            part = _move(part, codes[members] - 1)
        elif section == 1:
            part = _tone(part, codes[members] - 1 - NUM_MOVES)
        else:
            part = by_torchvision(part, OPERATIONS[NUM_MOVES + NUM_TONES + section - 2])
        images.index_copy_(0, places, part)


def _move(images: Tensor, rows: Tensor) -> Tensor:
    """Take every pixel from where the operation's row of the table says; one position more holds the fill."""
    _, channels, height, width = images.shape
    sources = _sources(height, width, images.device)[rows.to(images.device)]
    filled = torch.nn.functional.pad(images.flatten(2), (0, 1), value=FILL)
    return filled.gather(2, sources[:, None].expand(-1, channels, -1)).view_as(images)


def _tone(images: Tensor, rows: Tensor) -> Tensor:
    """Map every byte by the operation's row of the table."""
    curves = _curves(images.device)[rows.to(images.device)]
    return curves.gather(1, images.flatten(1).long()).view_as(images)


@cache
def _sources(height: int, width: int, device: torch.device) -> Tensor:
    """For each move the position that each pixel comes from; height * width where the fill shows."""
    positions = torch.arange(float(height * width)).view(1, 1, height, width)
    moved = [by_torchvision(positions, move, (height * width,)) for move in OPERATIONS[:NUM_MOVES]]
    return torch.cat(moved).flatten(1).long().to(device)


@cache
def _curves(device: torch.device) -> Tensor:
    """For each tone the byte that each byte becomes."""
    every_byte = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    tones = OPERATIONS[NUM_MOVES : NUM_MOVES + NUM_TONES]
    return torch.cat([by_torchvision(every_byte, tone) for tone in tones]).flatten(1).to(device)


def by_torchvision(images: Tensor, operation: Operation, fill: tuple[float, ...] = (FILL,) * 3) -> Tensor:
    """The same operation on every image, as torchvision's AutoAugment does it."""
    from torchvision.transforms.v2 import functional

    magnitude = operation.magnitude(*images.shape[-2:])
    changed: Tensor
    match operation.name:
        case "ShearX" | "ShearY":
            angle = math.degrees(math.atan(magnitude))
            shear = [angle, 0.0] if operation.name == "ShearX" else [0.0, angle]
            changed = functional.affine(images, 0.0, [0, 0], 1.0, shear, fill=list(fill), center=[0, 0])
        case "TranslateX" | "TranslateY":
            shift = [int(magnitude), 0] if operation.name == "TranslateX" else [0, int(magnitude)]
            changed = functional.affine(images, 0.0, shift, 1.0, [0.0, 0.0], fill=list(fill))
        case "Rotate":
            changed = functional.rotate(images, magnitude, fill=list(fill))
        case "Brightness":
            changed = functional.adjust_brightness(images, 1 + magnitude)
        case "Color":
            changed = functional.adjust_saturation(images, 1 + magnitude)
        case "Contrast":
            changed = functional.adjust_contrast(images, 1 + magnitude)
        case "Sharpness":
            changed = functional.adjust_sharpness(images, 1 + magnitude)
        case "Posterize":
            changed = functional.posterize(images, int(magnitude))
        case "Solarize":
            changed = functional.solarize(images, 255 * magnitude)
        case "AutoContrast":
            changed = functional.autocontrast(images)
        case "Equalize":
            changed = functional.equalize(images)
        case _:
            changed = functional.invert(images)
    return changed
