"""Synthetic street scenes with labels, drawn from a seed: `scene(7)` is the same picture for everybody.

A scene is a small world (a road that may bend, what stands beside it, what moves on it, an hour of the day) seen by a
pinhole camera. Everything about it is synthetic; no photograph was used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from painter.canvas import (
    FACADE,
    FOLIAGE,
    GRASS,
    LABEL_OF,
    MARKING,
    ON_GROUND,
    PAVEMENT,
    ROAD,
    ROUGH_FACADE,
    SCALE,
    SIZE,
    SKY,
    TEXTURE_OF,
    Camera,
    Canvas,
    Colour,
    Floats,
    grain,
    noise_tile,
    shade,
)
from painter.things import (
    Mood,
    Stage,
    Style,
    barrier,
    board,
    bollard,
    building,
    car,
    conifer,
    house,
    lamp,
    person,
    traffic_light,
    traffic_sign,
    tree,
)

CLASSES = ("sky", "building", "road", "marking", "pavement", "vegetation", "car", "person", "pole", "sign")
PALETTE: tuple[Colour, ...] = (
    (110, 170, 220), (120, 110, 104), (96, 72, 124), (240, 240, 240), (224, 130, 190),
    (92, 150, 60), (24, 60, 170), (220, 40, 60), (170, 170, 120), (250, 210, 30),
)  # fmt: skip

Slice = Literal["day", "dusk", "night"]
SLICES: tuple[Slice, ...] = ("day", "dusk", "night")
Image8 = NDArray[np.uint8]
Tint = tuple[float, float, float]


@dataclass(frozen=True)
class Weather:
    """The hour and the air: sky colours from zenith to horizon, light, cloud cover, visibility, sensor noise."""

    slice: Slice
    zenith: Colour
    horizon: Colour
    cloud: Colour
    cover: float
    ambient: Tint
    contrast: float
    visibility: float
    noise: float
    mood: Mood


@dataclass(frozen=True)
class Street:
    """The ground plan. Lengths in metres: half the road's width, the pavement's width, where the fronts stand."""

    kind: str  # city, suburb, avenue or open
    half: float
    pavement: float
    front: float
    verge: bool
    lanes: int
    crossing: float
    side_road: float
    busy: float


def slice_name(seed: int) -> Slice:
    """Hour of the day of scene `seed`: three in five are by day, one in five at dusk and one in five at night."""
    return Random(f"hour {seed}").choices(SLICES, (3, 1, 1))[0]  # noqa: S311 - pictures, no secrets


def scene(seed: int) -> tuple[Image8, Image8]:
    """Draw scene `seed`.

    Returns:
        The RGB picture (256, 256, 3) uint8 and the class index of every pixel (256, 256) uint8, an index of `CLASSES`.
    """
    rng = Random(f"street {seed}")  # noqa: S311 - pictures, no secrets
    weather = _weather(slice_name(seed), rng)
    street, camera = _street(rng), _camera(rng)
    camera = replace(camera, x=street.half * rng.uniform(0.1, 0.62))
    colour, surface, world = _backdrop(street, camera, weather, rng)
    stage = Stage(Canvas(colour, surface), camera, rng, weather.mood)
    _fill(stage, street)
    return _develop(stage, weather, world)


# --- chance ---------------------------------------------------------------------------------------------------------


def _jitter(rng: Random, colour: Colour, amount: int) -> Colour:
    """A colour nearby: mostly lighter or darker, a little of another hue."""
    shift, hue = rng.randint(-amount, amount), amount // 3
    return tuple(min(255, max(0, c + shift + rng.randint(-hue, hue))) for c in colour)  # type: ignore[return-value]


def _weather(hour: Slice, rng: Random) -> Weather:
    return {"day": _day, "dusk": _dusk, "night": _night}[hour](rng, rng.choice((-1, 1)))


def _day(rng: Random, sun: int) -> Weather:
    """A clear or an overcast day, now and then a misty one."""
    grey = rng.random() < 0.35
    light = rng.uniform(0.78, 0.95) if grey else rng.uniform(0.95, 1.12)
    return Weather(
        slice="day",
        zenith=_jitter(rng, (150, 158, 168) if grey else (74, 128, 198), 16),
        horizon=_jitter(rng, (206, 210, 214) if grey else (196, 216, 232), 10),
        cloud=(246, 246, 248),
        cover=rng.choice((0.0, 0.15, 0.5, 0.9)),
        ambient=(light, light, light * 1.02) if grey else (light * 1.02, light, light * 0.95),
        contrast=rng.uniform(0.1, 0.25) if grey else rng.uniform(0.38, 0.58),
        visibility=rng.choice((60.0, 140.0, 320.0)),
        noise=rng.uniform(1.0, 4.0),
        mood=Mood(rng.uniform(0, 0.05), False, sun),
    )


def _dusk(rng: Random, sun: int) -> Weather:
    """A low sun that colours the horizon; half of the lamps burn already."""
    light = rng.uniform(0.4, 0.62)
    horizon = rng.choice(((236, 180, 128), (222, 152, 126), (198, 156, 162), (236, 204, 158)))
    return Weather(
        slice="dusk",
        zenith=_jitter(rng, (78, 92, 130), 18),
        horizon=_jitter(rng, horizon, 12),
        cloud=(190, 134, 128),
        cover=rng.choice((0.0, 0.3, 0.7)),
        ambient=(light * 1.08, light * 0.94, light * 0.92),
        contrast=0.25,
        visibility=rng.choice((90.0, 200.0)),
        noise=rng.uniform(3, 6),
        mood=Mood(rng.uniform(0.15, 0.5), rng.random() < 0.7, sun),
    )


def _night(rng: Random, sun: int) -> Weather:
    """Lamps, windows and headlights; much sensor noise."""
    light = rng.uniform(0.15, 0.26)
    return Weather(
        slice="night",
        zenith=_jitter(rng, (12, 16, 34), 8),
        horizon=_jitter(rng, (44, 44, 62), 14),
        cloud=(54, 54, 70),
        cover=rng.choice((0.0, 0.4)),
        ambient=(light * 0.92, light, light * 1.25),
        contrast=0.1,
        visibility=rng.choice((90.0, 220.0)),
        noise=rng.uniform(4, 9),
        mood=Mood(rng.uniform(0.15, 0.55), True, sun),
    )


def _camera(rng: Random) -> Camera:
    edge = SIZE * SCALE
    return Camera(
        x=0.0,
        height=rng.uniform(1.35, 2.3),
        focal=edge * rng.uniform(0.72, 1.1),
        horizon=edge * rng.uniform(0.4, 0.54),
        centre=edge * rng.uniform(0.36, 0.64),
        bend=rng.choice((0.0, 0.0, 1.0)) * rng.uniform(-0.004, 0.004),
    )


def _street(rng: Random) -> Street:
    kind = rng.choices(("city", "suburb", "avenue", "open"), (4, 3, 2, 3))[0]
    lanes = rng.choice((2, 2, 4)) if kind in ("city", "avenue") else 2
    half = lanes * rng.uniform(1.6, 1.9) + rng.choice((0.0, 2.2 if kind == "city" else 0.0))
    pavement = 0.0 if kind == "open" and rng.random() < 0.6 else rng.uniform(1.6, 4.2)
    setback = {"city": 0.0, "suburb": rng.uniform(4, 9), "avenue": rng.uniform(0, 4), "open": rng.uniform(9, 30)}[kind]
    return Street(
        kind=kind,
        half=half,
        pavement=pavement,
        front=half + pavement + setback + 0.2,
        verge=kind != "city" and rng.random() < 0.9,
        lanes=lanes,
        crossing=rng.uniform(5, 22) if rng.random() < (0.45 if kind != "open" else 0.05) else 0.0,
        side_road=rng.uniform(12, 40) if rng.random() < 0.4 else 0.0,
        busy=rng.random() ** 1.5 * (1.0 if kind != "open" else 0.35),
    )


# --- ground and sky -------------------------------------------------------------------------------------------------

World = tuple[int, Floats, Floats]


def _backdrop(street: Street, camera: Camera, weather: Weather, rng: Random) -> tuple[Image8, Image8, World]:
    """Sky and ground: colour and surface pictures at canvas size, and the ground's world coordinates."""
    edge = SIZE * SCALE
    top, x, z = camera.ground()
    colour = np.empty((edge, edge, 3), np.uint8)
    surface = np.zeros((edge, edge, 3), np.uint8)
    colour[:top] = _sky(top, weather, rng)
    surface[:top, :, 0], surface[:top, :, 1] = SKY.index, 255
    zones = _zones(street, x, z, rng)
    surface[top:, :, 0] = zones
    surface[top:, :, 1] = np.minimum(z * 2, 254)
    colour[top:] = _ground_colours(street, rng)[zones]
    return colour, surface, (top, x[::SCALE, ::SCALE], z[::SCALE])


