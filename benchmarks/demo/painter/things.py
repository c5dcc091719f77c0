"""What stands in a synthetic street: each painter draws one thing at a place of the world onto a canvas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from painter.canvas import (
    CLOTH,
    FACADE,
    FOLIAGE,
    METAL,
    NEAR,
    PAINT,
    PANEL,
    SCALE,
    SIZE,
    Camera,
    Canvas,
    Colour,
    Material,
    Point,
    shade,
)

Face = Callable[[float, float], Point]

GLASS: Colour = (58, 68, 82)
WARM: tuple[Colour, ...] = ((255, 214, 140), (255, 232, 178), (248, 196, 112), (228, 236, 255))
SKIN: tuple[Colour, ...] = ((236, 188, 158), (205, 150, 115), (150, 102, 72), (98, 66, 48))
FABRICS: tuple[Colour, ...] = (
    (40, 44, 56), (70, 78, 96), (176, 52, 48), (52, 88, 150), (216, 210, 196), (96, 116, 70),
    (210, 150, 50), (120, 70, 110), (230, 120, 60), (60, 130, 130), (150, 130, 110), (30, 30, 30),
)  # fmt: skip
BODIES: tuple[Colour, ...] = (
    (196, 200, 204), (232, 232, 230), (38, 40, 44), (92, 98, 106), (150, 30, 34), (38, 66, 120),
    (160, 150, 130), (24, 70, 66), (206, 160, 40), (110, 36, 50), (72, 120, 168), (214, 92, 40),
)  # fmt: skip


@dataclass(frozen=True)
class Mood:
    """How the hour shows in things: share of lit windows, whether lamps burn, and the sunny side (-1 or 1)."""

    lit: float
    lamps: bool
    sun: int


@dataclass(frozen=True)
class Stage:
    """What every painter needs: where to paint, from where it is seen, chance, and the hour."""

    canvas: Canvas
    camera: Camera
    rng: Random
    mood: Mood


# --- buildings ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """Looks of a facade: colours, surface, bay and floor in metres, and the share of them that is window."""

    wall: Colour
    trim: Colour
    glass: Colour
    material: Material
    bay: float
    floor: float
    width: float
    height: float
    shops: bool
    balconies: bool


def building(
    stage: Stage, style: Style, side: int, x: float, near: float, far: float, height: float, depth: float
) -> None:
    """A block with a flat roof; its facade stands `x` metres from the road's centre, `near` to `far` metres away."""
    project = stage.camera.project
    lit = 1.0 if side != stage.mood.sun else 0.74
    if near > NEAR:
        _face(stage, style, lambda u, v: project(side * (x + u), v, near), depth, height, near, near, 0.9)
    _face(stage, style, lambda u, v: project(side * x, v, near + u), far - near, height, near, far, lit)


def house(
    stage: Stage, style: Style, side: int, x: float, near: float, far: float, height: float, depth: float
) -> None:
    """A detached house with a gable roof whose ridge runs along the road."""
    project, canvas = stage.camera.project, stage.canvas
    lit = 1.0 if side != stage.mood.sun else 0.74
    roof = stage.rng.choice(((128, 62, 46), (84, 72, 70), (104, 84, 64), (70, 78, 88), (150, 88, 60)))
    ridge, middle = height + depth * stage.rng.uniform(0.3, 0.5), x + depth / 2
    if near > NEAR:
        gable = [project(side * at, y, near) for at, y in ((x, height), (middle, ridge), (x + depth, height))]
        canvas.polygon(gable, shade(style.wall, 0.9), style.material, near)
        _face(stage, style, lambda u, v: project(side * (x + u), v, near), depth, height, near, near, 0.9)
    _face(stage, style, lambda u, v: project(side * x, v, near + u), far - near, height, near, far, lit)
    eaves = x - 0.4
    slope = [
        (eaves, height - 0.2, near - 0.4),
        (eaves, height - 0.2, far),
        (middle, ridge, far),
        (middle, ridge, near - 0.4),
    ]
    canvas.polygon([project(side * at, y, z) for at, y, z in slope], shade(roof, lit), style.material, near)
    _tiles(stage, side, roof, lit, [(eaves, height - 0.2), (middle, ridge)], near - 0.4, far)


