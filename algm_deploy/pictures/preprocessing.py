"""From a photo on disk to the canvas that windows are cut from: once, for every runtime.

Pictures stay RGB in 0..255 throughout; the normalisation lives inside the network. The resize rule is the published one
(mmcv `imrescale`, then Segmenter's enlargement up to the window), so the figures compare with the published mIoU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from algm_deploy.errors import ImageError
from algm_deploy.recipe.schema import Protocol

Pixels = NDArray[np.uint8] | NDArray[np.float32]

# What strangers may send; Pillow's decoders of some other formats start programs. JPEG comprises the MPO of phones.
_WEB_FORMATS = ("JPEG", "PNG", "WEBP")

MAX_ASPECT = 8
"""Longer pictures are refused: enlarging their short side to the window would take memory without a bound."""

# The rules behind a canvas, by name. Change a rule and its name: a bundle made under another name is refused.
_RULES = {
    "colour": "RGB 0..255, EXIF orientation applied",
    "resize": "OpenCV INTER_LINEAR on uint8, factor min(long limit/long, short limit/short), side int(side*factor+0.5)",
    "enlarge": "bilinear float32, half-pixel centres, short side = window, long side int(window*long/short)",
    "anchors": "0, stride, .. while < side-window, plus side-window",
    "scores": "mean over the windows that cover a pixel, bilinear to the photo's size, argmax",
}
_WHOLE = "OpenCV INTER_LINEAR on uint8 once more, sides rounded up to whole multiples"


def preprocessing_fingerprint(protocol: Protocol) -> str:
    """SHA-256 (hex) of every fact that decides which numbers a network sees; the data set's name is not one of them."""
    facts = {
        **_RULES,
        "short_side": protocol.resized_side,
        "window": protocol.window,
        "stride": protocol.stride,
        "max_ratio": float(protocol.max_ratio),
    }
    if protocol.multiple > 1:
        facts |= {"multiple": protocol.multiple, "whole": _WHOLE}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_photo(path: Path) -> NDArray[np.uint8]:
    """Reads a picture as RGB (H, W, 3) uint8, upright according to its EXIF orientation.

    Grey and palette pictures are expanded, CMYK and YCbCr converted by Pillow's formulas (no colour profile), 16-bit
    channels keep their high byte, and an alpha channel is dropped where it is opaque everywhere.

    Raises:
        ImageError: no readable picture, an animation, visible transparency, or a colour space without a rule here.
    """
    with _reading(path), Image.open(path) as opened:
        return _pixels(opened, path)


def photo_of(picture: Image.Image) -> NDArray[np.uint8]:
    """The pixels of an opened picture, as `read_photo` reads them."""
    name = str(getattr(picture, "filename", "") or "a PIL image")
    with _reading(name):
        return _pixels(picture, name)


def decoded_photo(content: bytes, name: str, most_pixels: int) -> NDArray[np.uint8]:
    """The pixels of an encoded picture in memory, as `read_photo` reads them; `name` is what errors call it.

    Raises:
        ImageError: as `read_photo`; neither JPEG, PNG nor WebP; or more pixels than `most_pixels`, which the
            header tells before anything is decoded.
    """
    expected = f"{name}: expected at most {most_pixels} pixels"
    with _reading(name, "a JPEG, PNG or WebP picture"), _opened(content, expected) as opened:
        if opened.width * opened.height > most_pixels:
            raise ImageError(f"{expected}, got {opened.width}x{opened.height}: shrink it first")
        return _pixels(opened, name)


def _opened(content: bytes, expected: str) -> Image.Image:
    """A picture whose header is read. Pillow refuses the largest by its own limit; `expected` tells the caller's."""
    try:
        return Image.open(BytesIO(content), formats=_WEB_FORMATS)
    except Image.DecompressionBombError as error:
        raise ImageError(f"{expected}, got far more: shrink it first") from error


def read_indices(path: Path) -> NDArray[np.integer[Any]]:
    """Reads a label picture as its stored indices (H, W), uint8 or wider, upright according to its own orientation.

    A palette is never applied.

    Raises:
        ImageError: no readable picture, or one with colour channels.
    """
    with _reading(path), Image.open(path) as opened:
        if opened.mode not in ("L", "P", "I", "I;16", "I;16B", "1"):
            raise ImageError(f"{path}: a label file holds one class index a pixel, got a {opened.mode} colour picture")
        indices = np.asarray(ImageOps.exif_transpose(opened))
    return indices.astype(np.uint8) if indices.dtype == bool else indices


def orientation_of(path: Path) -> int:
    """The EXIF orientation of a picture, 1 to 8, by which it is turned or mirrored when it is read; 1 leaves it alone.

    Raises:
        ImageError: no readable picture.
    """
    with _reading(path), Image.open(path) as opened:
        found = opened.getexif().get(ExifTags.Base.Orientation, 1)
    return int(found) if found in range(1, 9) else 1