def _sky(rows: int, weather: Weather, rng: Random) -> Image8:
    """Sky of `rows` canvas rows: a gradient, with clouds that flatten towards the horizon."""
    height = max(1, math.ceil(rows / SCALE))
    up = np.linspace(0, 1, height, dtype=np.float32)[:, None, None] ** np.float32(1.3)
    sky = np.array(weather.zenith, np.float32) * (1 - up) + np.array(weather.horizon, np.float32) * up
    sky = np.repeat(sky, SIZE, 1)
    if weather.cover:
        near = 60 / (height - np.arange(height) + 14.0)
        u = ((np.arange(SIZE) - SIZE / 2) * near[:, None] * 0.7 + rng.randrange(256)).astype(np.int64) & 255
        v = (near * 50 + rng.randrange(256)).astype(np.int64)[:, None] & 255
        field = noise_tile((64, 32, 16))[v, u] * 0.5 + weather.cover - 0.35
        share = np.clip(field, 0, 0.85)[..., None] * (1 - 0.5 * up)
        sky += (np.array(weather.cloud, np.float32) - sky) * share
    if weather.slice == "dusk":
        column = np.arange(SIZE, dtype=np.float32) - np.float32(rng.uniform(0, SIZE))
        sun = np.exp(-((column / 70) ** 2))[None, :, None] * up**3
        sky += sun * np.array((70, 46, 10), np.float32)
    if weather.slice == "night" and rng.random() < 0.5:
        stars = np.random.Generator(np.random.PCG64(rng.randrange(1 << 30))).integers(0, (height, SIZE), (24, 2))
        sky[stars[:, 0], stars[:, 1]] += 90
    picture = Image.fromarray(np.clip(sky, 0, 255).astype(np.uint8))
    return np.asarray(picture.resize((SIZE * SCALE, rows), Image.Resampling.BILINEAR))