def _tiles(stage: Stage, side: int, roof: Colour, lit: float, edge: list[Point], near: float, far: float) -> None:
    """Courses of tiles on a roof slope."""
    (x0, y0), (x1, y1) = edge
    if stage.camera.pixels(y1 - y0, near) < 16:
        return
    for step in range(1, 7):
        x, y = x0 + (x1 - x0) * step / 7, y0 + (y1 - y0) * step / 7
        ends = [stage.camera.project(side * x, y, z) for z in (near, far)]
        stage.canvas.line(ends, 1, shade(roof, lit * 0.82))


def _face(
    stage: Stage, style: Style, at: Face, length: float, height: float, near: float, far: float, lit: float
) -> None:
    """A wall with its windows, cornice and ground floor. `at` maps metres along and up the wall to the canvas."""
    canvas = stage.canvas
    canvas.polygon(
        [at(0, 0), at(length, 0), at(length, height), at(0, height)], shade(style.wall, lit), style.material, near
    )
    ground = min(height, 3.6) if style.shops else 0.4
    floors = int((height - ground - 0.5) / style.floor)
    bays = max(1, int(length / style.bay))
    for bay in range(bays):
        left = at(length * bay / bays, 1)[0]
        right = at(length * (bay + 1) / bays, 1)[0]
        if abs(right - left) < 2.2 or max(left, right) < 0 or min(left, right) > SIZE * SCALE:
            continue
        for floor in range(floors):
            _window(
                stage,
                style,
                at,
                length,
                length * (bay + 0.5) / bays,
                ground + floor * style.floor,
                abs(right - left),
                near,
                lit,
            )
        if style.shops:
            _shop(stage, at, length * bay / bays, length / bays, near)
    _bands(stage, style, at, length, height, ground, floors, near, lit)


def _window(
    stage: Stage, style: Style, at: Face, length: float, middle: float, base: float, pixels: float, z: float, lit: float
) -> None:
    """One window, `pixels` wide bays apart; more detail where there is room for it."""
    rng, canvas = stage.rng, stage.canvas
    half, low = min(length, style.bay) * style.width / 2, base + style.floor * (1 - style.height) * 0.6
    high = low + style.floor * style.height
    burning = rng.random() < stage.mood.lit
    colour = rng.choice(WARM) if burning else shade(style.glass, rng.uniform(0.75, 1.25) * lit)
    quad = [at(middle - half, low), at(middle + half, low), at(middle + half, high), at(middle - half, high)]
    if pixels > 9:
        edge = half + 0.12
        frame = [
            at(middle - edge, low - 0.15),
            at(middle + edge, low - 0.15),
            at(middle + edge, high + 0.1),
            at(middle - edge, high + 0.1),
        ]
        canvas.polygon(frame, shade(style.trim, lit))
    canvas.polygon(quad, colour, FACADE if burning else None, z, rng.randint(110, 230) if burning else 0)
    if pixels > 14:
        canvas.line([at(middle, low), at(middle, high)], pixels / 22, shade(style.trim, lit * 0.9))
        if not burning and rng.random() < 0.5:
            blind = low + (high - low) * rng.uniform(0.35, 0.8)
            canvas.polygon(
                [at(middle - half, blind), at(middle + half, blind), quad[2], quad[3]],
                shade((206, 200, 188), lit * 0.8),
            )
    if style.balconies and pixels > 5:
        rail = [
            at(middle - half * 1.5, base),
            at(middle + half * 1.5, base),
            at(middle + half * 1.5, base + 1),
            at(middle - half * 1.5, base + 1),
        ]
        canvas.polygon(rail, shade(style.trim, lit * 0.72))


def _shop(stage: Stage, at: Face, start: float, width: float, z: float) -> None:
    """A shop window with an awning, or a door."""
    rng, canvas = stage.rng, stage.canvas
    a, b = start + width * 0.08, start + width * 0.92
    burning = rng.random() < stage.mood.lit * 1.6
    colour = rng.choice(WARM) if burning else shade(GLASS, rng.uniform(0.6, 1.3))
    canvas.polygon(
        [at(a, 0.5), at(b, 0.5), at(b, 2.6), at(a, 2.6)], colour, FACADE if burning else None, z, 200 if burning else 0
    )
    awning = shade(rng.choice(FABRICS), 1.15)
    canvas.polygon([at(a, 2.5), at(b, 2.5), at(b, 3.1), at(a, 3.1)], awning)
    if rng.random() < 0.35:
        canvas.polygon([at(a, 0), at(a + 1, 0), at(a + 1, 2.3), at(a, 2.3)], shade(rng.choice(FABRICS), 0.8))