def check_pixels(windows: NDArray[Any]) -> None:
    """ImageError where pixels are no RGB values in 0..255; NaN among them would become a class without a word.

    Half a step beyond counts for rounding, as interpolated pixels may need it.
    """
    if windows.dtype == np.uint8 or not windows.size:
        return
    low, high = windows.min(), windows.max()
    if not (low >= -0.5 and high <= 255.5):  # NaN is neither
        raise ImageError(
            f"expected RGB pixels in 0..255, got values from {low:g} to {high:g}: give them as in a picture file, the "
            "normalisation is part of the network"
        )


def canvas_of(photo: NDArray[np.uint8], protocol: Protocol) -> Pixels:
    """Resizes a photo (H, W, 3) to the canvas (h, w, 3) that windows are cut from.

    uint8, or float32 where the short side was still below the window after the published resize and was enlarged.

    Raises:
        ImageError: a picture more than `MAX_ASPECT` times as long as wide.
    """
    height, width = photo.shape[:2]
    short, long = sorted((height, width))
    if long > MAX_ASPECT * short:
        raise ImageError(f"a picture may be {MAX_ASPECT} times as long as wide, got {height}x{width}: crop it first")
    canvas = _resized(photo, published_size((height, width), protocol))
    whole = tuple(-(-side // protocol.multiple) * protocol.multiple for side in canvas.shape[:2])
    if whole != canvas.shape[:2]:
        canvas = _resized(canvas, whole)
    enlarged = enlarged_size(canvas.shape[:2], protocol.window)
    return canvas if enlarged == canvas.shape[:2] else _resized(canvas.astype(np.float32), enlarged)


def published_size(size: tuple[int, int], protocol: Protocol) -> tuple[int, int]:
    """(height, width) after the published resize, which keeps the aspect up to rounding."""
    long_limit = round(protocol.max_ratio * protocol.resized_side)
    factor = min(long_limit / max(size), protocol.resized_side / min(size))
    height, width = (int(side * factor + 0.5) for side in size)
    return height, width


def enlarged_size(size: tuple[int, int], window: int) -> tuple[int, int]:
    """(height, width) with the short side raised to `window` where it is below it; never shrinks."""
    height, width = size
    if min(size) >= window:
        return size
    return (window, int(width / height * window)) if height < width else (int(height / width * window), window)


def window_anchors(size: tuple[int, int], protocol: Protocol) -> list[tuple[int, int]]:
    """(top, left) of every window on a canvas of `size` (height, width), row by row."""
    rows, columns = (_anchors(side, protocol.window, protocol.stride) for side in size)
    return [(top, left) for top in rows for left in columns]


def resize_bilinear(plane: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """Resizes (h, w) or (h, w, C) to `size` (height, width): torch's `interpolate(mode="bilinear")` without antialias.

    OpenCV computes positions in float64; torch's float32 positions differ by up to 1e-5 of the value range.
    """
    return np.asarray(cv2.resize(plane, size[::-1], interpolation=cv2.INTER_LINEAR), dtype=np.float32)


def _resized(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    return cv2.resize(pixels, size[::-1], interpolation=cv2.INTER_LINEAR)  # type: ignore[return-value]


def _anchors(side: int, window: int, stride: int) -> list[int]:
    return [*range(0, side - window, stride), side - window]


@contextmanager
def _reading(path: Path | str, wanted: str = "a picture such as JPEG or PNG") -> Iterator[None]:
    """Turns whatever Pillow and the file system raise into an ImageError that names the file."""
    try:
        yield
    except (ImageError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{path}: no such file") from error
    except PermissionError as error:
        raise ImageError(f"{path}: expected a picture that can be read, got {error.strerror}") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{path}: expected {wanted}, this is in no such format") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{path}: {error}; shrink the picture first") from error
    except Exception as error:  # a damaged file makes decoders raise anything, RuntimeError and TypeError included
        raise ImageError(f"{path}: the picture cannot be decoded, it may be truncated ({error})") from error


def _pixels(picture: Image.Image, path: Path | str) -> NDArray[np.uint8]:
    frames = getattr(picture, "n_frames", 1)
    # Phones write MPO: one photo followed by previews and depth maps. Its first frame is the photo.
    if frames > 1 and picture.format != "MPO":
        raise ImageError(f"{path}: expected a single picture, got {frames} frames: save the one that is meant")
    return np.asarray(_rgb(ImageOps.exif_transpose(picture), path))


def _rgb(picture: Image.Image, path: Path | str) -> Image.Image:
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        lowest, _ = picture.getchannel("A").getextrema()
        if lowest != 255:
            raise ImageError(f"{path}: expected an opaque picture, got transparent pixels: flatten it on a background")
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode not in ("RGB", "RGBA", "L", "P", "1", "CMYK", "YCbCr"):
        raise ImageError(f"{path}: expected RGB, grey, palette or CMYK pixels, got mode {picture.mode}: save it as RGB")
    return picture.convert("RGB")
