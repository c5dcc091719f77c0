"""What budgets buy in time: dense, thresholds, budgets and truncated in turns, in one run, on photos.

    python benchmarks/budget_speed.py CHECKPOINT PHOTOS --recipe segmenter_vit_s16_camvid -o budget_speed.json

CHECKPOINT is a folder in the authors' format. Labels out. The budgets merge as much as the thresholds do on average on
the very photos that are timed, and truncated drops as much; each of the two merging networks and the dense one has
passed the parity chain in the same run. `duplicate`: one photo repeated, all photos in turn; `mixed`: different photos;
both by the device's clock. `latency`: one photo, from host memory to its label map there, by the host's clock.
Percentiles are over all photos and rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from algm_deploy.bundle.files import write_atomically
from algm_deploy.bundle.records import MergeTokens
from algm_deploy.bundle.store import Bundle
from algm_deploy.deployment import build, export, parity_windows, verify
from algm_deploy.environment import environment
from algm_deploy.errors import GateError
from algm_deploy.pictures.sources import find_images
from algm_deploy.report.tables import text_table
from algm_deploy.runners.contract import Array, Runner, runner
from algm_deploy.timing.protocols import batches_of
from algm_deploy.timing.timers import (
    Effort,
    cuda_ms,
    drift,
    host_ms,
    merge_efficiency,
    percentiles,
    take_turns,
    typical_ms,
)
from algm_deploy.timing.variants import variant_bundle, variant_runner
from algm_deploy.tuning.budgets import budgets_like

NAMES = ("dense", "thresholds", "budgets", "truncated")


def main() -> None:
    """Times every runtime, protocol and batch, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--recipe")
    parser.add_argument("--tau", type=float, help="CLAP threshold instead of the recipe's")
    parser.add_argument("--runtimes", nargs="+", default=["torch", "onnxruntime-cuda"])
    parser.add_argument("--precision", choices=("fp16", "fp32"), default="fp16")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--count", type=int, default=32, help="photos that are timed")
    parser.add_argument("--rounds", type=int, default=10, help="over all photos, at least")
    parser.add_argument("-o", "--output", type=Path, default=Path("budget_speed.json"))
    options = parser.parse_args()
    record: dict[str, Any] = {
        "schema_version": 1,
        "environment": asdict(environment(devices=True)),
        "checkpoint": options.checkpoint.resolve().name,
        "precision": options.precision,
        "output": "labels",
        "photos": options.count,
        "runs": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for runtime in options.runtimes:
            record["runs"][runtime] = run(runtime, options, Path(scratch) / runtime)
            with write_atomically(options.output) as path:
                path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record))


