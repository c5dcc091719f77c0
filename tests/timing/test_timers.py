"""Clocks, turns, steadiness and the arithmetic of times, on clocks that tell what a test wants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from msgspec import structs

from algm_deploy.errors import BundleError
from algm_deploy.timing import timers
from algm_deploy.timing.timers import (
    Effort,
    cuda_ms,
    drift,
    efficiency_by_round,
    host_ms,
    merge_efficiency,
    percentiles,
    steady,
    take_turns,
    typical_ms,
)


def test_host_clock_tells_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter((10.0, 10.25))
    monkeypatch.setattr(timers.time, "perf_counter", lambda: next(ticks))
    called = []
    assert host_ms(lambda: called.append("once")) == pytest.approx(250.0)
    assert called == ["once"]


@pytest.mark.gpu
def test_cuda_clock_waits_for_the_device() -> None:
    square = torch.randn(4096, 4096, device="cuda")
    small = min(cuda_ms(lambda: square[:64] @ square) for _ in range(5))
    large = min(cuda_ms(lambda: square @ square) for _ in range(5))
    assert 0 < small < large


def contestant(log: list[str], name: str, ms: Callable[[], float]) -> Callable[[], float]:
    def call() -> float:
        log.append(name)
        return ms()

    return call


def test_contestants_take_turns_in_rotating_order() -> None:
    log: list[str] = []
    piece = {name: contestant(log, name, lambda: 1.0) for name in "abc"}
    advanced: list[int] = []
    times = take_turns([piece, piece], Effort(warmup=1, rounds=3, most_rounds=9), lambda: advanced.append(1))
    assert "".join(log) == "abc" + "abcabc" + "bcabca" + "cabcab"
    assert len(advanced) == len(log)
    assert {name: one.shape for name, one in times.items()} == {"a": (3, 2), "b": (3, 2), "c": (3, 2)}


def test_warmup_is_not_counted() -> None:
    ticks = iter([1000.0, 1000.0, *[2.0] * 4])
    times = take_turns([{"a": lambda: next(ticks)}], Effort(warmup=2, rounds=4, most_rounds=4))
    assert times["a"].tolist() == [[2.0]] * 4


def test_rounds_go_on_until_steady() -> None:
    ticks = iter([20.0, 20.0, 10.0, 10.0, *[10.0] * 100])  # slow at first
    times = take_turns([{"a": lambda: next(ticks), "b": lambda: 1.0}], Effort(warmup=0, rounds=4, most_rounds=50))
    assert steady(times["a"])
    assert 4 < len(times["a"]) == len(times["b"]) < 50


def test_rounds_end_when_nothing_helps() -> None:
    ticks = iter(range(1, 100))  # ever slower
    times = take_turns([{"a": lambda: float(next(ticks))}], Effort(warmup=0, rounds=2, most_rounds=7))
    assert len(times["a"]) == 7
    assert not steady(times["a"])


def test_drift_compares_the_halves() -> None:
    assert drift(np.array([[10.0], [10.0], [11.0], [11.0]])) == pytest.approx(0.1)
    assert drift(np.array([[10.0], [10.0], [99.0], [10.4], [10.4]])) == pytest.approx(0.04)  # the middle one is in none
    assert steady(np.array([[100.0], [104.9]]))
    assert not steady(np.array([[100.0], [105.1]]))
    assert not steady(np.array([[100.0], [94.9]]))


@pytest.mark.parametrize("effort", [(5, 1, 16), (5, 0, 16), (-1, 4, 16), (5, 17, 16)])
def test_rounds_that_could_not_tell(effort: tuple[int, int, int]) -> None:
    with pytest.raises(BundleError, match="2 rounds or more, whose halves tell"):
        Effort(*effort)


def test_typical_time_is_the_mean_of_medians() -> None:
    # Pictures of 10 and 20 ms; one round of each was disturbed.
    assert typical_ms(np.array([[10.0, 20.0], [500.0, 20.0], [10.0, 700.0]])) == 15.0


def test_percentiles_over_all_samples() -> None:
    found = percentiles(np.arange(1.0, 102.0).reshape(101, 1))
    assert found == {"p50": 51.0, "p90": 91.0, "p99": 100.0}


def test_no_99th_percentile_of_a_few_samples() -> None:
    found = percentiles(np.arange(99.0).reshape(33, 3))
    assert found["p99"] is None
    assert found["p50"] == 49.0
    assert percentiles(np.arange(100.0).reshape(50, 2))["p99"] is not None


@pytest.mark.parametrize(
    ("dense", "merged", "truncated", "expected"),
    [
        (402.0, 217.0, 212.0, 185 / 190),
        (10.0, 5.0, 5.0, 1.0),
        (10.0, 10.0, 5.0, 0.0),
        (10.0, 12.0, 5.0, -0.4),
        (10.0, 5.0, 10.0, None),  # dropping tokens saved nothing: there is nothing to have a share of
        (10.0, 5.0, 11.0, None),
    ],
)
def test_merge_efficiency(dense: float, merged: float, truncated: float, expected: float | None) -> None:
    found = merge_efficiency(dense, merged, truncated)
    assert found == (None if expected is None else pytest.approx(expected))


def test_spread_of_the_efficiency_over_rounds() -> None:
    dense, truncated = np.full((4, 2), 10.0), np.array([[5.0, 5.0]] * 3 + [[10.0, 10.0]])
    merged = np.array([[5.0, 5.0], [4.0, 8.0], [7.0, 7.0], [6.0, 6.0]])
    found = efficiency_by_round(dense, merged, truncated)  # 1.0, 0.8, 0.6; in the last round dropping saves nothing
    assert found is not None
    assert structs.asdict(found) == pytest.approx({"rounds": 3, "min": 0.6, "p25": 0.7, "p75": 0.9, "max": 1.0})
    assert efficiency_by_round(dense, merged, dense) is None
