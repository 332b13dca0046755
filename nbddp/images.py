"""Encodes pixels as PNG or JPEG within a number of bytes. Pillow is used if it is installed, and never needed."""

from __future__ import annotations

import functools
import importlib.util
import io
import math
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SIDE = 1200  # pixels; larger images are scaled down
MAX_OF_BATCH = 64  # images in a grid
_LINE, _GREY = 2, 128  # between the images of a grid: pixels, and their value
_LEAST_SIDE = 24
_SHRINK = 0.9  # at least, between two tries
_FEW_COLORS = 4096  # of a drawing; a photograph has more
_JPEG_QUALITY = 85
_CHANNELS = (1, 3, 4)
_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # of PNG, by number of channels
_PNG_SIZE = struct.Struct(">II")

Encoded = tuple[str, bytes]  # the type, "image/png" or "image/jpeg", and the file


def pixels_of(array: Any) -> npt.NDArray[np.uint8]:
    """The image as bytes 0 to 255 of shape (H, W), (H, W, 3) or (H, W, 4).

    Args:
        array: of shape (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 channels, or a batch (N, H, W, C) or
            (N, C, H, W), which becomes a grid of its first images; bool, integers 0 to 255, or floats 0 to 1. Values
            outside of the range are clipped, NaN is 0.

    Raises:
        TypeError, ValueError: it is of another type or shape.
    """
    found = _with_channels_last(np.asarray(array))
    if found.dtype.kind == "f":
        found = np.nan_to_num(found, nan=0.0, posinf=1.0, neginf=0.0).clip(0.0, 1.0) * 255 + 0.5
    elif found.dtype.kind == "b":
        found = found * 255
    elif found.dtype.kind in "iu":
        found = found.clip(0, 255)
    else:
        raise TypeError(f"the pixels of an image are floats 0 to 1 or integers 0 to 255, not {found.dtype}")
    pixels = found.astype(np.uint8)
    return np.ascontiguousarray(_grid(pixels) if pixels.ndim == 4 else pixels)


def _with_channels_last(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Of shape (H, W), (H, W, C), or a batch (N, H, W, C); raises ValueError for anything else."""
    found = array
    if found.ndim in (3, 4) and found.shape[-1] not in _CHANNELS and found.shape[-3] in _CHANNELS:
        found = np.moveaxis(found, -3, -1)
    if 0 in found.shape or not (found.ndim == 2 or (found.ndim in (3, 4) and found.shape[-1] in _CHANNELS)):
        raise ValueError(
            f"an image has the shape (H, W), (H, W, 3) or (3, H, W), and a batch one dimension more, not {array.shape}"
        )
    if found.ndim == 4:
        return found[:MAX_OF_BATCH]
    return found[..., 0] if found.ndim == 3 and found.shape[-1] == 1 else found


def _grid(batch: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The images beside and below each other, with grey lines between them."""
    count, height, width, channels = batch.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    down, across = height + _LINE, width + _LINE
    grid = np.full((rows * down - _LINE, columns * across - _LINE, channels), _GREY, np.uint8)
    for i, image in enumerate(batch):
        y, x = i // columns * down, i % columns * across
        grid[y : y + height, x : x + width] = image
    return grid[..., 0] if channels == 1 else grid


def encoded(pixels: npt.NDArray[np.uint8], limit: int) -> Encoded | None:
    """What :func:`pixels_of` returned as a file of at most ``limit`` bytes, scaled down if necessary.

    Returns:
        None if the image would be too small to see.
    """
    pillow = _pillow()
    if pillow is not None:
        return within(pillow.fromarray(pixels), limit)
    every = -(-max(pixels.shape[:2]) // MAX_SIDE)
    pixels = pixels[::every, ::every]
    while len(data := _png(pixels)) > limit:
        if min(pixels.shape[:2]) < 2 * _LEAST_SIDE:
            return None
        pixels = pixels[::2, ::2]
    return "image/png", data


def within(image: Image, limit: int) -> Encoded | None:
    """Pillow's image as a file of at most ``limit`` bytes, scaled down if necessary; None if it would be too small."""
    if image.mode not in ("L", "RGB", "RGBA"):
        image = image.convert("RGBA" if "A" in image.mode or "transparency" in image.info else "RGB")
    if max(image.size) > MAX_SIDE:
        image = image.copy()
        image.thumbnail((MAX_SIDE, MAX_SIDE))
    data = _saved(image, "PNG")
    if len(data) <= limit:
        return "image/png", data
    is_drawing = image.getcolors(_FEW_COLORS) is not None
    while max(image.size) >= _LEAST_SIDE:
        kind, data = _compact(image, is_drawing)
        if len(data) <= limit:
            return kind, data
        shrink = min(_SHRINK, math.sqrt(limit / len(data)))
        width, height = image.size
        image = image.resize((max(1, int(width * shrink)), max(1, int(height * shrink))))
    return None


@functools.lru_cache(maxsize=64)
def refitted(kind: str, data: bytes, limit: int) -> Encoded | None:
    """A file of an image as one of at most ``limit`` bytes; None if that cannot be made, or needs Pillow."""
    if len(data) <= limit:
        return kind, data
    pillow = _pillow()
    if pillow is None or kind not in ("image/png", "image/jpeg"):
        return None
    try:
        with pillow.open(io.BytesIO(data)) as image:
            return within(image, limit)
    except OSError:  # the object that made the file has made no image
        return None


def size_of_png(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels; None if the file is not a PNG."""
    if not data.startswith(b"\x89PNG") or len(data) < 24:
        return None
    width, height = _PNG_SIZE.unpack_from(data, 16)
    return width, height


def _compact(image: Image, is_drawing: bool) -> Encoded:
    """A drawing with fewer colours, a photograph as JPEG."""
    if is_drawing:
        return "image/png", _saved(image.quantize(256), "PNG")
    if image.mode == "RGBA":
        white = image.copy()
        white.paste((255, 255, 255, 255), (0, 0, *image.size))
        white.alpha_composite(image)
        image = white.convert("RGB")
    return "image/jpeg", _saved(image, "JPEG", quality=_JPEG_QUALITY)


def _saved(image: Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _pillow() -> Any:
    """Pillow's module ``Image``; None if it is not installed."""
    if importlib.util.find_spec("PIL") is None:
        return None
    from PIL import Image

    return Image


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    height, width = pixels.shape[:2]
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    # A byte before each row says that the row is not filtered.
    rows = np.hstack([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * channels)])
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    chunks = (b"IHDR" + head, b"IDAT" + zlib.compress(rows.tobytes()), b"IEND")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )
