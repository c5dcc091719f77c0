"""Searches along one knob: a threshold or a layer, from the candidate that merges most to the one that merges least.

Accuracy rises along such a row of candidates up to some point, but not strictly: neighbours differ by less than noise.
So a candidate counts as good only together with every measured candidate between it and the best one. That makes the
answer monotone, and bisection finds it in a number of measurements that grows with the logarithm of the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from algm_deploy.bundle.records import Aim, Candidate, Point
from algm_deploy.errors import PlanError, RecipeError

PROBES = 5


@dataclass(frozen=True)
class Goal:
    """What to look for.

    reference  the candidate that merges most while its mIoU stays at or above `limit`, in percent
    best       the candidate of the best mIoU; there is no limit
    gmacs      the candidate that merges least while a window costs at most `limit` multiply-adds in 10^9
    throughput the candidate that merges least while the network takes at least `limit` pictures a second
    """

    aim: Aim
    limit: float | None = None

    @property
    def by_cost(self) -> bool:
        """Whether the limit is one of cost, which falls the more is merged."""
        return self.aim in ("gmacs", "throughput")

    def meets(self, point: Point) -> bool:
        """Whether a point reaches the limit."""
        return self.limit is None or self.nearness(point) >= (-self.limit if self.aim == "gmacs" else self.limit)

    def nearness(self, point: Point) -> float:
        """Larger for points that reach further towards the limit or beyond it.

        Raises:
            PlanError: multiply-adds are the aim, and not known for the network.
        """
        if self.aim == "throughput":
            return point.throughput_img_per_s or 0.0
        if self.aim != "gmacs":
            return point.miou_percent
        if point.gmacs_per_window_mean is None:
            raise PlanError("multiply-adds are not counted for this network: tune for mIoU instead")
        return -point.gmacs_per_window_mean


@dataclass(frozen=True)
class Found:
    """The outcome of a search: measured candidates by rising value, and the chosen one where any reaches the goal."""

    goal: Goal
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None

    @property
    def marked(self) -> Candidate:
        """The chosen candidate, or the one that misses the goal least."""
        return self.chosen or max(self.candidates, key=self.goal.nearness)


def search(goal: Goal, values: Sequence[float], measure: Callable[[float], Candidate], whole: bool = False) -> Found:
    """Looks for the goal among ascending values, the first of which merges most; `whole` measures them all.

    Raises:
        PlanError: a goal in multiply-adds for a network they are not known for.
    """
    # Cost rises with the values: seen from the end, the costly ones come first.
    curve = Curve(values[::-1] if goal.by_cost else values, measure)
    for index in range(len(values) if whole else 0):
        curve.at(index)
    chosen = best(curve) if goal.aim == "best" else first_that_keeps(curve, goal.meets, goal.nearness)
    return Found(goal, tuple(curve.candidates), chosen)


class Curve:
    """Candidates by their values in ascending or descending order, each measured at most once."""

    def __init__(self, values: Sequence[float], measure: Callable[[float], Candidate]) -> None:
        self.values = values
        self._measure = measure
        self._measured: dict[int, Candidate] = {}

    def at(self, index: int) -> Candidate:
        """The candidate of an index, measured now if it was not before."""
        if index not in self._measured:
            self._measured[index] = self._measure(self.values[index])
        return self._measured[index]

    def probe(self) -> None:
        """Measures the first, the last and a few candidates evenly between."""
        last = len(self.values) - 1
        for index in np.unique(np.linspace(0, last, min(PROBES, last + 1)).round().astype(int)).tolist():
            self.at(index)

    @property
    def indices(self) -> list[int]:
        """Indices of the measured candidates, ascending."""
        return sorted(self._measured)

    @property
    def candidates(self) -> list[Candidate]:
        """The measured candidates in ascending order of their value."""
        return sorted(self._measured.values(), key=lambda one: one.value)


def first_that_keeps(
    curve: Curve, good: Callable[[Point], bool], nearness: Callable[[Point], float]
) -> Candidate | None:
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


def best(curve: Curve) -> Candidate:
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