def _zones(street: Street, x: Floats, z: Floats, rng: Random) -> Image8:
    """Material index of every ground pixel: road, markings, pavement and what lies beyond."""
    away = np.abs(x)
    kerb = street.half + street.pavement
    zones = np.where(away < street.half, ROAD.index, PAVEMENT.index).astype(np.uint8)
    if street.verge:
        zones[away > kerb] = GRASS.index
    if street.side_road:
        zones[
            (z > street.side_road) & (z < street.side_road + 6.5) & (away > street.half) & (x * rng.choice((-1, 1)) > 0)
        ] = ROAD.index
    zones[_markings(street, x, z, away, rng)] = MARKING.index
    return zones


def _markings(street: Street, x: Floats, z: Floats, away: Floats, rng: Random) -> NDArray[np.bool_]:
    """Painted lines: centre line, lane lines, edge lines, a zebra crossing with its stop line."""
    phase, wide = rng.uniform(0, 6), rng.uniform(0.09, 0.14)
    seen = z < rng.uniform(35, 60)
    dashes = ((z + phase) % 6 < 3) & seen
    painted = np.zeros(x.shape, bool)
    if rng.random() < 0.85:
        painted |= (away < wide) & (dashes if rng.random() < 0.6 else seen)
    if street.lanes == 4:
        painted |= (np.abs(away - street.half / 2) < wide) & dashes
    if rng.random() < 0.6:
        painted |= (np.abs(away - street.half + 0.35) < wide) & seen
    if street.crossing:
        inside = away < street.half - 0.3
        band = (z > street.crossing) & (z < street.crossing + 3)
        painted = painted & ~((z > street.crossing - 2) & (z < street.crossing + 4))
        painted |= inside & band & ((x + 50) % 1.0 < 0.5)
        painted |= inside & (x > 0.2) & (z > street.crossing - 1.5) & (z < street.crossing - 1.1)
    return painted