def _bands(
    stage: Stage, style: Style, at: Face, length: float, height: float, ground: float, floors: int, z: float, lit: float
) -> None:
    """Cornice, plinth and, on some facades, a string course per floor."""
    canvas, trim = stage.canvas, shade(style.trim, lit * 0.92)
    canvas.polygon([at(0, height - 0.45), at(length, height - 0.45), at(length, height), at(0, height)], trim)
    canvas.polygon([at(0, 0), at(length, 0), at(length, 0.4), at(0, 0.4)], shade(style.wall, lit * 0.7))
    if style.shops and floors > 1:
        canvas.polygon([at(0, ground - 0.3), at(length, ground - 0.3), at(length, ground), at(0, ground)], trim)


# --- plants ---------------------------------------------------------------------------------------------------------


def tree(stage: Stage, x: float, z: float, height: float, leaf: Colour, bare: bool = False) -> None:
    """A broad-leaved tree: trunk, and a crown of many blobs that are lighter towards the sun and the top."""
    camera, rng = stage.camera, stage.rng
    pixels = camera.pixels(1, z)
    foot, fork = camera.project(x, 0, z), camera.project(x, height * 0.45, z)
    top = camera.project(x, height * 0.62, z)
    trunk = shade((92, 74, 58), rng.uniform(0.8, 1.15))
    stage.canvas.line([foot, fork, top], max(2.0, 0.32 * pixels), trunk, FOLIAGE, z)
    radius = height * rng.uniform(0.27, 0.36)
    if bare:
        _branches(stage, fork, radius * pixels, trunk, z)
    else:
        _crown(stage, top, radius * pixels, leaf, z)
    spread = radius * 1.1
    shift = -stage.mood.sun * height * 0.25
    shadow = [(math.cos(a) * spread + shift, math.sin(a) * spread) for a in (0, 0.8, 1.57, 2.36, 3.14, 3.93, 4.71, 5.5)]
    stage.canvas.cast_shadow([camera.project(x + dx, 0, z + dz) for dx, dz in shadow], 190)


def _crown(stage: Stage, centre: Point, radius: float, leaf: Colour, z: float) -> None:
    rng, canvas = stage.rng, stage.canvas
    canvas.ellipse(centre, radius * 0.8, radius * 0.75, shade(leaf, 0.62), FOLIAGE, z)
    for _ in range(int(min(46, 8 + radius * 0.7))):
        angle, out = rng.uniform(0, math.tau), math.sqrt(rng.random()) * radius * 0.85
        dx, dy = math.cos(angle) * out, math.sin(angle) * out * 0.85
        bright = 0.86 - 0.3 * dy / radius + 0.16 * stage.mood.sun * dx / radius + rng.uniform(-0.12, 0.12)
        size = radius * rng.uniform(0.16, 0.36)
        canvas.ellipse((centre[0] + dx, centre[1] + dy), size, size * 0.8, shade(leaf, bright), FOLIAGE, z)


def _branches(stage: Stage, fork: Point, length: float, colour: Colour, z: float) -> None:
    for _ in range(int(min(22, 8 + length * 0.3))):
        angle, reach = stage.rng.uniform(-2.75, -0.4), length * stage.rng.uniform(0.6, 1.6)
        tip = (fork[0] + math.cos(angle) * reach, fork[1] + math.sin(angle) * reach)
        stage.canvas.line([fork, tip], max(1.0, length / 26), colour, FOLIAGE, z)


