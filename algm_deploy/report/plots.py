"""Plots as inline SVG: histograms of token counts and scatter plots with a line through each series.

Series differ in colour and in the shape of their marks, so a plot can be read without colours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from algm_deploy.wording import merge_title

# Okabe and Ito's colours, which people with the common kinds of colour blindness can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, GRID = "#33363d", "#dfe2e7"
_WIDTH = 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 24, 12, 46


@dataclass(frozen=True)
class Series:
    """Points (x, y, label) of one kind; `hollow` marks are for figures that were not measured here."""

    name: str
    points: tuple[tuple[float, float, str], ...]
    hollow: bool = False


@dataclass(frozen=True)
class _Axis:
    """Maps values from `low` to `high` onto pixels from `start` to `end`; `ticks` are round values in between."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def scatter(x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """A scatter plot with labelled points; points of a measured series are connected in the order of x."""
    height = 320
    points = [point for one in series for point in one.points]
    x = _axis([p[0] for p in points], _LEFT, _WIDTH - _RIGHT)
    y = _axis([p[1] for p in points], height - _BOTTOM, _TOP)
    parts = list(_frame(x, y, height, x_label, y_label))
    for index, one in enumerate(series):
        parts += _series(one, index, x, y)
    return _svg(height, f"{y_label} against {x_label}", parts) + _legend(series)


def histogram(edges: Sequence[float], counts: Mapping[str, Sequence[int]], means: Mapping[str, float]) -> str:
    """Token counts of windows: one row of bars a merge on a shared axis, its mean as a vertical line."""
    row, gap = 96, 30
    height = len(counts) * (row + gap) + 30
    x = _Axis(edges[0], edges[-1], _LEFT, _WIDTH - _RIGHT, _ticks(edges[0], edges[-1]))
    parts: list[str] = []
    for index, (name, values) in enumerate(counts.items()):
        top = index * (row + gap) + 22
        parts += _bars(name, edges, values, means.get(name), (top, top + row), x, COLORS[index % len(COLORS)])
    parts += [_text(x(tick), height - 26, _plain(tick), "middle") for tick in x.ticks]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, height - 6, "tokens of a window", "middle"))
    return _svg(height, f"number of windows by their tokens after {', '.join(counts)}", parts)


def _bars(
    name: str,
    edges: Sequence[float],
    values: Sequence[int],
    mean: float | None,
    place: tuple[float, float],
    x: _Axis,
    color: str,
) -> Iterator[str]:
    top, bottom = place
    highest = max(*values, 1)
    y = _Axis(0, highest, bottom, top, ())
    yield _text(_LEFT, top - 8, f"after {merge_title(name)}", "start", weight=600)
    yield _line(_LEFT, top, _WIDTH - _RIGHT, top, GRID)
    yield _line(_LEFT, bottom, _WIDTH - _RIGHT, bottom, INK)
    yield _text(_LEFT - 6, top + 5, _plain(highest), "end")
    for low, high, value in zip(edges, edges[1:], values, strict=False):
        if value:
            left, right = x(low), x(high)
            yield (
                f'<rect x="{left + 0.5:.1f}" y="{y(value):.1f}" width="{max(right - left - 1, 1):.1f}" '
                f'height="{bottom - y(value):.1f}" fill="{color}"/>'
            )
    if mean is not None:
        yield _line(x(mean), top, x(mean), bottom, INK, dashed=True)
        anchor = "end" if x(mean) > _WIDTH * 0.7 else "start"
        yield _text(x(mean) + (-5 if anchor == "end" else 5), top - 8, f"mean {mean:.0f}", anchor)


def _series(series: Series, index: int, x: _Axis, y: _Axis) -> Iterator[str]:
    color = COLORS[index % len(COLORS)]
    ordered = sorted(series.points)
    if len(ordered) > 1 and not series.hollow:
        path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py, _ in ordered)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5" opacity="0.6"/>'
    rising = ordered[-1][1] >= ordered[0][1]
    for px, py, label in ordered:
        yield _mark(index, x(px), y(py), color, series.hollow)
        # The line through a point leaves two corners free, of which one lies towards the middle of the plot.
        right = x(px) > (x.start + x.end) / 2
        below = right != rising
        yield _text(x(px) + (-8 if right else 8), y(py) + (17 if below else -9), label, "end" if right else "start")


def _mark(shape: int, x: float, y: float, color: str, hollow: bool) -> str:
    paint = f'fill="{"#fff" if hollow else color}" stroke="{color}" stroke-width="2"'
    corners = {
        1: ((-5, -5), (5, -5), (5, 5), (-5, 5)),
        2: ((0, -6.5), (6, 5), (-6, 5)),
        3: ((0, -7), (7, 0), (0, 7), (-7, 0)),
    }.get(shape % 4)
    if corners is None:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {paint}/>'
    return f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)}" {paint}/>'


def _legend(series: Sequence[Series]) -> str:
    if len(series) < 2:
        return ""
    entries = [
        f'<li><svg viewBox="0 0 20 20" width="20" height="20" aria-hidden="true">'
        f"{_mark(index, 10, 10, COLORS[index % len(COLORS)], one.hollow)}</svg>{escape(one.name)}</li>"
        for index, one in enumerate(series)
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _frame(x: _Axis, y: _Axis, height: int, x_label: str, y_label: str) -> Iterator[str]:
    for tick in y.ticks:
        yield _line(x.start, y(tick), x.end, y(tick), GRID)
        yield _text(x.start - 8, y(tick) + 5, _plain(tick), "end")
    for tick in x.ticks:
        yield _line(x(tick), y.start, x(tick), y.start + 5, INK)
        yield _text(x(tick), y.start + 20, _plain(tick), "middle")
    yield _line(x.start, y.start, x.end, y.start, INK)
    yield _text((x.start + x.end) / 2, height - 6, x_label, "middle")
    middle = (y.start + y.end) / 2
    yield f'<g transform="rotate(-90 13 {middle:.1f})">{_text(13, middle, y_label, "middle")}</g>'


def _axis(values: Sequence[float], start: float, end: float) -> _Axis:
    """An axis with room around the values, in whole steps of its ticks."""
    low, high = min(values), max(values)
    room = (high - low) * 0.12 or abs(high) * 0.05 or 1.0
    step = _step(high - low + 2 * room)
    bottom, top = floor((low - room) / step) * step, ceil((high + room) / step) * step
    if low >= 0:
        bottom = max(bottom, 0.0)
    return _Axis(bottom, top, start, end, _ticks(bottom, top))


def _ticks(low: float, high: float) -> tuple[float, ...]:
    step = _step(high - low)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return tuple(round(index * step, 10) for index in range(first, last + 1))


def _step(span: float) -> float:
    """A step of 1, 2, 2.5 or 5 times a power of ten that cuts a span into about five."""
    power: float = 10.0 ** floor(log10(span / 5))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= 6)


def _plain(value: float) -> str:
    return f"{value:g}"


def _line(x1: float, y1: float, x2: float, y2: float, color: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dash}/>'


def _text(x: float, y: float, text: str, anchor: str, weight: int = 400) -> str:
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}"{bold}>{escape(text)}</text>'


def _svg(height: float, description: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}">'
        f"{''.join(parts)}</svg>"
    )