def _ground_colours(street: Street, rng: Random) -> Image8:
    """Base colour per material index."""
    table = np.zeros((len(LABEL_OF), 3), np.uint8)
    grey = rng.randint(72, 112)
    table[ROAD.index] = _jitter(rng, (grey, grey, grey + 3), 4)
    table[MARKING.index] = rng.choice(((226, 226, 220), (206, 204, 196), (232, 200, 90)))
    table[PAVEMENT.index] = _jitter(rng, rng.choice(((158, 152, 146), (140, 138, 138), (172, 150, 132))), 8)
    table[GRASS.index] = _jitter(rng, rng.choice(((96, 124, 60), (122, 132, 70), (78, 110, 56), (150, 140, 86))), 8)
    return table


# --- what stands there ----------------------------------------------------------------------------------------------

Job = tuple[float, Callable[[], None]]


def _fill(stage: Stage, street: Street) -> None:
    """Paint everything, back to front: the skyline, then fronts and yards, then what stands on road and pavement."""
    _skyline(stage, street)
    for jobs in (_fronts(stage, street) + _yards(stage, street), _roadside(stage, street) + _traffic(stage, street)):
        for _, paint in sorted(jobs, key=lambda job: -job[0]):
            paint()


def _skyline(stage: Stage, street: Street) -> None:
    """Woods or towers on the horizon."""
    rng, line, edge = stage.rng, stage.camera.horizon, SIZE * SCALE
    if rng.random() < 0.75:
        colour = rng.choice(((70, 96, 62), (86, 104, 66), (62, 84, 70)))
        base, swell = rng.uniform(4, 26), rng.uniform(2, 16)
        waves = [(rng.uniform(0.005, 0.05), rng.uniform(0, 7)) for _ in range(3)]
        hill = [base + swell * sum(math.sin(f * x + p) for f, p in waves) / 3 for x in range(0, edge + 9, 8)]
        ridge = [(8.0 * i, line - tall - rng.uniform(0, 4)) for i, tall in enumerate(hill)]
        stage.canvas.polygon([(0, line + 3), *ridge, (edge, line + 3)], colour, FOLIAGE, 100)
    if street.kind in ("city", "avenue") or rng.random() < 0.25:
        for _ in range(rng.randint(4, 14)):
            x, wide, top = rng.uniform(-30, edge), rng.uniform(16, 60), line - rng.uniform(12, 100)
            block = [(x, line + 2), (x + wide, line + 2), (x + wide, top), (x, top)]
            stage.canvas.polygon(block, shade((150, 148, 152), rng.uniform(0.6, 1.0)), FACADE, 90)


WALLS: tuple[Colour, ...] = (
    (188, 172, 148), (168, 96, 74), (206, 196, 178), (146, 142, 140), (178, 148, 110),
    (120, 84, 70), (210, 178, 130), (150, 164, 168), (222, 214, 204), (186, 120, 100),
)  # fmt: skip


