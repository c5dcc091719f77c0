"""Names and colours of a bundle's classes, and colours for values."""

from __future__ import annotations

import colorsys

import cv2
import numpy as np
from numpy.typing import NDArray

from algm_deploy.evaluation.datasets import SPECS, Classes
from algm_deploy.pictures.sliding import Labels
from algm_deploy.recipe.schema import Color, Recipe

# Steps that fill hue, saturation and value evenly, however many colours are taken (the R3 low-discrepancy sequence).
_STEPS = np.array([0.8191725134, 0.6710436067, 0.5497004779])


def classes_of(recipe: Recipe) -> Classes:
    """Names and palette of a recipe's classes: its own, its data set's, or numbers and distinct colours."""
    count = recipe.network.classes
    spec = SPECS.get(recipe.protocol.dataset)
    known = spec.classes if spec and len(spec.classes.names) == count else None
    names = recipe.class_names or (known.names if known else tuple(f"class {index}" for index in range(count)))
    return Classes(names, recipe.palette or (known.palette if known else distinct_colors(count)))


def colored(labels: Labels, classes: Classes) -> NDArray[np.uint8]:
    """Labels (...) in the colours (..., 3) of their classes, white where there is no such class."""
    palette = np.full((max(256, len(classes.palette)), 3), 255, np.uint8)
    palette[: len(classes.palette)] = classes.palette
    colors: NDArray[np.uint8] = palette[labels]
    return colors


def distinct_colors(count: int) -> tuple[Color, ...]:
    """`count` RGB colours that differ; the same index always has the same colour."""
    colors = []
    for index in range(count):
        hue, saturation, value = (index + 1) * _STEPS % 1
        red, green, blue = colorsys.hsv_to_rgb(hue, 0.4 + 0.6 * saturation, 0.4 + 0.6 * value)
        colors.append((round(255 * red), round(255 * green), round(255 * blue)))
    return tuple(colors)


def value_colors(values: NDArray[np.floating], low: float, high: float) -> NDArray[np.uint8]:
    """Colours (..., 3) of values (...), dark blue at `low` to yellow at `high` (readable for the colour-blind)."""
    share = np.clip((values - low) / max(high - low, 1e-9), 0, 1)
    colors: NDArray[np.uint8] = _CIVIDIS[np.rint(255 * share).astype(np.uint8)]
    return colors


_CIVIDIS: NDArray[np.uint8] = np.ascontiguousarray(
    cv2.applyColorMap(np.arange(256, dtype=np.uint8)[:, None], cv2.COLORMAP_CIVIDIS)[:, 0, ::-1]
)
