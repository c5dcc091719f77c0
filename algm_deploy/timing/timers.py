"""Clocks, and contestants that take turns until their times are steady."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from algm_deploy.bundle.records import Spread
from algm_deploy.errors import BundleError

Call = Callable[[], object]
Times = NDArray[np.float64]

MOST_DRIFT = 0.05
"""Times are steady when the two halves of a run differ by less than this share."""

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}
SAMPLES_FOR_P99 = 100
"""Of fewer samples the 99th percentile is little but the largest value."""


@dataclass(frozen=True)
class Effort:
    """How long to measure: calls before the clock counts, and rounds over all pieces of work, at least and at most."""

    warmup: int = 5
    rounds: int = 4
    most_rounds: int = 16

    def __post_init__(self) -> None:
        if self.warmup < 0 or not 2 <= self.rounds <= self.most_rounds:
            raise BundleError(
                f"expected warm-up calls from 0 and 2 rounds or more, whose halves tell whether times are steady, got "
                f"{self.warmup} and {self.rounds} to {self.most_rounds}: change --warmup or --rounds"
            )


def host_ms(call: Call) -> float:
    """Milliseconds of the host's clock until `call` returns."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def cuda_ms(call: Call) -> float:
    """Milliseconds on the current CUDA stream between an event before `call` and one behind its work."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()  # what is still queued is somebody else's
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def take_turns(
    work: Sequence[Mapping[str, Callable[[], float]]], effort: Effort, advance: Callable[[], object] = lambda: None
) -> dict[str, Times]:
    """Milliseconds (rounds, pieces) of each contestant.

    The contestants take turns on every piece of work, in an order that rotates from round to round, so that whatever
    else slows the machine down slows all of them. Rounds go on until all are steady, or there are enough.

    Args:
        work: for each piece, a call by contestant that returns its own milliseconds.
        effort: warm-up calls of each contestant, and rounds.
        advance: called after each call, for a progress bar.
    """
    names = list(work[0])
    for index in range(effort.warmup):
        for name in names:
            work[index % len(work)][name]()
            advance()
    rounds: dict[str, list[list[float]]] = {name: [] for name in names}
    while not rounds[names[0]] or _goes_on(rounds, effort):
        shift = len(rounds[names[0]]) % len(names)
        ordered = names[shift:] + names[:shift]
        row: dict[str, list[float]] = {name: [] for name in names}
        for piece in work:
            for name in ordered:
                row[name].append(piece[name]())
                advance()
        for name in names:
            rounds[name].append(row[name])
    return {name: np.array(times) for name, times in rounds.items()}


def _goes_on(rounds: Mapping[str, list[list[float]]], effort: Effort) -> bool:
    done = len(next(iter(rounds.values())))
    if done < effort.rounds:
        return True
    return done < effort.most_rounds and not all(steady(np.array(times)) for times in rounds.values())


def typical_ms(times: Times) -> float:
    """Mean over the pieces of work of each one's median over the rounds, from times (rounds, pieces)."""
    return float(np.median(times, axis=0).mean())


def halves_of(times: Times) -> tuple[Times, Times]:
    """The first and the last half of the rounds, of two at least; a middle one is in neither."""
    half = len(times) // 2
    return times[:half], times[-half:]


def drift(times: Times) -> float:
    """How much the second half of the rounds differs from the first, as a share."""
    first, second = map(typical_ms, halves_of(times))
    return abs(second / first - 1)


def steady(times: Times) -> bool:
    """Whether times may be reported as numbers."""
    return drift(times) < MOST_DRIFT


def percentiles(times: Times) -> dict[str, float | None]:
    """Percentiles over all rounds and pieces; no 99th of fewer than 100 samples."""
    return {
        name: float(np.percentile(times, share)) if name != "p99" or times.size >= SAMPLES_FOR_P99 else None
        for name, share in PERCENTILES.items()
    }


def efficiency_by_round(dense: Times, merged: Times, truncated: Times) -> Spread | None:
    """Spread of `merge_efficiency` over single rounds: how far it can be trusted, as it divides small differences.

    Rounds in which dropping saves nothing have no efficiency and are not counted in `rounds`; None without any.
    """
    rounds = zip(dense.mean(1), merged.mean(1), truncated.mean(1), strict=True)
    known = [found for one in rounds if (found := merge_efficiency(*map(float, one))) is not None]
    if not known:
        return None
    low, p25, p75, high = np.percentile(known, (0, 25, 75, 100)).tolist()
    return Spread(rounds=len(known), min=low, p25=p25, p75=p75, max=high)


def merge_efficiency(dense: float, merged: float, truncated: float) -> float | None:
    """How much of the time that dropping the same tokens saves is saved by merging; None where that saves nothing."""
    return (dense - merged) / (dense - truncated) if truncated < dense else None