def conifer(stage: Stage, x: float, z: float, height: float, leaf: Colour) -> None:
    """A conifer of stacked tiers."""
    camera, canvas = stage.camera, stage.canvas
    canvas.line(
        [camera.project(x, 0, z), camera.project(x, height * 0.3, z)],
        max(2.0, camera.pixels(0.3, z)),
        (80, 62, 48),
        FOLIAGE,
        z,
    )
    for tier in range(5):
        low, half = height * (0.12 + 0.16 * tier), height * (0.24 - 0.042 * tier)
        points = [
            camera.project(x - half, low, z),
            camera.project(x + half, low, z),
            camera.project(x, low + height * 0.28, z),
        ]
        canvas.polygon(points, shade(leaf, 0.6 + 0.09 * tier), FOLIAGE, z)
    base = [
        camera.project(x - 1.4, 0, z - 0.8),
        camera.project(x + 1.4, 0, z - 0.8),
        camera.project(x + 1.4, 0, z + 0.8),
        camera.project(x - 1.4, 0, z + 0.8),
    ]
    canvas.cast_shadow(base, 170)


def barrier(
    stage: Stage, side: int, x: float, near: float, far: float, height: float, colour: Colour, material: Material
) -> None:
    """A hedge or a wall along the road."""
    project = stage.camera.project
    front, back = near if near > NEAR else NEAR, far
    wall = [project(side * x, y, z) for y, z in ((0, front), (0, back), (height, back), (height, front))]
    top = [project(side * at, height, z) for at, z in ((x, front), (x, back), (x + 0.7, back), (x + 0.7, front))]
    end = [project(side * at, y, front) for at, y in ((x, 0), (x + 0.7, 0), (x + 0.7, height), (x, height))]
    stage.canvas.polygon(top, shade(colour, 1.1), material, near)
    stage.canvas.polygon(wall, shade(colour, 0.8), material, near)
    stage.canvas.polygon(end, shade(colour, 0.92), material, near)


# --- vehicles -------------------------------------------------------------------------------------------------------

Profile = tuple[tuple[float, float, bool], ...]  # (metres from the rear, metres up, whether glass follows)

SEDAN: Profile = (
    (0, 0.3, False),
    (0, 0.92, False),
    (0.75, 1.0, True),
    (1.35, 1.42, False),
    (2.6, 1.44, True),
    (3.35, 1.0, False),
    (4.35, 0.84, False),
    (4.45, 0.3, False),
)
HATCH: Profile = (
    (0, 0.3, False),
    (0.02, 0.95, True),
    (0.5, 1.44, False),
    (2.3, 1.5, True),
    (3.05, 1.02, False),
    (3.85, 0.88, False),
    (3.95, 0.3, False),
)
SUV: Profile = (
    (0, 0.4, False),
    (0, 1.1, True),
    (0.35, 1.72, False),
    (2.7, 1.76, True),
    (3.45, 1.2, False),
    (4.5, 1.05, False),
    (4.6, 0.4, False),
)
VAN: Profile = (
    (0, 0.4, False),
    (0, 1.2, True),
    (0.08, 2.05, False),
    (3.9, 2.1, True),
    (4.7, 1.25, False),
    (5.2, 1.1, False),
    (5.3, 0.4, False),
)
BUS: Profile = (
    (0, 0.4, False),
    (0, 1.3, True),
    (0.05, 2.5, False),
    (0.2, 3.0, False),
    (9.8, 3.0, True),
    (10.0, 1.2, False),
    (10.0, 0.4, False),
)
KINDS: tuple[tuple[Profile, float], ...] = ((SEDAN, 1.8), (HATCH, 1.74), (SUV, 1.9), (VAN, 2.0), (BUS, 2.45))


def car(stage: Stage, x: float, z: float, away: bool, kind: int) -> None:
    """A vehicle centred at `x` whose near end is `z` metres away, seen from behind if `away`, else from the front."""
    profile, width = KINDS[kind]
    length = profile[-1][0]
    outline = [(u, v) for u, v, _ in profile]
    glass = [g for _, _, g in profile]
    if not away:
        outline = [(length - u, v) for u, v in reversed(outline)]
        glass = [*reversed(glass[:-1]), False]
    body = stage.rng.choice(BODIES)
    left, right = x - width / 2, x + width / 2
    _vehicle_shadow(stage, left, right, z, length)
    _vehicle_wheels(stage, (left + 0.08, right - 0.08), z, length)
    _vehicle_skin(stage, outline, glass, left, right, z, body)
    bend = stage.camera.bend * z * z
    flank = left if left + bend > stage.camera.x else right if right + bend < stage.camera.x else None
    if flank is not None:
        _vehicle_flank(stage, outline, flank, z, body, profile is BUS)
    _vehicle_end(stage, left, right, z, away, outline[1][1])