def _style(stage: Stage, kind: str) -> Style:
    """A random facade that suits the kind of street."""
    rng = stage.rng
    wall = _jitter(rng, rng.choice(WALLS), 10)
    plain = Style(
        wall=wall,
        trim=shade(wall, rng.choice((0.7, 1.25, 1.4))),
        glass=_jitter(rng, (62, 76, 92), 14),
        material=rng.choice((FACADE, FACADE, ROUGH_FACADE)),
        bay=rng.uniform(2.2, 4.2),
        floor=rng.uniform(2.9, 3.6),
        width=rng.uniform(0.34, 0.6),
        height=rng.uniform(0.42, 0.66),
        shops=kind == "city" and rng.random() < 0.6,
        balconies=kind != "suburb" and rng.random() < 0.25,
    )
    if kind != "city" or rng.random() < 0.7:
        return plain
    glass, tall = _jitter(rng, (92, 116, 136), 22), rng.uniform(0.5, 0.85)
    trim = shade(wall, 0.9)
    return replace(plain, width=0.9, height=tall, trim=trim, material=FACADE, balconies=False, glass=glass)


def _fronts(stage: Stage, street: Street) -> list[Job]:
    """Rows of buildings along both sides, or single houses."""
    rng, jobs = stage.rng, []
    empty = {"city": 0.04, "suburb": 0.12, "avenue": 0.25, "open": 0.72}[street.kind]
    for side in (-1, 1):
        z = rng.uniform(-14, 6)
        while z < 95:
            long = rng.uniform(7, 22) if street.kind in ("city", "avenue") else rng.uniform(7, 12)
            gap = rng.choice((0.0, 0.0, 3.0)) if street.kind == "city" else rng.uniform(3, 14)
            if street.side_road and z - 3 < street.side_road + 3 < z + long + 3:
                z = street.side_road + 7.5
                continue
            if rng.random() > empty and z + long > 3:
                jobs.append((max(z, 0.0), _front(stage, street, side, z, z + long)))
            z += long + gap
    return jobs


def _front(stage: Stage, street: Street, side: int, near: float, far: float) -> Callable[[], None]:
    rng, style = stage.rng, _style(stage, street.kind)
    x = street.front + rng.uniform(0, 0.6)
    if street.kind in ("suburb", "open"):
        return partial(house, stage, style, side, x, near, far, rng.uniform(3.0, 6.0), rng.uniform(6, 10))
    tall = rng.uniform(9, 30) if street.kind == "city" else rng.uniform(6, 15)
    return partial(building, stage, style, side, x, near, far, tall, rng.uniform(8, 14))


LEAVES: tuple[Colour, ...] = (
    (86, 126, 54), (70, 112, 60), (112, 138, 58), (62, 98, 52), (168, 128, 48), (92, 120, 80),
)  # fmt: skip


def _leaf(rng: Random) -> Colour:
    return _jitter(rng, rng.choice(LEAVES), 12)


def _plant(stage: Stage, x: float, z: float) -> Job:
    rng = stage.rng
    tall, leaf, kind = rng.uniform(4, 11), _leaf(rng), rng.random()
    if kind < 0.2:
        return z, partial(conifer, stage, x, z, tall, shade(leaf, 0.75))
    return z, partial(tree, stage, x, z, tall, leaf, kind > 0.92)


def _yards(stage: Stage, street: Street) -> list[Job]:
    """Trees, hedges and walls between pavement and fronts, and on open land beyond."""
    rng, kerb = stage.rng, street.half + street.pavement
    jobs: list[Job] = []
    if street.kind == "city":
        return jobs
    for _ in range(int(rng.random() ** 1.4 * (26 if street.kind != "avenue" else 8))):
        reach = rng.uniform(kerb + 1.5, kerb + (12 if street.kind != "open" else 40))
        jobs.append(_plant(stage, _side(rng, reach), rng.uniform(6, 85)))
    jobs += [_fence(stage, street, side, kerb + 0.4) for side in (-1, 1) if rng.random() < 0.4]
    return jobs


