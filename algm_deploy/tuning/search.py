"""Searches along one knob: a threshold or a layer, from the candidate that merges most to the one that merges least.

Accuracy rises along such a row of candidates up to some point, but not strictly: neighbours differ by less than noise.
So a candidate counts as good only together with every measured candidate between it and the best one. That makes the
answer monotone, and bisection finds it in a number of measurements that grows with the logarithm of the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from algm_deploy.errors import GateError, RecipeError
from algm_deploy.wording import dataset_name

PROBES = 5


@dataclass(frozen=True)
class Point:
    """A measured candidate: `value` of the knob, and the record of its evaluation."""

    value: float
    record: Mapping[str, Any]

    @property
    def miou_percent(self) -> float:
        """mIoU in percent.

        Raises:
            GateError: no pixel of the evaluated images was labelled.
        """
        return miou_of(self.record)

    @property
    def gmacs(self) -> float | None:
        """Mean multiply-adds of a window in 10^9; None where they are not known for the network."""
        gmacs: float | None = self.record["gmacs_per_window_mean"]
        return gmacs


class Curve:
    """Candidates in ascending or descending order, each measured at most once."""

    def __init__(self, candidates: Sequence[float], measure: Callable[[float], Mapping[str, Any]]) -> None:
        self.candidates = candidates
        self._measure = measure
        self._measured: dict[int, Point] = {}

    def at(self, index: int) -> Point:
        """The point of a candidate, measured now if it was not before."""
        if index not in self._measured:
            self._measured[index] = Point(self.candidates[index], self._measure(self.candidates[index]))
        return self._measured[index]

    def probe(self) -> None:
        """Measures the first, the last and a few candidates evenly between."""
        last = len(self.candidates) - 1
        for index in np.unique(np.linspace(0, last, min(PROBES, last + 1)).round().astype(int)).tolist():
            self.at(index)

    @property
    def indices(self) -> list[int]:
        """Indices of the measured candidates, ascending."""
        return sorted(self._measured)

    @property
    def points(self) -> list[Point]:
        """The measured points in ascending order of their value."""
        return sorted(self._measured.values(), key=lambda point: point.value)


def first_that_keeps(curve: Curve, good: Callable[[Point], bool], nearness: Callable[[Point], float]) -> Point | None:
    """The first candidate of the unbroken row of `good` ones up to the candidate of the highest `nearness`.

    Candidates are measured until the answer is good and the one before it is not. Where no probe is good, the highest
    nearness is looked for among all candidates; None where that is not good either.
    """
    curve.probe()
    top = _tops(curve, nearness)[-1]
    if not good(curve.at(top)):
        top = _summit(curve, nearness)
    if not good(curve.at(top)):
        return None
    while True:
        row = [index for index in curve.indices if index <= top]
        failing = max((index for index in row if not good(curve.at(index))), default=-1)
        keeping = min(index for index in row if index > failing)
        if keeping - failing == 1:
            return curve.at(keeping)
        curve.at((failing + keeping) // 2)


def best(curve: Curve) -> Point:
    """A candidate of the highest mIoU that is higher than those measured beside it; of equals the first."""
    curve.probe()
    return curve.at(_summit(curve, lambda point: point.miou_percent))


def _tops(curve: Curve, height: Callable[[Point], float]) -> list[int]:
    """Indices of the highest measured points."""
    highest = max(height(curve.at(index)) for index in curve.indices)
    return [index for index in curve.indices if height(curve.at(index)) == highest]


def _summit(curve: Curve, height: Callable[[Point], float]) -> int:
    """Index of the first of the highest points, after measuring beside it until both its neighbours are known."""
    while True:
        top = _tops(curve, height)[0]
        below = max((index for index in curve.indices if index < top), default=top)
        above = min((index for index in curve.indices if index > top), default=top)
        if max(top - below, above - top) <= 1:
            return top
        curve.at((top + above + 1) // 2 if above - top > top - below else (below + top) // 2)


def steps(low: float, high: float, step: float) -> list[float]:
    """`low`, `low + step`, ... up to `high`, in decimal numbers that print as they are meant.

    Raises:
        RecipeError: a range that is empty, or more than ten thousand candidates.
    """
    # The small share lets a step through that misses the end of the range by rounding alone.
    count = (high - low) / step + 1e-9 if step > 0 else 0.0
    if not 1 <= count < 10_001 or not isfinite(low):
        raise RecipeError(
            f"expected a range from low to high in at most 10000 steps, got {low:g} to {high:g} by {step:g}"
        )
    return [round(low + index * step, 9) for index in range(int(count) + 1)]


def miou_of(record: Mapping[str, Any]) -> float:
    """mIoU in percent of an evaluation.

    Raises:
        GateError: no pixel was labelled.
    """
    if record["miou_percent"] is None:
        raise GateError(f"{dataset_name(record)}: no labelled pixel, so there is no mIoU to tune for")
    return float(record["miou_percent"])