def _vehicle_shadow(stage: Stage, left: float, right: float, z: float, length: float) -> None:
    shift = -stage.mood.sun * 0.5
    corners = (
        (left - 0.15, z - 0.25),
        (right + 0.15, z - 0.25),
        (right + 0.15 + shift, z + length),
        (left - 0.15 + shift, z + length),
    )
    stage.canvas.cast_shadow([stage.camera.project(at, 0, depth) for at, depth in corners], 235)


def _vehicle_wheels(stage: Stage, sides: Point, z: float, length: float) -> None:
    """Dark underside and the near ends of the tyres."""
    project = stage.camera.project
    under = [
        project(sides[0], 0.12, z),
        project(sides[1], 0.12, z),
        project(sides[1], 0.5, z),
        project(sides[0], 0.5, z),
    ]
    stage.canvas.polygon(under, (22, 22, 24), PAINT, z)
    for inner, outer in ((sides[0], sides[0] + 0.24), (sides[1], sides[1] - 0.24)):
        stage.canvas.polygon(
            [
                project(inner, 0, z + 0.2),
                project(outer, 0, z + 0.2),
                project(outer, 0.5, z + 0.2),
                project(inner, 0.5, z + 0.2),
            ],
            (18, 18, 20),
            PAINT,
            z,
        )


def _vehicle_skin(
    stage: Stage, outline: Sequence[Point], glass: Sequence[bool], left: float, right: float, z: float, body: Colour
) -> None:
    """Everything between the flanks: the far panels first."""
    project = stage.camera.project
    for (u0, v0), (u1, v1), clear in reversed(list(zip(outline[:-1], outline[1:], glass[:-1], strict=True))):
        steep = abs(v1 - v0) / (math.hypot(u1 - u0, v1 - v0) + 1e-6)
        colour = shade(GLASS, 0.9) if clear else shade(body, 1.08 - 0.24 * steep)
        quad = [
            project(left, v0, z + u0),
            project(right, v0, z + u0),
            project(right, v1, z + u1),
            project(left, v1, z + u1),
        ]
        if not clear:
            stage.canvas.polygon(quad, colour, PAINT, z)
            continue
        stage.canvas.polygon(quad, shade(body, 0.9), PAINT, z)
        rim = 0.12
        stage.canvas.polygon(
            [
                project(left + rim, v0, z + u0),
                project(right - rim, v0, z + u0),
                project(right - 2 * rim, v1, z + u1),
                project(left + 2 * rim, v1, z + u1),
            ],
            colour,
        )


def _vehicle_flank(stage: Stage, outline: Sequence[Point], x: float, z: float, body: Colour, bus: bool) -> None:
    """The visible side with windows and wheels."""
    camera, canvas = stage.camera, stage.canvas
    lit = 0.78 if (x > 0) == (stage.mood.sun > 0) else 0.98
    canvas.polygon([camera.project(x, v, z + u) for u, v in outline], shade(body, lit), PAINT, z)
    top, length = max(v for _, v in outline), max(u for u, _ in outline)
    high = [(u, v) for u, v in outline if v > top * 0.93]
    start, stop = min(u for u, _ in high), max(u for u, _ in high)
    sill, lift = top * (0.45 if bus else 0.66), top * 0.93
    panes = 6 if bus else 2
    for pane in range(panes):
        a, b = start + (stop - start) * (pane + 0.06) / panes, start + (stop - start) * (pane + 0.94) / panes
        lean = 0.0 if bus else 0.28
        low_a, low_b = a - (lean if pane == 0 else 0), b + (lean if pane == panes - 1 else 0)
        quad = [(low_a, sill), (low_b, sill), (b, lift), (a, lift)]
        canvas.polygon([camera.project(x, v, z + u) for u, v in quad], shade(GLASS, 0.85))
    for share in (0.2, 0.8):
        middle = z + length * share
        hub = camera.project(x, 0.33, middle)
        rx = abs(camera.project(x, 0, middle + 0.33)[0] - camera.project(x, 0, middle - 0.33)[0]) / 2
        ry = camera.pixels(0.33, middle)
        canvas.ellipse(hub, max(rx, ry * 0.2), ry, (20, 20, 22), PAINT, z)
        canvas.ellipse(hub, max(rx, ry * 0.2) * 0.5, ry * 0.5, (120, 122, 126))