def _fence(stage: Stage, street: Street, side: int, x: float) -> Job:
    rng = stage.rng
    near = rng.uniform(2, 25)
    far, tall = near + rng.uniform(8, 45), rng.uniform(0.7, 1.9)
    if street.side_road and near < street.side_road + 6.5:
        far = min(far, max(near + 2, street.side_road - 1))
    green = rng.random() < 0.6
    colour = shade(_leaf(rng), 0.85) if green else _jitter(rng, (168, 156, 142), 20)
    return near, partial(barrier, stage, side, x, near, far, tall, colour, FOLIAGE if green else ROUGH_FACADE)


def _roadside(stage: Stage, street: Street) -> list[Job]:
    """What stands at the kerb: lamps, trees, signs, lights, bollards, boards; and people."""
    rng, kerb = stage.rng, street.half + 0.45
    jobs: list[Job] = []
    if rng.random() < 0.75:
        sides = rng.choice(((1,), (-1,), (-1, 1)))
        jobs += [(z, partial(lamp, stage, side, kerb, z, 6.5)) for side, z in _row(rng, rng.uniform(14, 26), sides)]
    if street.pavement > 1.8 and rng.random() < {"avenue": 0.9, "city": 0.3}.get(street.kind, 0.0):
        leaf, tall = _leaf(rng), rng.uniform(5, 9)
        for side, z in _row(rng, rng.uniform(6, 12), (-1, 1)):
            jobs.append((z, partial(tree, stage, side * (kerb + 0.5), z, tall * rng.uniform(0.85, 1.15), leaf)))
    if rng.random() < 0.25:
        spots = _row(rng, rng.uniform(1.6, 3), (rng.choice((1, -1)),), 26)
        jobs += [(z, partial(bollard, stage, side * kerb, z)) for side, z in spots]
    for _ in range(rng.choice((0, 1, 1, 2, 3, 4))):
        z = rng.uniform(5, 34)
        jobs.append((z, partial(traffic_sign, stage, _side(rng, kerb), z)))
    if street.crossing or street.side_road:
        z = (street.crossing or street.side_road) - 1
        jobs += [(z, partial(traffic_light, stage, side * kerb, z)) for side in (-1, 1) if rng.random() < 0.7]
    return jobs + _boards(stage, street) + _people(stage, street)


def _side(rng: Random, x: float) -> float:
    return x * rng.choice((-1, 1))


def _row(rng: Random, step: float, sides: tuple[int, ...], reach: float = 75) -> list[tuple[int, float]]:
    """Side and distance of things that stand every `step` metres."""
    start = rng.uniform(4, 4 + step)
    return [(side, start + step * i) for i in range(max(0, math.ceil((reach - start) / step))) for side in sides]


def _boards(stage: Stage, street: Street) -> list[Job]:
    """Now and then a gantry over the road, or a board beside it."""
    rng, kerb = stage.rng, street.half + 0.9
    jobs: list[Job] = []
    if rng.random() < 0.1:
        left, z = rng.uniform(-street.half, 0), rng.uniform(16, 40)
        right = left + rng.uniform(3, street.half)
        jobs.append((z, partial(board, stage, left, right, z, 4.8, 6.8, (-kerb, kerb))))
    if rng.random() < 0.25:
        x, z, wide, low = _side(rng, kerb + 0.8), rng.uniform(7, 30), rng.uniform(1.4, 3.2), rng.uniform(1.0, 2.2)
        posts = (x - wide * 0.4, x + wide * 0.4)
        jobs.append((z, partial(board, stage, x - wide / 2, x + wide / 2, z, low, low + wide * 0.6, posts)))
    return jobs


def _people(stage: Stage, street: Street) -> list[Job]:
    """People on the pavement and on the crossing, some in pairs."""
    rng = stage.rng
    jobs: list[Job] = []
    for _ in range(int(street.busy * 16 + rng.random() * 3)):
        z = rng.uniform(4.5, 38)
        x = _side(rng, street.half + rng.uniform(0.4, max(0.8, street.pavement - 0.3)))
        if street.crossing and rng.random() < 0.3:
            x, z = rng.uniform(-street.half, street.half), street.crossing + rng.uniform(0.3, 2.7)
        jobs.append((z, partial(person, stage, x, z)))
        if rng.random() < 0.3:
            jobs.append((z + 0.2, partial(person, stage, x + 0.7, z + 0.2)))
    return jobs


