"""Seconds of the parts of a verification."""

from __future__ import annotations

import pytest

from algm_deploy.parity import stopwatch
from algm_deploy.parity.stopwatch import Stopwatch


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


def test_parts_add_up_whatever_stands_within_what(clock: Clock) -> None:
    watch = Stopwatch()
    with watch.part("numbers"):
        clock.now += 1
        with watch.part("fp64"):
            clock.now += 4
        clock.now += 2
    clock.now += 50  # of no part
    with watch.part("fp64"):
        clock.now += 8
    assert watch.seconds == {"numbers": 3, "fp64": 12}


def failing(watch: Stopwatch, clock: Clock) -> None:
    with watch.part("runtime"):
        clock.now += 1
        raise ValueError("of the runtime")


def test_a_part_that_fails_ends(clock: Clock) -> None:
    watch = Stopwatch()
    with watch.part("labels"):
        with pytest.raises(ValueError, match="of the runtime"):
            failing(watch, clock)
        clock.now += 2
    assert watch.seconds == {"labels": 2, "runtime": 1}