def _vehicle_end(stage: Stage, left: float, right: float, z: float, away: bool, height: float) -> None:
    """Lamps, plate and bumper of the near end."""
    project, canvas, burning = stage.camera.project, stage.canvas, stage.mood.lamps
    lamp: Colour = (226, 40, 34) if away else (255, 250, 226)
    y0, y1 = height * 0.68, height * 0.68 + 0.17
    for inner, outer in ((left + 0.08, left + 0.42), (right - 0.42, right - 0.08)):
        quad = [project(inner, y0, z), project(outer, y0, z), project(outer, y1, z), project(inner, y1, z)]
        canvas.polygon(
            quad,
            lamp if burning or not away else shade(lamp, 0.72),
            PAINT if burning else None,
            z,
            255 if burning else 0,
        )
        if burning and not away:
            canvas.cast_light(quad[0], stage.camera.pixels(1.3, z), stage.camera.pixels(0.9, z), 150)
    middle = (left + right) / 2
    canvas.polygon(
        [
            project(middle - 0.26, 0.5, z),
            project(middle + 0.26, 0.5, z),
            project(middle + 0.26, 0.62, z),
            project(middle - 0.26, 0.62, z),
        ],
        (222, 220, 210),
    )
    canvas.polygon(
        [project(left, 0.3, z), project(right, 0.3, z), project(right, 0.44, z), project(left, 0.44, z)], (44, 44, 48)
    )


# --- people ---------------------------------------------------------------------------------------------------------


def person(stage: Stage, x: float, z: float) -> None:
    """A standing or walking person."""
    rng, canvas, camera = stage.rng, stage.canvas, stage.camera
    tall = rng.uniform(1.5, 1.92) if rng.random() < 0.88 else rng.uniform(1.0, 1.3)
    foot, scale = camera.project(x, 0, z), camera.pixels(tall, z)

    def at(u: float, v: float) -> Point:
        return foot[0] + u * scale, foot[1] - v * scale

    coat, trousers, skin = rng.choice(FABRICS), shade(rng.choice(FABRICS), 0.8), rng.choice(SKIN)
    stride, sway = rng.uniform(0.02, 0.13), rng.uniform(-0.05, 0.05)
    canvas.line([at(0.04, 0.48), at(stride, 0.02)], 0.1 * scale, shade(trousers, 0.85), CLOTH, z)
    canvas.line([at(-0.04, 0.48), at(-stride, 0.02)], 0.1 * scale, trousers, CLOTH, z)
    for side in (-1, 1):
        canvas.line(
            [at(0.13 * side, 0.78), at(0.17 * side + sway, 0.6), at(0.15 * side + 2 * sway * side, 0.46)],
            0.07 * scale,
            shade(coat, 0.85),
            CLOTH,
            z,
        )
        canvas.ellipse(at(0.15 * side + 2 * sway * side, 0.45), 0.03 * scale, 0.03 * scale, skin, CLOTH, z)
    hem = rng.choice((0.44, 0.44, 0.3))
    canvas.polygon(
        [at(-0.14, 0.8), at(-0.06, 0.84), at(0.06, 0.84), at(0.14, 0.8), at(0.11, hem), at(-0.11, hem)], coat, CLOTH, z
    )
    canvas.polygon([at(0.02, 0.83), at(0.14, 0.8), at(0.11, hem), at(0.03, hem)], shade(coat, 0.82))
    _head(stage, at, scale, skin, z)
    if rng.random() < 0.35:
        canvas.polygon(
            [at(0.08, 0.74), at(0.2, 0.72), at(0.2, 0.52), at(0.09, 0.52)], shade(rng.choice(FABRICS), 0.9), CLOTH, z
        )
    shift = -stage.mood.sun * 0.8
    ground = ((x - 0.25, z), (x + 0.25, z), (x + 0.3 + shift, z + 0.7), (x - 0.2 + shift, z + 0.7))
    canvas.cast_shadow([camera.project(px, 0, pz) for px, pz in ground], 170)