def _traffic(stage: Stage, street: Street) -> list[Job]:
    """Moving vehicles in their lanes and, in towns, parked ones at the kerb."""
    rng = stage.rng
    jobs: list[Job] = []
    width = street.half / (street.lanes / 2)
    for _ in range(int(street.busy * 6 + rng.random() * 3)):
        away = rng.random() < 0.5
        lane = (rng.randrange(street.lanes // 2) + 0.5) * width
        jobs.append(_vehicle(stage, lane if away else -lane, rng.uniform(6.5, 60), away))
    if street.kind != "open" and street.half > 3.4 and rng.random() < 0.5:
        for side in (-1, 1):
            start, full = rng.uniform(3.5, 9), rng.random()
            spots = [start + 6.2 * i for i in range(9) if rng.random() < full]
            jobs += [_vehicle(stage, side * (street.half - 1.05), z, side > 0) for z in spots]
    return jobs


def _vehicle(stage: Stage, x: float, z: float, away: bool) -> Job:
    kind = stage.rng.choices(range(5), (4, 4, 3, 1.2, 0.6))[0]
    return z, partial(car, stage, x, z, away, kind)


# --- light ----------------------------------------------------------------------------------------------------------


def _develop(stage: Stage, weather: Weather, world: World) -> tuple[Image8, Image8]:
    """Turn the painted canvas into a picture: texture, shadow, light, haze, bloom, lens and sensor."""
    canvas, rng = stage.canvas, stage.rng
    picture = np.asarray(canvas.colour.reduce(SCALE)).astype(np.float32)
    material, depth, glow = np.moveaxis(np.asarray(canvas.surface)[::SCALE, ::SCALE], 2, 0)
    ground = ON_GROUND[material]
    relief = _screen_texture(material, rng)
    _ground_texture(relief, material, ground, world, rng)
    shadow = np.asarray(canvas.shadow.filter(ImageFilter.BoxBlur(1.2)), np.float32) * np.float32(weather.contrast / 255)
    relief *= np.where(ground, 1 - shadow, 1)
    light = _light(stage, weather, material, glow, world)
    picture *= relief[..., None]
    picture *= light
    _haze(picture, material, depth, glow, weather)
    _bloom(picture, glow, weather)
    return _expose(picture, weather, rng), LABEL_OF[material]


def _cut(tile: Floats, rng: Random) -> Floats:
    """The noise tile at a random shift."""
    return np.roll(tile, (rng.randrange(256), rng.randrange(256)), (0, 1))


def _screen_texture(material: Image8, rng: Random) -> Floats:
    """Brightness factor (256, 256) of surfaces that face the camera."""
    fine, coarse = _cut(noise_tile((4, 2, 1)), rng), _cut(noise_tile((32, 8)), rng)
    return np.float32(1) + TEXTURE_OF[material] * (fine * np.float32(0.5) + coarse * np.float32(0.3))


def _ground_texture(relief: Floats, material: Image8, ground: NDArray[np.bool_], world: World, rng: Random) -> None:
    """Grain, patches, slabs and wheel tracks, drawn in world coordinates so that they run into the distance."""
    _, x, z = world
    rows = slice(SIZE - len(x), SIZE)
    u, v = x + np.float32(500), np.broadcast_to(z, x.shape)
    fine = noise_tile((4, 2, 1))[(v * 22).astype(np.int64) & 255, (u * 22).astype(np.int64) & 255]
    coarse = noise_tile((64, 32, 16))[(v * 16).astype(np.int64) & 255, (u * 16).astype(np.int64) & 255]
    near = np.minimum(np.float32(1), 9 / z)
    rough = np.array([0, 0, 0, 0.05, 0.04, 0.045, 0.13, 0, 0, 0, 0, 0], np.float32) * np.float32(rng.uniform(0.5, 1.5))
    blotch = np.array([0, 0, 0, 0.06, 0.05, 0.05, 0.09, 0, 0, 0, 0, 0], np.float32) * np.float32(rng.uniform(0.2, 1.4))
    below = material[rows]
    texture = 1 + rough[below] * fine * near + blotch[below] * coarse
    if rng.random() < 0.7:
        size = np.float32(rng.uniform(0.8, 1.6))
        joint = ((u % size < 0.07) | (v % size < 0.07)) & (below == PAVEMENT.index) & (z < 22)
        texture -= joint * (np.float32(0.16) * near)
    if rng.random() < 0.5:
        tracks = np.abs(np.abs(np.abs(x) - 1.8) - 0.75) < 0.28
        texture -= (tracks & (below == ROAD.index)) * np.float32(rng.uniform(0.03, 0.09))
    relief[rows] *= np.where(ground[rows], texture, 1)


def _light(stage: Stage, weather: Weather, material: Image8, glow: Image8, world: World) -> Floats:
    """Light (256, 256, 3) that falls on every pixel: the hour's ambient, street lamps, headlights; emitters glow."""
    light = np.empty((SIZE, SIZE, 3), np.float32)
    light[:] = weather.ambient
    if weather.mood.lamps:
        strength = 0.9 if weather.slice == "night" else 0.35
        pools = stage.canvas.light.filter(ImageFilter.GaussianBlur(2.2)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        light += (np.asarray(pools, np.float32) * np.float32(strength / 200))[..., None] * np.array(
            (1.0, 0.82, 0.56), np.float32
        )
        _, x, z = world
        beam = np.exp(-(((x - stage.camera.x) / (1.2 + 0.16 * z)) ** 2) - z / 22) * np.float32(strength * 0.75)
        light[SIZE - len(x) :] += beam[..., None] * np.array((1.0, 0.95, 0.84), np.float32)
    light[material == SKY.index] = 1
    burning = glow > 0
    light[burning] = np.maximum(light[burning], glow[burning, None] * np.float32(1 / 235))
    return light


def _haze(picture: Floats, material: Image8, depth: Image8, glow: Image8, weather: Weather) -> None:
    """Mix distant surfaces into the colour of the horizon."""
    share = 1 - np.exp(-np.arange(256, dtype=np.float32) / 2 / np.float32(weather.visibility))
    mix = np.where((material == SKY.index) | (glow > 0), 0, share[depth])[..., None].astype(np.float32)
    picture += (np.array(weather.horizon, np.float32) - picture) * mix


def _bloom(picture: Floats, glow: Image8, weather: Weather) -> None:
    """Bright lamps spill over their surroundings."""
    if not weather.mood.lamps or not glow.any():
        return
    bright = np.clip(picture * (glow > 150)[..., None], 0, 255).astype(np.uint8)
    small = Image.fromarray(bright).reduce(2).filter(ImageFilter.GaussianBlur(3))
    picture += np.asarray(small.resize((SIZE, SIZE), Image.Resampling.BILINEAR), np.float32) * np.float32(1.5)


def _expose(picture: Floats, weather: Weather, rng: Random) -> Image8:
    """Vignette, white balance, exposure and sensor noise."""
    axis = np.linspace(-1, 1, SIZE, dtype=np.float32) ** 2
    vignette = 1 - np.float32(rng.uniform(0, 0.14)) * (axis[:, None] + axis[None, :])
    balance = np.array([rng.uniform(0.95, 1.05) for _ in range(3)], np.float32) * np.float32(rng.uniform(0.9, 1.1))
    picture *= vignette[..., None] * balance
    start = rng.randrange(grain().size - picture.size)
    picture += grain()[start : start + picture.size].reshape(picture.shape) * np.float32(weather.noise)
    return np.clip(picture, 0, 255).astype(np.uint8)
