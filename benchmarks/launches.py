"""Where one picture's time goes on a GPU in PyTorch: launches, their kernels, and what lies between.

    python benchmarks/launches.py CHECKPOINT PHOTOS --recipe segmenter_vit_s16_camvid -o launches.json

Photos one after the other, labels out, by the torch runtime after a warm-up, when each network is one CUDA graph:
dense; merged by thresholds; merged by budgets, as much of every photo as thresholds do on average; and truncated, which
drops as much and pays for no merge. `ms` is taken without the profiler, in turns, by the device's clock.

`between_us` are the times between two kernels of a graph, about half a microsecond each. Longer ones are not counted:
under the profiler the start of a graph, and of what a switch has chosen, takes many times as long as without. What `ms`
has beyond kernels and these is that.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trained import exported, new_record, parser_of, write

from algm_deploy.bundle.records import MergeTokens
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import parity_windows
from algm_deploy.pictures.sources import find_images
from algm_deploy.runners.contract import Array, Runner, runner
from algm_deploy.timing.protocols import Contestant, Request, times_of
from algm_deploy.timing.timers import Effort, typical_ms
from algm_deploy.timing.variants import planned, variant_bundle
from algm_deploy.tuning.budgets import budgets_like

Call = Callable[[], object]
PAUSE_US = 5.0


def main() -> None:
    parser = parser_of(__doc__, "launches.json", batches=(1,))
    parser.add_argument("--precision", choices=("fp16", "fp32"), default="fp16")
    parser.add_argument("--count", type=int, default=16, help="photos")
    parser.add_argument("--rounds", type=int, default=20, help="over all photos, for the times")
    options = parser.parse_args()
    record = new_record(options.checkpoint.resolve().name, precision=options.precision, photos=options.count)
    with tempfile.TemporaryDirectory() as scratch:
        bundle = exported(options, "labels", options.precision, Path(scratch))
        windows = parity_windows(bundle.recipe, find_images(options.photos), options.count)
        record["runs"] = networks_record(bundle, windows, options)
    write(record, options.output)


def networks_record(bundle: Bundle, windows: Array, options: argparse.Namespace) -> dict[str, Any]:
    """Of each network: tokens that are left, milliseconds, and where they go."""
    pieces = [windows[index : index + 1] for index in range(len(windows))]
    with ExitStack() as stack:
        runners = {name: stack.enter_context(runner(one, "torch")) for name, one in networks(bundle, windows).items()}
        for one in runners.values():
            one.warm_up(1)
        contestants = {name: Contestant(one) for name, one in runners.items()}
        effort = Effort(warmup=len(pieces), rounds=options.rounds, most_rounds=2 * options.rounds)
        times, _ = times_of(contestants, pieces, Request("duplicate", effort=effort), progress=False)
        found: dict[str, Any] = {}
        for name, one in contestants.items():
            found[name] = {
                "tokens": token_counts(one.run, windows).mean(0).tolist(),
                "ms": typical_ms(times[name]),
                "execution": one.run.execution,
                **timeline([on_device(one, piece) for piece in pieces]),
            }
            told = {key: value for key, value in found[name].items() if key != "kernels"}
            print(name, json.dumps(told), flush=True)
    return found


def networks(bundle: Bundle, windows: Array) -> dict[str, Bundle]:
    """What takes turns."""
    plan = bundle.recipe.merging
    with runner(bundle, "torch") as merged:
        mean = token_counts(merged, windows).mean(0)
    means = [MergeTokens(merge=str(layer), mean=float(m)) for layer, m in zip(plan.layers, mean, strict=True)]
    like = budgets_like(plan, means, bundle.recipe.network.grid)
    return {
        "dense": variant_bundle(bundle, "dense", []),
        "thresholds": bundle,
        "budgets": planned(bundle, like),
        "truncated": variant_bundle(bundle, "truncated", np.rint(mean).astype(int).tolist()),
    }


def token_counts(run: Runner, windows: Array) -> Array:
    """Patch tokens (pictures, merges)."""
    return np.concatenate([run.infer({"image": w[None]}, ["token_counts"])["token_counts"] for w in windows])


def on_device(one: Contestant, window: Array) -> Call:
    """One call on a picture that is there."""
    image = torch.from_numpy(window).to(one.run.device)
    return partial(one.run.infer_device, {"image": image, **one.thresholds}, [one.output])


def timeline(calls: Sequence[Call]) -> dict[str, Any]:
    """Microseconds of a run, the mean over pictures: of kernels by name, with how many there are, and between them."""
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    between, share = 0.0, 1 / len(calls)
    for call in calls:
        events = events_of(call)
        for start, end, kernel in events:
            kernels[kernel][0] += share
            kernels[kernel][1] += share * (end - start)
        gaps = [after[0] - before[1] for before, after in pairwise(events)]
        between += share * sum(gap for gap in gaps if 0 < gap < PAUSE_US)
    return {
        "launches": sum(count for count, _ in kernels.values()),
        "busy_us": sum(us for _, us in kernels.values()),
        "between_us": between,
        "kernels": [[key, *row] for key, row in sorted(kernels.items(), key=lambda item: -item[1][1])],
    }


def events_of(call: Call) -> list[tuple[float, float, str]]:
    """Start, end and name of all that one call does on the device, in order."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted((e.time_range.start, e.time_range.end, e.name) for e in on_device if e.time_range.elapsed_us() > 0)


if __name__ == "__main__":
    main()