def _head(stage: Stage, at: Face, scale: float, skin: Colour, z: float) -> None:
    hair = stage.rng.choice(((36, 28, 24), (84, 58, 38), (150, 116, 70), (120, 118, 116), (190, 60, 50)))
    stage.canvas.ellipse(at(0, 0.93), 0.062 * scale, 0.075 * scale, hair, CLOTH, z)
    if stage.rng.random() < 0.6:  # faces us
        stage.canvas.ellipse(at(0, 0.912), 0.05 * scale, 0.058 * scale, skin)


# --- poles and signs ------------------------------------------------------------------------------------------------


def _post(stage: Stage, x: float, z: float, height: float, colour: Colour, width: float = 0.2) -> float:
    """A vertical pole, never thinner than two canvas pixels, so that it stays visible; answers its width there."""
    pixels = max(2.0, stage.camera.pixels(width, z))
    stage.canvas.line([stage.camera.project(x, 0, z), stage.camera.project(x, height, z)], pixels, colour, METAL, z)
    shift = -stage.mood.sun * height * 0.5
    corners = ((x - 0.1, z), (x + 0.1, z), (x + 0.1 + shift, z + 0.4), (x - 0.1 + shift, z + 0.4))
    stage.canvas.cast_shadow([stage.camera.project(px, 0, pz) for px, pz in corners], 150)
    return pixels


def lamp(stage: Stage, side: int, x: float, z: float, height: float) -> None:
    """A street lamp with an arm over the road."""
    camera, canvas = stage.camera, stage.canvas
    colour = stage.rng.choice(((96, 100, 104), (60, 66, 64), (128, 130, 130)))
    pixels = _post(stage, side * x, z, height, colour, 0.24)
    reach = side * (x - 1.7)
    arm = [
        camera.project(side * x, height, z),
        camera.project(side * (x - 0.6), height + 0.35, z),
        camera.project(reach, height + 0.4, z),
    ]
    canvas.line(arm, pixels * 0.7, colour, METAL, z)
    head = camera.project(reach, height + 0.32, z)
    size = max(2.5, camera.pixels(0.45, z))
    burning = stage.mood.lamps
    canvas.ellipse(
        head, size, size * 0.4, (255, 226, 168) if burning else (214, 216, 214), METAL, z, 255 if burning else 0
    )
    if burning:
        pool = camera.project(reach, 0, z)
        canvas.cast_light(pool, camera.pixels(4.6, z), max(camera.pixels(1.5, z), 10), 150)
        canvas.cast_light(head, camera.pixels(1.6, z), camera.pixels(1.6, z), 130)


def bollard(stage: Stage, x: float, z: float) -> None:
    """A waist-high bollard."""
    _post(stage, x, z, 1.0, (70, 74, 78), 0.26)
    stage.canvas.line(
        [stage.camera.project(x, 0.7, z), stage.camera.project(x, 0.85, z)],
        stage.camera.pixels(0.26, z),
        (222, 220, 214),
    )


