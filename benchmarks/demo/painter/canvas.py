"""Camera, canvas and noise of the synthetic street scenes.

World frame: metres, X to the right of the road's centre, Y up from the ground, Z away from the camera. The canvas is
`SCALE` times larger than the finished picture, so that reducing it smooths edges; a second picture beside it holds, for
every pixel, what the surface is made of, how far away it is and how much light it emits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SIZE = 256
SCALE = 2
NEAR = 1.6  # metres; nothing is drawn closer to the camera

Colour = tuple[int, int, int]
Point = tuple[float, float]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Material:
    """A surface: row in the material table, class index, strength of its texture, and whether it lies on the ground."""

    index: int
    label: int
    texture: float
    ground: bool


MATERIALS: tuple[Material, ...] = (
    SKY := Material(0, 0, 0.0, False),
    FACADE := Material(1, 1, 0.05, False),
    ROUGH_FACADE := Material(2, 1, 0.14, False),
    ROAD := Material(3, 2, 0.0, True),
    MARKING := Material(4, 3, 0.0, True),
    PAVEMENT := Material(5, 4, 0.0, True),
    GRASS := Material(6, 5, 0.0, True),
    FOLIAGE := Material(7, 5, 0.35, False),
    PAINT := Material(8, 6, 0.02, False),
    CLOTH := Material(9, 7, 0.06, False),
    METAL := Material(10, 8, 0.04, False),
    PANEL := Material(11, 9, 0.01, False),
)
LABEL_OF = np.array([m.label for m in MATERIALS], np.uint8)
TEXTURE_OF = np.array([m.texture for m in MATERIALS], np.float32)
ON_GROUND = np.array([m.ground for m in MATERIALS])


def shade(colour: Colour, factor: float) -> Colour:
    """`colour` with every channel multiplied by `factor` and clipped to 0..255."""
    return tuple(min(255, max(0, int(channel * factor))) for channel in colour)  # type: ignore[return-value]


def depth_code(metres: float) -> int:
    """Distance as a byte: half metres, saturating at 127 m."""
    return min(255, max(0, int(metres * 2)))


@dataclass(frozen=True)
class Camera:
    """A pinhole camera `x` metres right of the centre of a road that bends by `bend` * Z**2 metres. Canvas pixels."""

    x: float
    height: float
    focal: float
    horizon: float
    centre: float
    bend: float

    def project(self, x: float, y: float, z: float) -> Point:
        """Canvas position of the world point (x, y, z)."""
        z = max(z, NEAR)
        scale = self.focal / z
        return self.centre + scale * (x - self.x + self.bend * z * z), self.horizon + scale * (self.height - y)

    def pixels(self, metres: float, z: float) -> float:
        """Length on the canvas of `metres` seen at distance `z`."""
        return self.focal * metres / max(z, NEAR)

    def ground(self) -> tuple[int, Floats, Floats]:
        """First canvas row below the horizon, and world X (rows, columns) and Z (rows, 1) of the ground seen there."""
        edge = SIZE * SCALE
        top = min(edge - 1, math.floor(self.horizon) + 1)
        rows = np.arange(top, edge, dtype=np.float32)[:, None] + np.float32(0.5)
        columns = np.arange(edge, dtype=np.float32)[None, :] + np.float32(0.5)
        z = np.float32(self.focal * self.height) / (rows - np.float32(self.horizon))
        x = (columns - np.float32(self.centre)) * (z / np.float32(self.focal)) - np.float32(self.bend) * z * z
        x += np.float32(self.x)
        return top, x, z


class Canvas:
    """Colour and surface pictures that are painted together, back to front; plus masks of shadow and of lamp light."""

    def __init__(self, colour: NDArray[np.uint8], surface: NDArray[np.uint8]) -> None:
        self.colour = Image.fromarray(colour)
        self.surface = Image.fromarray(surface)
        self.shadow = Image.new("L", (SIZE, SIZE))
        self.light = Image.new("L", (SIZE // 4, SIZE // 4))
        self._colour = ImageDraw.Draw(self.colour)
        self._surface = ImageDraw.Draw(self.surface)
        self._shadow = ImageDraw.Draw(self.shadow)
        self._light = ImageDraw.Draw(self.light)

    def polygon(
        self, points: Sequence[Point], colour: Colour, material: Material | None = None, z: float = 0, glow: int = 0
    ) -> None:
        """Fill a polygon. Without a material only the colour changes: detail on top of what was painted before."""
        self._colour.polygon(points, fill=colour)
        if material is not None:
            self._surface.polygon(points, fill=(material.index, depth_code(z), glow))

    def ellipse(
        self,
        centre: Point,
        rx: float,
        ry: float,
        colour: Colour,
        material: Material | None = None,
        z: float = 0,
        glow: int = 0,
    ) -> None:
        """Fill an axis-aligned ellipse of half axes `rx` and `ry` canvas pixels."""
        box = (centre[0] - rx, centre[1] - ry, centre[0] + rx, centre[1] + ry)
        self._colour.ellipse(box, fill=colour)
        if material is not None:
            self._surface.ellipse(box, fill=(material.index, depth_code(z), glow))

    def line(
        self, points: Sequence[Point], width: float, colour: Colour, material: Material | None = None, z: float = 0
    ) -> None:
        """Draw a line `width` canvas pixels thick (at least one)."""
        thickness = max(1, round(width))
        self._colour.line(points, fill=colour, width=thickness, joint="curve")
        if material is not None:
            self._surface.line(points, fill=(material.index, depth_code(z), 0), width=thickness, joint="curve")

    def cast_shadow(self, points: Sequence[Point], strength: int) -> None:
        """Darken the ground inside a polygon (canvas pixels); `strength` 255 is black."""
        self._shadow.polygon([(x / SCALE, y / SCALE) for x, y in points], fill=strength)

    def cast_light(self, centre: Point, rx: float, ry: float, strength: int) -> None:
        """Brighten everything inside an ellipse (canvas pixels) at night."""
        by = SCALE * 4
        x, y, rx, ry = centre[0] / by, centre[1] / by, rx / by, ry / by
        self._light.ellipse((x - rx, y - ry, x + rx, y + ry), fill=strength)


@cache
def noise_tile(octaves: tuple[int, ...]) -> Floats:
    """A 256 x 256 tile of smooth noise that repeats without seams: mean 0, deviation 1, one octave a cell size."""
    rng = np.random.Generator(np.random.PCG64(octaves[0] * 7919 + len(octaves)))
    total = np.zeros((256, 256), np.float32)
    for cell in octaves:
        grid = rng.standard_normal((256 // cell, 256 // cell)).astype(np.float32)
        padded = np.pad(grid, 4, mode="wrap")
        large = Image.fromarray(padded).resize(
            (padded.shape[1] * cell, padded.shape[0] * cell), Image.Resampling.BICUBIC
        )
        total += np.asarray(large)[4 * cell : 4 * cell + 256, 4 * cell : 4 * cell + 256] * np.float32(cell**0.5)
    total -= total.mean()
    total /= total.std()
    return total


@cache
def grain() -> Floats:
    """A long strip of normal noise, cut at random places for sensor noise."""
    return np.random.Generator(np.random.PCG64(20240617)).standard_normal(1 << 20).astype(np.float32)
