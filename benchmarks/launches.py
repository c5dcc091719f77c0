"""Where one picture's time goes on a GPU: launches, their kernels, and what lies between, dense and merged.

    python benchmarks/launches.py -o benchmarks/records/launches_h200.json     needs a GPU and the kernel library

The networks, pictures and thresholds of `runtimes.py`, one image, labels out, as the torch runtime runs them. `ms` is
taken without the profiler; beside it waits of the host, which gaps of 5 us and more are, last longer.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch_runtime import Bench

from algm_deploy.bundle.signature import CLAP_THRESHOLD, GBM_THRESHOLD
from runtimes import measured, parser_of, write_record

RUNS = 20
WAIT_US = 5.0


def main() -> None:
    options = parser_of(__doc__, "launches.json").parse_args()
    options.batches = [1]
    write_record(options, network_record)


@torch.inference_mode()
def network_record(name: str, options: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(name, options)
    thresholds = bench.thresholds[CLAP_THRESHOLD], bench.thresholds[GBM_THRESHOLD]
    calls = {v: bench.packed(bench.recipe, v, bench.images[:1], thresholds, {}, v).call for v in ("dense", "merged")}
    ms = {label: statistics.median(times) for label, times in measured(dict(calls), options.repeats).items()}
    return {"ms": ms} | {label: timeline(call) for label, call in calls.items()}


def timeline(call: Callable[[], Tensor]) -> dict[str, Any]:
    """Microseconds of one run, the mean of many: of kernels by name, and of gaps, each with how many there are."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(RUNS):
            call()
            torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events = sorted((e.time_range.start, e.time_range.end, e.name) for e in on_device if e.time_range.elapsed_us() > 0)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for start, end, kernel in events:
        kernels[kernel][0] += 1 / RUNS
        kernels[kernel][1] += (end - start) / RUNS
    gaps: list[float] = []
    each = len(events) // RUNS
    for first in range(0, each * RUNS, each):
        gaps += [after[0] - before[1] for before, after in pairwise(events[first : first + each])]
    return {
        "launches": len(events) / RUNS,
        "busy_us": sum(us for _, us in kernels.values()),
        "gaps": counted([gap for gap in gaps if 0 < gap < WAIT_US]),
        "waits": counted([gap for gap in gaps if gap >= WAIT_US]),
        "kernels": [[key, *row] for key, row in sorted(kernels.items(), key=lambda item: -item[1][1])],
    }


def counted(gaps: list[float]) -> list[float]:
    return [len(gaps) / RUNS, sum(gaps) / RUNS]


if __name__ == "__main__":
    main()