def traffic_sign(stage: Stage, x: float, z: float) -> None:
    """A round, triangular, square or octagonal sign on a pole."""
    canvas, rng = stage.canvas, stage.rng
    height = rng.uniform(2.3, 3.0)
    _post(stage, x, z, height, (138, 142, 146), 0.17)
    centre = stage.camera.project(x, height, z)
    radius = max(5.0, stage.camera.pixels(rng.uniform(0.42, 0.62), z))
    kind = rng.randrange(5)
    if kind == 0:  # speed limit
        _disc(canvas, centre, radius, 24, (206, 36, 40), (244, 244, 240), z)
        canvas.line(
            [(centre[0] - radius * 0.3, centre[1]), (centre[0] + radius * 0.3, centre[1])], radius * 0.5, (30, 30, 30)
        )
    elif kind == 1:  # warning
        _disc(canvas, centre, radius * 1.15, 3, (206, 36, 40), (244, 244, 240), z)
        canvas.line(
            [(centre[0], centre[1] - radius * 0.3), (centre[0], centre[1] + radius * 0.3)], radius * 0.18, (30, 30, 30)
        )
    elif kind == 2:  # stop
        _disc(canvas, centre, radius, 8, (244, 240, 240), (192, 30, 36), z, 0.88)
        canvas.line(
            [(centre[0] - radius * 0.5, centre[1]), (centre[0] + radius * 0.5, centre[1])],
            radius * 0.3,
            (244, 240, 240),
        )
    elif kind == 3:  # parking, crossing
        _disc(canvas, centre, radius * 1.1, 4, (240, 242, 244), (30, 84, 170), z, 0.88)
        canvas.line(
            [(centre[0] - radius * 0.2, centre[1] + radius * 0.4), (centre[0], centre[1] - radius * 0.4)],
            radius * 0.25,
            (244, 244, 244),
        )
    else:  # priority
        _disc(canvas, centre, radius, 24, (30, 84, 170), (40, 96, 186), z)
        canvas.line(
            [(centre[0], centre[1] + radius * 0.5), (centre[0], centre[1] - radius * 0.4)],
            radius * 0.26,
            (244, 244, 244),
        )


def _disc(
    canvas: Canvas, centre: Point, radius: float, sides: int, rim: Colour, fill: Colour, z: float, inner: float = 0.76
) -> None:
    """A regular polygon with a rim."""
    turn = {3: -math.pi / 2, 4: math.pi / 4, 8: math.pi / 8}.get(sides, 0.0)
    circle = [(math.cos(turn + math.tau * i / sides), math.sin(turn + math.tau * i / sides)) for i in range(sides)]
    canvas.polygon([(centre[0] + radius * c, centre[1] + radius * s) for c, s in circle], rim, PANEL, z)
    canvas.polygon([(centre[0] + radius * inner * c, centre[1] + radius * inner * s) for c, s in circle], fill)


def traffic_light(stage: Stage, x: float, z: float) -> None:
    """A traffic light on a pole."""
    camera, canvas = stage.camera, stage.canvas
    _post(stage, x, z, 3.4, (74, 78, 80), 0.2)
    low, high, half = 2.5, 3.7, 0.26
    canvas.polygon(
        [camera.project(x + dx, y, z) for dx, y in ((-half, low), (half, low), (half, high), (-half, high))],
        (26, 28, 30),
        PANEL,
        z,
    )
    burning = stage.rng.randrange(3)
    for i, colour in enumerate(((64, 220, 110), (250, 190, 50), (240, 50, 40))):
        centre = camera.project(x, low + 0.22 + 0.38 * i, z)
        size = max(1.5, camera.pixels(0.15, z))
        if i == burning:
            canvas.ellipse(centre, size, size, colour, PANEL, z, 230)
        else:
            canvas.ellipse(centre, size, size, shade(colour, 0.3))


def board(stage: Stage, left: float, right: float, z: float, low: float, high: float, posts: Sequence[float]) -> None:
    """A large board with lettering on posts: a direction sign, a gantry or a billboard."""
    rng, camera, canvas = stage.rng, stage.camera, stage.canvas
    for x in posts:
        _post(stage, x, z, high, (116, 120, 124), 0.26)
    ground = rng.choice(((24, 82, 160), (22, 104, 66), (236, 236, 230), (234, 190, 60)))
    ink: Colour = (30, 30, 34) if sum(ground) > 500 else (240, 240, 240)
    at = camera.project
    canvas.polygon([at(left, low, z), at(right, low, z), at(right, high, z), at(left, high, z)], ink, PANEL, z)
    rim = (high - low) * 0.05
    canvas.polygon(
        [
            at(left + rim, low + rim, z),
            at(right - rim, low + rim, z),
            at(right - rim, high - rim, z),
            at(left + rim, high - rim, z),
        ],
        ground,
    )
    rows = rng.randint(2, 3)
    for row in range(rows):
        y = low + (high - low) * (row + 0.5) / rows
        start = left + (right - left) * rng.uniform(0.08, 0.2)
        stop = right - (right - left) * rng.uniform(0.1, 0.45)
        canvas.line([at(start, y, z), at(stop, y, z)], camera.pixels((high - low) / rows * 0.36, z), ink)
