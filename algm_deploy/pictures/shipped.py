"""The drawn street scenes that ship, with their labels: synthetic pictures for whoever has no photos at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from algm_deploy.package_data import DEMO_ASSETS
from algm_deploy.pictures.preprocessing import read_indices, read_photo

Image8 = NDArray[np.uint8]

_CROP = 7 / 8  # side of a crop in that of the scene
_STRIDE = 100  # from crop to crop, in places; shares no factor with the 33 x 33 places of a crop, so all get their turn


def scene_paths() -> list[Path]:
    """The 24 scenes, in an order in which the hours of the day are mixed from the first few on as they are in all."""
    hours = [sorted(folder.glob("*.png")) for folder in sorted((DEMO_ASSETS / "images").iterdir())]
    ranked = [((place + 0.5) / len(paths), path) for paths in hours for place, path in enumerate(paths)]
    return [path for _, path in sorted(ranked)]


def scene(number: int) -> tuple[Image8, Image8]:
    """Scene `number`, counted from 0, the same one everywhere.

    The first 24 are those that ship, in the order of `scene_paths`. The next 24 are their mirror images; after these
    come crops of 7/8 of the side and the crops' mirror images, each at another place. The first 50,000 all differ, but
    they show no more streets than the first 24: good for filling batches, not for measuring accuracy.

    Returns:
        The RGB picture (256, 256, 3) uint8, a crop (224, 224, 3), and the class index of every pixel (H, W) uint8.
    """
    paths = scene_paths()
    turn, index = divmod(number, len(paths))
    path = paths[index]
    labels = DEMO_ASSETS / "labels" / path.relative_to(DEMO_ASSETS / "images")
    crop, mirrored = divmod(turn, 2)
    picture, classes = (
        _cropped(pixels, crop)[:, :: -1 if mirrored else 1]
        for pixels in (read_photo(path), read_indices(labels).astype(np.uint8))
    )
    return picture.copy(), classes.copy()


def _cropped(pixels: Image8, crop: int) -> Image8:
    """All of a square picture (H, W, ...), or crop 1, 2, ... of it."""
    if crop == 0:
        return pixels
    side = round(len(pixels) * _CROP)
    places = len(pixels) - side + 1
    top, left = divmod(_STRIDE * crop % places**2, places)
    return pixels[top : top + side, left : left + side]