def run(runtime: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tokens, parity and times of one runtime."""
    photos = find_images(options.photos)[: options.count]
    settings: dict[str, Any] = {
        "output": "labels",
        "precision": options.precision,
        "max_batch": max(options.batches),
    }
    if options.tau is not None:
        settings["merging.clap_threshold"] = options.tau
    thresholds = proven(
        export(options.checkpoint, folder / "thresholds", options.recipe, settings).bundle, runtime, photos
    )
    windows = parity_windows(thresholds.recipe, photos, options.count)
    tokens = tokens_of(thresholds, runtime, windows)
    plan = thresholds.recipe.merging
    means = [MergeTokens(merge=str(layer), mean=float(m)) for layer, m in zip(plan.layers, tokens.mean(0), strict=True)]
    like = budgets_like(plan, means, thresholds.recipe.network.grid)
    settings = {k: v for k, v in settings.items() if not k.startswith("merging.")}
    shares = (like.clap_budget, like.gbm_budget)
    budgets = proven(
        export(options.checkpoint, folder / "budgets", options.recipe, settings, budget=shares).bundle, runtime, photos
    )
    kept = tokens_of(budgets, runtime, windows)
    if (kept != kept[0]).any():
        raise GateError(f"expected budgets that leave every photo the same tokens, got {kept.tolist()}")
    bundles = {
        "dense": proven(variant_bundle(thresholds, "dense", []), runtime, photos),
        "thresholds": thresholds,
        "budgets": budgets,
        "truncated": variant_bundle(budgets, "truncated", kept[0].tolist()),
    }
    result: dict[str, Any] = {
        "budget": dict(zip(("clap", "gbm"), shares, strict=True)),
        "tokens": {
            "thresholds": {
                "mean": tokens.mean(0).tolist(),
                "min": tokens.min(0).tolist(),
                "max": tokens.max(0).tolist(),
            },
            "budgets": kept[0].tolist(),
        },
        "times": {},
    }
    likes = {"dense": thresholds, "truncated": budgets}
    with ExitStack() as stack:
        runners = {
            name: stack.enter_context(
                variant_runner(one, runtime, likes[name]) if name in likes else runner(one, runtime)
            )
            for name, one in bundles.items()
        }
        for batch in options.batches:
            for protocol in ("latency", "duplicate") if batch == 1 else ("duplicate", "mixed"):
                name = f"{protocol} batch {batch}"
                result["times"][name] = found = times(runners, windows, protocol, batch, options.rounds)
                print(runtime, name, {one: round(row["ms"], 3) for one, row in found.items()}, flush=True)
    return result


def proven(bundle: Bundle, runtime: str, photos: list[Path]) -> Bundle:
    """The same, built, and verified on two photos."""
    build(bundle, runtime)
    report = verify(bundle, runtime, images=photos, count=2, progress=False)
    if not report.passed:
        raise GateError(
            f"{bundle.path.name}: parity failed: {[one.measured for one in report.links if not one.passed]}"
        )
    return bundle


def tokens_of(bundle: Bundle, runtime: str, windows: Array) -> Array:
    """Patch tokens (photos, merges) after each merge, photo by photo."""
    with runner(bundle, runtime) as opened:
        return np.concatenate(
            [opened.infer({"image": windows[i : i + 1]}, ["token_counts"])["token_counts"] for i in range(len(windows))]
        )


def times(
    runners: Mapping[str, Runner], windows: Array, protocol: Any, batch: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Milliseconds of each network, in turns: mean over the batches of each one's median, and percentiles."""
    batches = [windows[list(one)] for one in batches_of(protocol, len(windows), batch)]
    work = [{name: call(one, pictures, protocol) for name, one in runners.items()} for pictures in batches]
    found = take_turns(work, Effort(warmup=2 * len(work), rounds=rounds, most_rounds=2 * rounds))
    typical = {name: typical_ms(one) for name, one in found.items()}
    return {
        name: {
            "ms": typical[name],
            **percentiles(one),
            "images_per_s": 1e3 * batch / typical[name],
            "speedup": typical["dense"] / typical[name],
            "merge_efficiency": merge_efficiency(typical["dense"], typical[name], typical["truncated"]),
            "drift": drift(one),
            "rounds": len(one),
            "execution": dict(runners[name].execution),
        }
        for name, one in found.items()
    }


def call(run: Runner, pictures: Array, protocol: str) -> Any:
    """One timed call: of the network on its device, or for latency from host memory to host memory."""
    feeds = dict(run.signature.defaults)
    if protocol == "latency":
        arrays = {name: np.asarray(value, np.float32) for name, value in feeds.items()}
        return partial(host_ms, partial(run.infer, {"image": pictures, **arrays}, ["labels"]))
    image = torch.from_numpy(pictures).to(run.device)
    clock = cuda_ms if run.device.type == "cuda" else host_ms
    return partial(clock, partial(run.infer_device, {"image": image, **feeds}, ["labels"]))


def table(record: dict[str, Any]) -> str:
    """For terminals."""
    header = ("runtime", "", *(f"{name} ms" for name in NAMES), "budgets: times as fast", "efficiency", "p50", "p99")
    rows = []
    for runtime, found in record["runs"].items():
        for protocol, by_name in found["times"].items():
            one = by_name["budgets"]
            numbers = (one["speedup"], one["merge_efficiency"], one["p50"], one["p99"])
            shown = ("-" if x is None else f"{x:.3f}" for x in numbers)
            rows.append((runtime, protocol, *(f"{by_name[name]['ms']:.3f}" for name in NAMES), *shown))
    return text_table(header, rows)


if __name__ == "__main__":
    main()
