"""Images in files, or in columns of a table, as one array of bytes."""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fl_lightning.data.readers.memory_map import Array
from fl_lightning.errors import UserError, require
from fl_lightning.system.memory import require_room_for_data

GREY, COLOUR = frozenset({"1", "L"}), frozenset({"P", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "PA", "RGBX"})


def decode(pictures: Mapping[str, Path | bytes], size: int | None) -> Array:
    """All images as bytes (n, channels, height, width): one channel if all are grey, else three.

    Args:
        pictures: Where each image is, or what its file holds, by what to call it in a complaint.
        size: Height and width to which every image is scaled; None leaves them as they are.
    """
    from PIL import Image, UnidentifiedImageError

    files = list(pictures)

    def opened(file: str) -> Image.Image:
        content = pictures[file]
        require(
            isinstance(content, bytes) or content.is_file() or not content.exists(),
            f"{file} must be a file, got a folder, pipe or device; replace or remove it",
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # an image that may be a decompression bomb
                return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)
        except UnidentifiedImageError:
            raise UserError(f"{file} is not an image; replace or remove it") from None
        except (OSError, ValueError, Image.DecompressionBombError, Warning) as error:
            raise UserError(f"cannot read {file}: {' '.join(str(error).split())}; replace or remove it") from None

    grey, shape = True, (0, 0)
    for number, file in enumerate(files):  # the headers alone
        with opened(file) as image:
            require(image.mode in GREY | COLOUR, f"{file} is of mode {image.mode}, not 8 bits per channel; convert it")
            grey = grey and image.mode in GREY
            if number == 0:
                shape = (image.height, image.width)
            require(
                size is not None or (image.height, image.width) == shape,
                f"{files[0]} has {shape[1]}x{shape[0]} pixels and {file} {image.width}x{image.height}; all images "
                "must have one size: scale them by --data.size, for example --data.size 32",
            )
    height, width = (size, size) if size is not None else shape
    require_room_for_data(
        f"{len(files)} images of {width}x{height} pixels", len(files) * (1 if grey else 3) * height * width
    )
    pixels = np.empty((len(files), 1 if grey else 3, height, width), np.uint8)
    for place, file in zip(pixels, files, strict=True):
        with opened(file) as image:
            try:
                converted = image.convert("L" if grey else "RGB")
            except (OSError, SyntaxError, ValueError) as error:
                raise UserError(f"{file} is damaged ({' '.join(str(error).split())}); replace or remove it") from None
        if size is not None:
            converted = converted.resize((width, height), Image.Resampling.BILINEAR)
        place[:] = np.asarray(converted).reshape(height, width, -1).transpose(2, 0, 1)
    return pixels
