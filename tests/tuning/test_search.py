"""Searches find the boundary in few measurements, also where neighbours are out of order."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algm_deploy.bundle.records import Candidate
from algm_deploy.errors import RecipeError
from algm_deploy.tuning.search import Curve, best, first_that_keeps, steps

COUNT = 100


def curve_of(miou: Callable[[float], float], count: int = COUNT) -> tuple[Curve, list[float]]:
    """A curve over 0, 1, .. and the candidates that were measured, in order."""
    measured: list[float] = []

    def measure(value: float) -> Candidate:
        measured.append(value)
        return Candidate(value=value, miou_percent=miou(value))

    return Curve([float(index) for index in range(count)], measure), measured


def keeping(curve: Curve, limit: float) -> Candidate | None:
    return first_that_keeps(curve, lambda point: point.miou_percent >= limit, lambda point: point.miou_percent)


@given(st.integers(0, COUNT - 1))
def test_a_monotone_curve_is_bisected(boundary: int) -> None:
    curve, measured = curve_of(lambda value: 70 + value / COUNT if value >= boundary else 60)
    found = keeping(curve, 70)
    assert found is not None
    assert found.value == boundary
    assert len(set(measured)) == len(measured) <= 5 + math.ceil(math.log2(COUNT / 4))


@given(st.lists(st.floats(60, 80), min_size=1, max_size=30), st.floats(60, 80))
def test_the_row_up_to_the_best_is_unbroken(values: list[float], limit: float) -> None:
    curve, _ = curve_of(lambda value: values[int(value)], len(values))
    found = keeping(curve, limit)
    good = [point.value for point in curve.candidates if point.miou_percent >= limit]
    if found is None:
        assert not good
    else:
        assert found.value in good
        assert found.value == 0 or found.value - 1 in {point.value for point in curve.candidates} - set(good)


def test_a_good_candidate_before_a_bad_one_does_not_count() -> None:
    curve, _ = curve_of(lambda value: 60 if value == 50 else 70 + value / COUNT)
    found = keeping(curve, 70)
    assert found is not None
    assert found.value == 51
    assert curve.at(0).miou_percent == 70


def test_candidates_behind_the_best_need_not_be_good() -> None:
    curve, _ = curve_of(lambda value: 80 - abs(value - 50))
    found = keeping(curve, 65)
    assert found is not None
    assert found.value == 35
    assert curve.at(COUNT - 1).miou_percent < 65


@given(st.integers(0, COUNT - 1))
def test_a_narrow_hill_between_the_probes_is_found(top: int) -> None:
    curve, _ = curve_of(lambda value: 80 - abs(value - top))
    found = keeping(curve, 79)
    assert found is not None
    assert found.value == max(top - 1, 0)


def test_nothing_qualifies() -> None:
    curve, measured = curve_of(lambda value: value)
    assert keeping(curve, COUNT) is None
    assert len(measured) < 12


@given(st.integers(0, COUNT - 1))
def test_the_best_of_a_hill(top: int) -> None:
    curve, _ = curve_of(lambda value: -abs(value - top))
    assert best(curve).value == top


def test_of_equally_good_candidates_the_first_is_best() -> None:
    curve, _ = curve_of(lambda value: min(value, 30))
    assert best(curve).value == 30


def test_one_candidate_is_enough() -> None:
    curve, measured = curve_of(lambda value: 70, 1)
    assert best(curve).value == 0
    assert keeping(curve, 70) is not None
    assert measured == [0]


def test_candidates_are_sorted_by_value_whatever_the_order_they_come_in() -> None:
    curve = Curve([3.0, 2.0, 1.0], lambda value: Candidate(value=value, miou_percent=value))
    curve.probe()
    assert [point.value for point in curve.candidates] == [1, 2, 3]


def test_steps_are_round_numbers() -> None:
    assert steps(0.5, 0.6, 0.03) == [0.5, 0.53, 0.56, 0.59]
    assert steps(0, 1, 0.1)[3] == 0.3
    assert steps(0.8, 1, 0.2) == [0.8, 1]  # in floats 1 - 0.8 is less than 0.2
    assert steps(0, 1, 0.1)[-1] == 1


@pytest.mark.parametrize(("low", "high", "step"), [(1, 1, 0.1), (1, 0, 0.1), (0, 1, 0), (0, 1, 2), (0, 1, 1e-6)])
def test_ranges_that_are_none(low: float, high: float, step: float) -> None:
    with pytest.raises(RecipeError, match="expected a range"):
        steps(low, high, step)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_ranges_of_no_number(broken: float) -> None:
    for place in range(3):
        given = [0.0, 1.0, 0.1]
        given[place] = broken
        with pytest.raises(RecipeError, match="expected a range"):
            steps(*given)
