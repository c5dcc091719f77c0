"""Plots as data, with axes that map values to pixels; `templates/scatter.jinja` and `histogram.jinja` draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, log10
from typing import ClassVar

_LEFT, _RIGHT = 70, 456  # pixels


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` onto pixels from `start` to `end`."""

    low: float
    high: float
    start: float = _LEFT
    end: float = _RIGHT

    @classmethod
    def around(cls, values: Sequence[float], start: float = _LEFT, end: float = _RIGHT) -> Axis:
        """An axis with room around the values, in whole steps of its ticks."""
        low, high = min(values), max(values)
        room = (high - low) * 0.12 or abs(high) * 0.05 or 1.0
        step = _step(high - low + 2 * room)
        bottom, top = floor((low - room) / step) * step, ceil((high + room) / step) * step
        return cls(max(bottom, 0.0) if low >= 0 else bottom, top, start, end)

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    @property
    def middle(self) -> float:
        """The pixel halfway."""
        return (self.start + self.end) / 2

    @property
    def ticks(self) -> list[float]:
        """Round values between the ends."""
        step = _step(self.high - self.low)
        first, last = ceil(self.low / step - 1e-9), floor(self.high / step + 1e-9)
        return [round(index * step, 10) for index in range(first, last + 1)]


@dataclass(frozen=True)
class Series:
    """Points (x, y, label) of one kind; `hollow` marks are for figures that were not measured here."""

    name: str
    points: Sequence[tuple[float, float, str]]
    hollow: bool = False


@dataclass(frozen=True)
class Scatter:
    """Labelled points; those of a series that was measured here are connected in the order of x."""

    caption: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    template: ClassVar[str] = "scatter.jinja"

    @cached_property
    def x(self) -> Axis:
        """The horizontal axis."""
        return Axis.around([x for one in self.series for x, _, _ in one.points])

    @cached_property
    def y(self) -> Axis:
        """The vertical axis."""
        return Axis.around([y for one in self.series for _, y, _ in one.points], start=274, end=12)


@dataclass(frozen=True)
class Histogram:
    """How many windows have how many tokens after each merge: counts between two `edges`, and means, by its title."""

    caption: str
    edges: Sequence[float]
    counts: Mapping[str, Sequence[int]]
    means: Mapping[str, float]
    template: ClassVar[str] = "histogram.jinja"

    @property
    def x(self) -> Axis:
        """The axis that all merges share."""
        return Axis(self.edges[0], self.edges[-1])


def _step(span: float) -> float:
    """A step of 1, 2, 2.5 or 5 times a power of ten that cuts a span into about five."""
    power: float = 10.0 ** floor(log10(span / 5))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if span / (power * factor) <= 6)
